"""What each trick is worth: it is taken out of a copy of its script, which then trains beside the untouched one.

    python benchmark/ablation.py --verify         # the copies learn the same, up to rounding; a minute
    python benchmark/ablation.py                  # measure, write results and the tables of doc/speed.md; hours
    python benchmark/ablation.py --algos dqn --modes compile
    python benchmark/ablation.py --check          # the tables are what the results give

A trick is a replacement in the script's text: the scripts have no switches. A round trains the script and all of its
copies in turns (run.py), and a trick's worth is the ratio of the two speeds within a round, above 1 where it pays.
"""

import contextlib
import io
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))
import run  # noqa: E402
import turns  # noqa: E402
from machine import machine, slug  # noqa: E402
from tables import publish  # noqa: E402

PAGE = ROOT / "doc" / "speed.md"
EAGER = ("eager", "cudagraphs")  # modes of run.py in which nothing is compiled
COMPILED = ("compile", "compile+cudagraphs")
UNTOUCHED = "untouched"
TOLERANCE = 0.01  # of the way that the parameters go


@dataclass(frozen=True)
class Trick:
    name: str
    """for the folder of its runs"""
    what: str
    """what the script does, in place of what"""
    where: str
    """its function"""
    modes: tuple[str, ...]
    """in which the trick is there, and can be taken away: a compiler removes much that is superfluous by itself"""
    edits: tuple[tuple[str, str], ...]
    """texts of the script, each there once, and what they become; some leave lines behind a return"""


def batched_critics():
    old = "return vmap(self.call, randomness="
    new = "return torch.stack([self.member(weights, i, *(x[i] for x in inputs)) for i in range(len(self.networks))])"
    what = "the critics as one batched matmul per layer, not one after the other"
    return Trick("batched_critics", what, "Apply.__call__", EAGER + COMPILED, ((old, f"{new}\n        {old}"),))


def flat_adam(*created):
    """`created` are calls of Adam, and the `Apply` whose parameters each is for."""
    init = """
    def __init__(self, weights, lr, network=None):
        self.parts = lambda flat: list(network.unflatten(flat).values()) if network else [flat]
        self.parameters = self.parts(weights)
        self.optimizer = torch.optim.Adam(self.parameters, lr, (BETA1, BETA2), EPS)
"""
    old = "        self.decay.mul_(self.betas)"
    step = f"""\
        for parameter, part in zip(self.parameters, self.parts(gradient), strict=True):
            parameter.grad = part
        return self.optimizer.step()
{old}"""
    edits = [("\n    def __init__(self, weights, lr):\n", init), (old, step)]
    edits += [(call, f"{call[:-1]}, {network})") for call, network in created]
    what = "Adam on one flat vector, not `torch.optim.Adam` on each parameter"
    return Trick("flat_adam", what, "Adam.step", EAGER, tuple(edits))


def transposed_storage():
    old = "piece.view((*lead, *reversed(shape))).mT if len(shape) == 2 else piece.view((*lead, *shape))"
    what = "matrices stored transposed, so that gradients need no copy"
    edits = ((old, "piece.view((*lead, *shape))"),)
    return Trick("transposed_storage", what, "Apply.unflatten", EAGER + COMPILED, edits)


def index_select():
    old = "self.rows.index_select(0, (uniform * self.stored.clamp(max=self.size)).long())"
    new = "self.rows[(uniform * self.stored.clamp(max=self.size)).long()]"
    what = "rows of the replay buffer by `index_select`, not by indexing"
    return Trick("index_select", what, "DeviceReplayBuffer.sample", EAGER, ((old, new),))


def compiled_acting(where):
    old = '("store_and_act", "update_critics", "update_actor")'
    edits = ((old, '("update_critics", "update_actor")'),)
    return Trick("compiled_acting", "acting and storing compiled too", f"{where}.store_and_act", COMPILED, edits)


def cheap_guards():
    edits = (('options = {"guard_filter_fn": cheap_guards}', "options = {}"),)
    return Trick("cheap_guards", "a third of the guards of compiled code", "cheap_guards", COMPILED, edits)


def cpp_wrapper(where):
    edits = (('options["cpp_wrapper"] = not self.on_cuda', 'options["cpp_wrapper"] = False'),)
    what = "kernels called from C++, not from Python"
    return Trick("cpp_wrapper", what, f"{where}.apply_compile_and_cudagraphs", ("compile",), edits)


def numpy_acting():
    what = "acting in NumPy on the layers that acting needs, not by calling the module"
    edits = (("    agreed = True\n", "    agreed = False\n"),)
    return Trick("numpy_acting", what, "on_host", EAGER + COMPILED, edits)


def direct_envs():
    old = "        space = self.env.observation_space\n"
    new = """        next_obs, rewards, terminated, truncated, infos = self.env.step(actions)
        last_obs = next_obs
        if "final_obs" in infos:
            ended = infos["_final_obs"]
            last_obs = next_obs.copy()
            last_obs[ended] = np.stack(infos["final_obs"][ended])
        return next_obs, last_obs, rewards, terminated, truncated
"""
    what = "environments stepped by the script, not by `SyncVectorEnv`"
    return Trick("direct_envs", what, "DirectEnvs.step", EAGER + COMPILED, ((old, new),))


SAC_NO_CRITIC_GRADIENT = (
    """loss = (alpha * log_prob - self.critics(self.critic_weights, obs, actions).amin(0)).mean()
            (gradient,) = torch.autograd.grad(loss, weights)""",
    """critic_weights = self.critic_weights.detach().requires_grad_()
            loss = (alpha * log_prob - self.critics(critic_weights, obs, actions).amin(0)).mean()
            gradient, _ = torch.autograd.grad(loss, (weights, critic_weights))""",
)
TD3_NO_CRITIC_GRADIENT = (
    """loss = -self.critics.member(self.critic_weights, 0, obs, actions).mean()
        (gradient,) = torch.autograd.grad(loss, weights)""",
    """critic_weights = self.critic_weights.detach().requires_grad_()
        loss = -self.critics.member(critic_weights, 0, obs, actions).mean()
        gradient, _ = torch.autograd.grad(loss, (weights, critic_weights))""",
)
NO_CRITIC_GRADIENT = "no gradient for the critics' weights in the actor's loss"
SAC_SHARED_PASS = (
    ("mean, log_std = self.actor(weights, obs)\n        for noise", "for noise"),
    (
        "actions, log_prob = self.squash(mean, log_std, noise)",
        "mean, log_std = self.actor(weights, obs)\n            actions, log_prob = self.squash(mean, log_std, noise)",
    ),
)
TD3_BOTH_CRITICS = (
    "self.critics.member(self.critic_weights, 0, obs, actions)",
    "self.critics(self.critic_weights, obs, actions)[0]",
)
TD3_SAMPLING = (
    ("def update_critics(self, uniform, noise):", "def update_critics(self, batch, noise):"),
    ("        batch = self.replay.sample(uniform)\n", ""),
    ("self.update_critics(self.uniform()", "self.update_critics(self.replay.sample(self.uniform())"),
)
PPO_GAE = (
    "    covered = 1\n",
    """    for t in reversed(range(len(rewards) - 1)):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages
""",
)
PPO_VALUES_AT_ONCE = (
    'mean, log_std, values = self.agent(self.weights, steps["obs"])',
    """outputs = [self.agent(self.weights, obs) for obs in steps["obs"].split(self.num_envs)]
        mean, values = (torch.cat([output[i] for output in outputs]) for i in (0, 2))
        log_std = outputs[0][1]""",
)
PPO_ONE_GRAPH = (
    ('self.optimizers["agent"].step(self.weights, gradient * scale)', "return gradient * scale"),
    (
        "            self.update_minibatch(rows)",
        '            self.optimizers["agent"].step(self.weights, self.update_minibatch(rows))',
    ),
)
DQN_ONE_CROSSING = (
    "        self.filled += self.num_envs\n",
    "        self.filled += self.num_envs\n        self.ship()\n        self.store_inbox()\n",
)
DQN_STORING = (
    ("def store_and_update(self, uniform):", "def store_and_update(self, batch):"),
    ("        self.store_inbox()\n        batch = self.replay.sample(uniform)\n", ""),
    (
        "        self.scalars.keep(**self.store_and_update(self.uniform()))",
        """        self.store_inbox()
        self.scalars.keep(**self.store_and_update(self.replay.sample(self.uniform())))""",
    ),
)
TRICKS = {
    "sac_continuous_action": (
        batched_critics(),
        Trick("no_critic_gradient", NO_CRITIC_GRADIENT, "SAC.update_actor", EAGER, (SAC_NO_CRITIC_GRADIENT,)),
        Trick(
            "shared_actor_pass",
            "one pass of the actor for the temperature and for the next actor step, not two",
            "SAC.update_actor",
            EAGER,
            SAC_SHARED_PASS,
        ),
        flat_adam(
            ("Adam(self.actor_weights, args.policy_lr)", "self.actor"),
            ("Adam(self.critic_weights, args.q_lr)", "self.critics"),
        ),
        transposed_storage(),
        compiled_acting("SAC"),
        cheap_guards(),
    ),
    "td3_continuous_action": (
        batched_critics(),
        Trick(
            "first_critic_alone",
            "the actor's loss computes one critic, not both",
            "TD3.update_actor",
            EAGER + COMPILED,
            (TD3_BOTH_CRITICS,),
        ),
        Trick("no_critic_gradient", NO_CRITIC_GRADIENT, "TD3.update_actor", EAGER, (TD3_NO_CRITIC_GRADIENT,)),
        flat_adam(
            ("Adam(self.actor_weights, args.learning_rate)", "self.actor"),
            ("Adam(self.critic_weights, args.learning_rate)", "self.critics"),
        ),
        index_select(),
        Trick(
            "compiled_sampling",
            "rows looked up and gathered inside the compiled update",
            "TD3.update_critics",
            COMPILED,
            TD3_SAMPLING,
        ),
        compiled_acting("TD3"),
    ),
    "ppo_continuous_action": (
        numpy_acting(),
        direct_envs(),
        Trick(
            "values_at_once",
            "values and log-probabilities of a rollout at once, not step by step",
            "PPO.make_batch",
            EAGER + COMPILED,
            (PPO_VALUES_AT_ONCE,),
        ),
        Trick("gae_by_doubling", "advantages by doubling, not by a loop over steps", "gae", EAGER + COMPILED, (PPO_GAE,)),
        flat_adam(("Adam(self.weights, self.learning_rate)", "self.agent")),
        Trick(
            "one_graph",
            "Adam in the compiled graph of forward and backward pass, not eager after it",
            "PPO.update_minibatch",
            COMPILED,
            PPO_ONE_GRAPH,
        ),
        cpp_wrapper("PPO"),
    ),
    "dqn": (
        numpy_acting(),
        direct_envs(),
        Trick(
            "one_crossing",
            "transitions stored on the device once per update, not one by one",
            "DQN.ship",
            EAGER + COMPILED,
            (DQN_ONE_CROSSING,),
        ),
        flat_adam(("Adam(self.q_weights, args.learning_rate)", "self.q")),
        Trick(
            "compiled_sampling",
            "storing and sampling inside the compiled update",
            "DQN.store_and_update",
            COMPILED,
            DQN_STORING,
        ),
        cheap_guards(),
        cpp_wrapper("DQN"),
    ),
}
SHORT = {"batch_size": 32, "buffer_size": 1000, "learning_starts": 50, "total_timesteps": 250}
VERIFIED = {  # flags of the runs that `--verify` compares: long enough for an episode to end
    "sac_continuous_action": SHORT | {"env_id": "Pendulum-v1"},
    "td3_continuous_action": SHORT | {"env_id": "Pendulum-v1"},
    "ppo_continuous_action": {"env_id": "Pendulum-v1", "num_steps": 64, "num_minibatches": 4, "total_timesteps": 256},
    "dqn": SHORT | {"total_timesteps": 550},
}


@dataclass
class Args:
    algos: tuple[str, ...] = tuple(TRICKS)
    """names of the plain scripts"""
    modes: tuple[str, ...] = ("eager", "compile")
    """modes of run.py; those with cudagraphs need a CUDA device"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one round for each seed, of each mode"""
    total_timesteps: int | None = None
    """environment steps of each run (by default those of run.py)"""
    run_dir: Path = Path("runs/ablation")
    """folder for the copies and their runs; an earlier one of the same algorithm and mode is deleted"""
    results: Path = ROOT / "results"
    """folder that receives <machine>/ablation/<algo>.json"""
    page: Path = PAGE
    """page with the tables"""
    verify: bool = False
    """only compare what the script and its copies learn in short runs"""
    tables: bool = False
    """only write the tables again"""
    check: bool = False
    """only see that the tables are what the results give"""


def without(algo, trick):
    """The text of the turbo script without a trick; ValueError unless each text to replace is there once."""
    source = (ROOT / "leanrl" / f"{algo}_torchcompile.py").read_text()
    for old, new in trick.edits:
        if source.count(old) != 1:
            raise ValueError(f"{algo}, {trick.name}: {source.count(old)} places, not one, with this text: {old}")
        source = source.replace(old, new)
    return source


def write_copy(algo, trick, folder):
    """Write the turbo script without `trick`, or as it is (None), to a folder of its own under `folder`."""
    name = f"{algo}_torchcompile.py"
    path = folder / (trick.name if trick else UNTOUCHED) / name
    path.parent.mkdir(parents=True)
    path.write_text(without(algo, trick) if trick else (ROOT / "leanrl" / name).read_text())
    return path


def tricks_of(algo, mode):
    return [trick for trick in TRICKS[algo] if mode in trick.modes]


def learnt(path, algo, mode):
    """All parameters of a short run of the script at `path` at its first and at its last log: two vectors."""
    script = turns.load(str(path))
    script.LOG_INTERVAL = 10
    logs = []

    def on_log(learner, losses, step):
        networks = learner.state_dict()["networks"].values()
        logs.append(torch.cat([tensor.double().flatten() for network in networks for tensor in network.values()]))

    flags = VERIFIED[algo] | {"compile": "compile" in mode, "cudagraphs": "cudagraphs" in mode}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        script.train(script.Args(run_dir=folder, threads=1, **flags), on_log)
    return logs[0], logs[-1]


def difference(path, algo, mode, wanted):
    """How far apart the copy at `path` and the script end, whose `learnt` is `wanted`, as a part of the way it went."""
    before, after = wanted
    _, got = learnt(path, algo, mode)
    return float((got - after).norm() / (after - before).norm())


def verify(algo, mode):
    """Print how far each copy is from the script after a short run; SystemExit(1) if that is more than rounding."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = learnt(write_copy(algo, None, Path(folder)), algo, mode)
        for trick in tricks_of(algo, mode):
            far = difference(write_copy(algo, trick, Path(folder)), algo, mode, wanted)
            print(f"{algo}, {mode}, without {trick.name}: {far:.1e} of the way", flush=True)
            if not far < TOLERANCE:
                raise SystemExit(f"error: without {trick.name}, {algo} learns something else")


def measure(args, algo, mode):
    """Steps per second of the untouched script and of each copy, one per seed, by name."""
    folder = args.run_dir / algo / mode
    shutil.rmtree(folder, ignore_errors=True)
    paths = {UNTOUCHED: write_copy(algo, None, folder)}
    paths |= {trick.name: write_copy(algo, trick, folder) for trick in tricks_of(algo, mode)}
    flags = run.MODES[mode][2:]
    programs = {name: ["turns.py", str(path.resolve()), *flags] for name, path in paths.items()}
    speeds = {name: [] for name in paths}
    with patch.dict(run.MODES, programs):
        runs = run.Args(algo=algo, total_timesteps=args.total_timesteps, run_dir=folder)
        for round_, seed in enumerate(args.seeds):
            run.run_round(runs, list(paths) if round_ % 2 == 0 else list(paths)[::-1], seed)
            for name in paths:
                (summary,) = (folder / name / str(seed)).glob("*/summary.json")
                speeds[name].append(json.loads(summary.read_text())["steady_sps"])
    return speeds


def record(args, algo, mode, speeds):
    """Put one mode's speeds into the results of this machine."""
    path = args.results / slug() / "ablation" / f"{algo}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.loads(path.read_text()) if path.exists() else {"algo": algo, "modes": {}}
    env_id, total_timesteps = run.DEFAULTS[algo]
    steps = args.total_timesteps or total_timesteps
    about = {"env_id": env_id, "total_timesteps": steps, "seeds": args.seeds, "machine": machine()}
    data["modes"][mode] = about | {"steps_per_second": speeds}
    path.write_text(json.dumps(data, indent=1) + "\n")


def table(algo, data):
    """A Markdown table of the tricks of one algorithm, with the ratios in `data`, one machine's results or nothing."""
    modes = list(data["modes"]) if data else ["eager", "compile"]
    lines = [f"| what the script does | where | {' | '.join(modes)} |", f"|---|---|{'---|' * len(modes)}"]
    for trick in TRICKS[algo]:
        cells = []
        for mode in modes:
            speeds = data["modes"][mode]["steps_per_second"] if data else {}
            pairs = zip(speeds.get(UNTOUCHED, []), speeds.get(trick.name, []), strict=False)
            ratios = [speed / slower for speed, slower in pairs]
            measured = run.spread(ratios, "{:.2f}") if ratios else "not measured"
            cells.append(measured if mode in trick.modes else "")
        lines.append(f"| {trick.what} | `{trick.where}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def text(algo, results):
    """The tables of one algorithm, one for each machine that has been measured."""
    parts = []
    for path in sorted(results.glob(f"*/ablation/{algo}.json")):
        data = json.loads(path.read_text())
        about = next(iter(data["modes"].values()))
        where = about["machine"]["gpu"] or about["machine"]["cpu"]
        torch_version = about["machine"]["versions"]["torch"]
        parts.append(f"{where}, {about['machine']['cores']} cores, torch {torch_version}; {about['env_id']}:")
        parts.append(table(algo, data))
    return "\n\n".join(["", *parts] if parts else ["", table(algo, None)])


def main(args):
    unknown = [name for name in args.algos if name not in TRICKS]
    if unknown:
        print(f"error: --algos {unknown[0]}: choose from {', '.join(TRICKS)}", file=sys.stderr)
        raise SystemExit(2)
    unknown = [mode for mode in args.modes if mode not in EAGER + COMPILED]
    if unknown:
        print(f"error: --modes {unknown[0]}: choose from {', '.join(EAGER + COMPILED)}", file=sys.stderr)
        raise SystemExit(2)
    if any("cudagraphs" in mode for mode in args.modes) and not torch.cuda.is_available():
        print(f"error: --modes {' '.join(args.modes)}: cudagraphs needs a CUDA device; leave it out", file=sys.stderr)
        raise SystemExit(2)
    if not args.tables and not args.check:
        for algo in args.algos:
            for mode in args.modes:
                verify(algo, mode) if args.verify else record(args, algo, mode, measure(args, algo, mode))
    if not args.verify:
        for algo in args.algos:
            publish(args.page, f"tricks of {algo}", text(algo, args.results), args.check)


if __name__ == "__main__":
    main(tyro.cli(Args))
