"""benchmark/editions.py: which changes of a script make another edition."""

import ast
import re

import pytest

from benchmark import editions
from common import ROOT

SCRIPTS = sorted((ROOT / "leanrl").glob("*.py"))
TURBO = (ROOT / "leanrl" / "dqn_torchcompile.py").read_text()
RANKS = (ROOT / "leanrl" / "ppo_atari_multigpu_torchcompile.py").read_text()
COUNT = {
    "loss": ("(q - target).square().mean()", "(q - target).abs().mean()"),
    "target": ("self.args.gamma * next_q", "next_q"),
    "network": ("nn.Linear(84, num_actions)", "nn.Linear(84, num_actions, bias=False)"),
    "function that train calls": ("args.start_e + progress", "args.start_e - progress"),
    "function of the class that the learner holds": ("return np.tanh", "return np.sinh"),
    "optimizer": ("beta1, beta2, eps = 0.9,", "beta1, beta2, eps = 0.8,"),
    "replay buffer": ("(self.stored + i) % self.size", "(self.stored - i) % self.size"),
    "environments": ("self.env.envs[i].reset()", "self.env.reset()"),
    "environments made": ("AutoresetMode.DISABLED", "AutoresetMode.SAME_STEP"),
    "train": ("run.step > args.learning_starts", "run.step >= args.learning_starts"),
    "constant": ("LOG_INTERVAL = 100", "LOG_INTERVAL = 1"),
    "default": ("learning_rate: float = 2.5e-4", "learning_rate: float = 2.6e-4"),
    "name of a flag": ("    train_frequency: int", "    frequency: int"),
    "compile mode": ('CompileMode = "default"', 'CompileMode = "max-autotune-no-cudagraphs"'),
    "compile option": ('options["cpp_wrapper"] = True', 'options["cpp_wrapper"] = False'),
    "config of dynamo": ("config.trace_autograd_ops = True", "config.trace_autograd_ops = False"),
    "config of a module": ("LOG_INTERVAL = 100", "torch._inductor.config.freezing = True\nLOG_INTERVAL = 100"),
    "environment variable": ("LOG_INTERVAL = 100", 'os.environ["OMP_NUM_THREADS"] = "1"\nLOG_INTERVAL = 100'),
    "precision": ("set_float32_matmul_precision(args.matmul_precision)", 'set_float32_matmul_precision("high")'),
    "threads": ("set_num_threads(args.threads)", "set_num_threads(1)"),
    "Run.advance": ("self.lengths += 1\n", "self.lengths += 2\n"),
    "Run.log": ('self.writer.add_scalar(f"losses/', 'self.writer.add_scalars(f"losses/'),
    "method that Run.log calls": ("self.diverged = True\n", "self.diverged = False\n"),
}
IGNORED = {
    "comment": ("# TD loss", "# loss"),
    "docstring": ("The learner.", "It learns."),
    "import": ("import json\n", "import json\nimport pickle\n"),
    "help of a flag": ("# discount factor", "# gamma"),
    "type of a flag": ("gamma: float", "gamma: int"),
    "alternatives of a flag": ('Literal["default", "max', 'Literal["default", "reduce-overhead", "max'),
    "order of flags": (
        re.search(r"(    gamma.*\n)(    tau.*\n)", TURBO)[0],
        "".join(re.search(r"(    gamma.*\n)(    tau.*\n)", TURBO).group(2, 1)),
    ),
    "limits of flags": ('AT_MOST = {"gamma": 1, ', "AT_MOST = {"),
    "function that nothing reaches": ("def epsilon(", "def epsilons(): ...\n\n\ndef epsilon("),
    "command line": ("vars(args)}\n        args = tyro.cli(", "vars(args)}\n        args = tyro.extras.cli("),
    "error of the command line": ("give a number from", "give one from"),
    "name of the folder": ("%Y-%m-%d", "%m-%d"),
    "signal": ("self.signal_time + 1", "self.signal_time + 2"),
    "resume": ("its checksum is wrong", "it is damaged"),
    "checkpoint": ("os.fsync(file.fileno())", "os.sync()"),
    "export": ("dynamic_shapes=shapes", "dynamic_shapes=list(shapes)"),
    "progress bar": ('"dynamic_ncols": True', '"dynamic_ncols": False'),
    "summary": ("json.dumps(self.config | results, indent=2)", "json.dumps(self.config | results)"),
}


def changed(text, change):
    old, new = change
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.parametrize("change", COUNT)
def test_another_edition(change):
    assert editions.fingerprint(changed(TURBO, COUNT[change])) != editions.fingerprint(TURBO)


@pytest.mark.parametrize("change", IGNORED)
def test_the_same_edition(change):
    assert editions.fingerprint(changed(TURBO, IGNORED[change])) == editions.fingerprint(TURBO)


def test_a_moved_function_is_no_change():
    source = re.search(r"def epsilon\(.*?\n\n\n", TURBO, re.DOTALL)[0]
    moved = TURBO.replace(source, "").replace("def train(", source + "def train(")
    assert moved != TURBO and editions.fingerprint(moved) == editions.fingerprint(TURBO)


def test_a_default_may_be_a_name():
    text = changed(TURBO, ("gamma: float = 0.99", "gamma: float = GAMMA"))
    text = changed(text, ("LOG_INTERVAL = 100", "GAMMA = 0.99\nLOG_INTERVAL = 100"))
    assert editions.fingerprint(changed(text, ("GAMMA = 0.99", "GAMMA = 0.9"))) != editions.fingerprint(text)


def test_what_one_device_executes():
    """A result on a CPU is as good after a change that only CUDA devices see, and the other way round."""
    atari = (ROOT / "leanrl" / "ppo_atari_envpool_torchcompile.py").read_text()
    for text, change, device, other in [
        (TURBO, ('options["combo_kernels"] = True', "pass"), "cuda", "cpu"),
        (TURBO, ('options["cpp_wrapper"] = True', "pass"), "cpu", "cuda"),
        (atari, ("torch.channels_last if device", "torch.preserve_format if device"), "cpu", "cuda"),
    ]:
        after = changed(text, change)
        assert editions.fingerprint(after, device) != editions.fingerprint(text, device)
        assert editions.fingerprint(after, other) == editions.fingerprint(text, other)


@pytest.mark.parametrize("available, device", [(False, "cpu"), (True, "cuda")])
def test_an_edition_is_of_the_device_that_measures(available, device, monkeypatch):
    monkeypatch.setattr(editions.torch.cuda, "is_available", lambda: available)
    path = ROOT / "leanrl" / "dqn_torchcompile.py"
    stored = editions.today(path)
    assert stored["editions"] == {"dqn_torchcompile": editions.fingerprint(TURBO, device)}
    monkeypatch.undo()
    assert editions.changed(stored) == []


def test_what_the_ranks_do_together_counts():
    collective = changed(RANKS, ("collective(dist.all_reduce, tensor)", "collective(dist.reduce, tensor)"))
    assert editions.fingerprint(collective) != editions.fingerprint(RANKS)


def test_a_population_counts_like_its_agents():
    text = (ROOT / "leanrl" / "sac_population_torchcompile.py").read_text()
    saves = changed(text, ("give the folder of a population", "give its folder"))
    counts = changed(text, ("run.advance(rewards[i], ended[i])", "run.advance(rewards[i], ended[0])"))
    assert editions.fingerprint(saves) == editions.fingerprint(text) != editions.fingerprint(counts)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_algorithm_counts(path):
    """All classes and functions above the run, `advance` and `log`, but not the rest of the run."""
    text = path.read_text()
    algorithm = ast.parse(text.split("# The run: ")[0])
    names = {node.name for node in algorithm.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))} - {"Args"}
    parts = editions.counted(text, "cpu")
    counted = {node.name for node in parts if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert counted >= names | {"advance", "log"}
    assert not counted & {"Run", "Args", "parse_args", "prepare", "save", "restore"}


@pytest.mark.parametrize("part", ["# The run:", "class Args:", r"def train\(", r"def (advance|log)\("])
def test_all_code_of_another_program_counts(part):
    other = re.sub(part, lambda match: match[0].replace(" ", " other_"), TURBO)
    assert other != TURBO
    for change in ("signal", "checkpoint", "error of the command line"):
        assert editions.fingerprint(changed(other, IGNORED[change])) != editions.fingerprint(other)
    for change in ("comment", "docstring"):
        assert editions.fingerprint(changed(other, IGNORED[change])) == editions.fingerprint(other)


def test_all_code_of_a_study_counts():
    text = (ROOT / "benchmark" / "studies" / "tips.py").read_text()
    edition = editions.fingerprint(text)
    assert edition == editions.fingerprint(text + "\n# a comment\n")
    assert edition != editions.fingerprint(text + "\nprint()\n")


def test_an_edition_is_the_same_in_all_versions_of_python():
    """The number is of a short script, computed once: another one marks all stored results as earlier editions."""
    text = '''\
"""A script."""

class Args:
    """Flags."""
    rate: float = 1e-3  # a flag

def train(args, /, *, seed: int = 1) -> None:
    return [f"{step:.1f} {args.rate!r}" for step in range(3) if (half := step // 2)]

# ---
# The run
# ---
class Run:
    def advance(self):
        match self.step:
            case {"a": [1, *_]}:
                torch.set_num_threads(1)
'''
    assert editions.fingerprint(text) == "00d148c962f6"
