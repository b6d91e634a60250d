"""The scripts' command lines: flags, modes, bad input, checkpoints that bring their flags."""

import json
import math
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import (
    ENTRIES,
    MULTI,
    NOT_FLAT,
    PLAIN,
    TURBO,
    algorithm,
    countdown,
    entry_of,
    learner_class,
    make_envs,
    stem,
    tiny,
    train,
)
from copies import ROOT
from formulas import assert_noticed


@pytest.fixture(params=[*PLAIN.values(), *TURBO.values(), MULTI], ids=stem)
def script(request):
    return request.param


def flags(**kwargs):
    """Args as a command line: {"num_envs": 2, "autotune": False} to --num-envs 2 --no-autotune."""
    words = []
    for name, value in kwargs.items():
        name = name.replace("_", "-")
        words += [f"--{name}"] if value is True else [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
    return words


def start(script, start_new_session=False, **kwargs):
    """The script as a process."""
    command = [sys.executable, str(ROOT / "leanrl" / f"{stem(script)}.py"), *flags(**tiny(script) | kwargs)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, start_new_session=start_new_session)


def call(script, monkeypatch, *words):
    """Run the script's command line in this process."""
    monkeypatch.setattr(sys, "argv", [f"{stem(script)}.py", *map(str, words)])
    script.train(script.parse_args())


def run_tiny(script, run_dir, **kwargs):
    """Train for 200 steps in this process; returns the run's folder."""
    known = set(run_dir.glob("*"))
    train(script, script.Args(**tiny(script) | {"total_timesteps": 200} | kwargs, run_dir=str(run_dir)))
    (folder,) = set(run_dir.glob("*")) - known
    return folder


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def refused(capsys, run):
    """The one line with which `run()` is refused."""
    with pytest.raises(SystemExit) as error:
        run()
    assert error.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("[Gloo]", "note: "))]
    assert len(lines) == 1, lines
    return lines[0]


# one script on vectors and one on frames; the others are compiled by the tests that compare them with their plain twins
COMPILED = (TURBO["sac"], TURBO["ppo_atari"])
MODES = [pytest.param(TURBO["dqn"], True, True, id="dqn-both")]
MODES += [pytest.param(turbo, True, True, marks=pytest.mark.thorough, id=f"{stem(turbo)}-both") for turbo in COMPILED]
MODES += [pytest.param(TURBO["dqn"], False, True, marks=pytest.mark.thorough, id="dqn-cudagraphs")]


@pytest.mark.parametrize(("turbo", "compile", "cudagraphs"), MODES)
def test_every_mode_trains_past_learning_starts(turbo, compile, cudagraphs, tmp_path):
    process = start(turbo, total_timesteps=300, run_dir=tmp_path, compile=compile, cudagraphs=cudagraphs, cuda=True)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    report = summary(next(tmp_path.iterdir()))
    on_cuda = torch.cuda.is_available()
    assert (report["compile"], report["cudagraphs"]) == (compile, cudagraphs and on_cuda)
    assert report["global_step"] == 300
    assert ("--cudagraphs needs a CUDA device" in errors) == (cudagraphs and not on_cuda)


def test_help_shows_every_flag(script, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(script, monkeypatch, "--help")
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in vars(script.Args()))


AT_LEAST_1 = re.compile("total_timesteps|num_|buffer_size|batch_size|.*_frequency|updates_per_step|update_epochs")
AT_MOST_1 = re.compile("gamma|tau|gae_lambda|q_lambda|start_e|end_e|exploration_fraction|target_entropy_scale")


def test_numbers_out_of_range_are_refused(script, capsys):
    """Each flag's own, by a line that names the flag, the value and the limits."""
    refusals = 0
    for name, default in vars(script.Args()).items():
        if type(default) not in (int, float):
            continue
        bad = [-1, math.nan]
        bad += [0] if AT_LEAST_1.match(name) else []
        bad += [1.5] if AT_MOST_1.fullmatch(name) else []
        bad += [2**32] if name == "seed" else []  # NumPy takes no larger ones
        for value in bad:
            line = refused(capsys, partial(script.prepare, script.Args(**{name: value})))
            assert line.startswith(f"error: --{name.replace('_', '-')} {value}: give a number from ")
            refusals += 1
    assert refusals > 20


BAD_INPUTS = [
    {"env_id": "NoSuchEnv-v0"},
    {"env_id": "no_such_module:Env-v0"},
    {"env_id": "Image-v0"},
    *({"env_id": f"Push{name}-v0"} for name in NOT_FLAT),
    {"total_timesteps": 0},
    {"run_dir": "{tmp}/file/runs"},
    {"run_dir": "s3://bucket/runs"},
    {"threads": 100_000},
    {"resume": "{tmp}/missing.pt"},
    {"resume": "{tmp}/damaged.pt"},
    {"resume": "{tmp}/nothing.pt"},
    {"resume": "{tmp}"},
    {"resume": ""},
]


def own_inputs(entry):
    """Bad input of one kind of algorithm.

    Environments that it cannot learn, minibatches of unequal sizes, a buffer that is too large, no update.
    """
    env_ids = ["CartPole-v1"] if entry.on_device else ["CartPole-v1", "Unbounded-v0"]
    if entry.tiny["env_id"] == "CartPole-v1":
        takes = {"ppo_lstm": "Pendulum-v1", "ppo_discrete": "CountsFromOne-v0"}.get(entry.short)
        env_ids = [env_id for env_id in ("Pendulum-v1", "CountsFromOne-v0") if env_id != takes]
    if entry.atari:
        env_ids = ["Pong-v4"]
    others = [{"buffer_size": 2 * 10**9}, {"total_timesteps": 1}] if entry.off_policy else [{"num_minibatches": 3}]
    return [{"env_id": env_id} for env_id in env_ids] + others


CASES = [
    pytest.param(module, arguments, id=f"{stem(module)}-{arguments}")
    for modules in (PLAIN, TURBO)
    for name, module in modules.items()
    for arguments in [*(BAD_INPUTS if module in (PLAIN["sac"], TURBO["dqn"]) else []), *own_inputs(ENTRIES[name])]
]


@pytest.mark.parametrize(("script", "arguments"), CASES)
def test_bad_input_gets_one_clear_line(script, arguments, tmp_path, capsys):
    """The line names the argument, and nothing is left behind."""
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 not a checkpoint")
    torch.save(torch.zeros(3), tmp_path / "nothing.pt")
    (tmp_path / "file").touch()
    ((name, value),) = arguments.items()
    value = value.format(tmp=tmp_path) if isinstance(value, str) else value
    args = script.Args(**tiny(script) | {"run_dir": str(tmp_path / "runs"), name: value})
    line = refused(capsys, partial(script.train, args))
    assert line.startswith(f"error: --{name.replace('_', '-')} {value}: "), line
    assert not list(tmp_path.glob("runs/*")) and not Path("s3:").exists()


OFF_POLICY = [script for scripts in (PLAIN, TURBO) for script in scripts.values() if entry_of(script).off_policy]


@pytest.mark.parametrize("script", OFF_POLICY, ids=stem)
def test_a_run_that_ends_before_learning_starts_is_refused(script, tmp_path, capsys):
    """A resumed run may end before the updates start again."""
    args = script.Args(**tiny(script))
    starts = args.learning_starts * (args.num_envs if entry_of(script).on_device else 1)
    sizes = tiny(script) | {"total_timesteps": starts, "run_dir": str(tmp_path)}
    line = refused(capsys, partial(script.train, script.Args(**sizes)))
    assert line.startswith(f"error: --total-timesteps {starts}: give more than --learning-starts")
    assert not list(tmp_path.iterdir())
    folder = run_tiny(script, tmp_path, total_timesteps=starts + 20)  # DQN trains every tenth step
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["learner"]["updates"] > 0
    run_tiny(script, tmp_path, total_timesteps=starts + 40, learning_starts=10 * starts, resume=str(folder))


def test_a_tilde_is_the_home(either, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    args = {"total_timesteps": 150, "run_dir": "~/runs"}
    train(either, either.Args(**tiny(either) | args))
    (folder,) = (tmp_path / "runs").iterdir()
    train(either, either.Args(**tiny(either) | args | {"total_timesteps": 200, "resume": f"~/runs/{folder.name}"}))
    assert len(list((tmp_path / "runs").iterdir())) == 2 and not (tmp_path / "~").exists()


def test_words_that_are_no_arguments(either, tmp_path):
    for words in ({"no_such_flag": 1}, {"seed": "one"}, {"matmul_precision": "low"}):
        process = start(either, **words, run_dir=tmp_path / "runs")
        _, errors = process.communicate()
        assert process.returncode == 2 and "Traceback" not in errors
        assert flags(**words)[0] in errors


def checkpoint_of(script, path):
    """Write the checkpoint of a new learner of `script` to `path`, as if after 200 steps; returns its content."""
    args = script.Args(**tiny(script))
    learner = learner_class(script)(args, make_envs(script, args), torch.device("cpu"))
    content = {"args": vars(args), "global_step": 200, "episodes": 0, "returns": [], "learner": learner.state_dict()}
    torch.save(content, path)
    return content


def flip_a_bit(path, copy):
    """Copy a checkpoint; the lowest bit of one number in its largest tensor is another one."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        with archive.open(largest) as file:
            numbers = file.read()
    content = bytearray(path.read_bytes())
    content[content.index(numbers) + len(numbers) // 2] ^= 1
    copy.write_bytes(content)


def fixed_flags(script):
    """Other values of all flags that a resumed run cannot change."""
    if entry_of(script).on_device and entry_of(script).off_policy:
        sizes = {"num_envs": 2, "buffer_size": 99, "critic_hidden_dim": 12, "actor_hidden_dim": 12, "num_atoms": 7}
        return sizes | {"v_max": 1.5}
    sizes = {"buffer_size": 99} if entry_of(script).off_policy else {}
    return sizes | ({"num_envs": 3} if sizes and entry_of(script).atari else {})


def test_checkpoints_that_do_not_fit_are_refused(script, tmp_path, capsys):
    name = algorithm(script)
    names = ("own", "other", "damaged", "incomplete", "flipped", "list")
    own, other, damaged, incomplete, flipped, a_list = (tmp_path / f"{name}.pt" for name in names)
    content = checkpoint_of(script, own)
    checkpoint_of((PLAIN if script is TURBO[name] else TURBO)[name], other)
    damaged.write_bytes(own.read_bytes()[: own.stat().st_size // 2])
    without_networks = {key: value for key, value in content["learner"].items() if key != "networks"}
    torch.save(content | {"learner": without_networks}, incomplete)
    torch.save([content], a_list)
    flip_a_bit(own, flipped)
    elsewhere = "Pong-v5" if entry_of(script).atari else countdown(script, "Truncates")
    cases = [
        ({"resume": other}, "--resume", "does not fit"),
        ({"resume": own, "env_id": elsewhere}, "--resume", "does not fit"),
        ({"resume": own, "total_timesteps": 200}, "--total-timesteps", "more than 200"),
        ({"resume": damaged}, "--resume", "intact"),
        ({"resume": flipped}, "--resume", "its checksum is wrong"),
        ({"resume": a_list}, "--resume", "intact"),
        ({"resume": incomplete}, "--resume", "'networks'"),
    ]
    for kwargs, flag, word in cases:
        args = script.Args(**tiny(script) | {"total_timesteps": 500, "run_dir": str(tmp_path / "no")} | kwargs)
        line = refused(capsys, partial(script.train, args))
        assert line.startswith(f"error: {flag} ") and word in line, (kwargs, line)
        assert not list(tmp_path.glob("no/*"))


def test_flags_that_a_script_no_longer_has_are_left_out_when_resuming(script, tmp_path, monkeypatch):
    """Those that are new have their defaults."""
    path = tmp_path / "checkpoint.pt"
    content = checkpoint_of(script, path)
    content["args"] = {name: value for name, value in content["args"].items() if name != "track"} | {"gone": 1}
    torch.save(content, path)
    monkeypatch.setattr(sys, "argv", [stem(script), "--resume", str(path)])
    args = script.parse_args()
    assert args.track is False and not hasattr(args, "gone")
    assert vars(args).items() >= (content["args"] | {"resume": str(path)}).items() - {("gone", 1)}


def check_flags_are_refused(script, flags, folder, capsys):
    """A resumed run does not change them."""
    path = str(folder / "own.pt")
    saved = checkpoint_of(script, path)["args"]
    for flag, value in flags.items():
        sizes = {"total_timesteps": 500, "run_dir": str(folder / "no"), "resume": path, flag: value}
        line = refused(capsys, partial(script.train, script.Args(**tiny(script) | sizes)))
        assert line.startswith(f"error: --{flag.replace('_', '-')} {value}: the checkpoint has {saved[flag]}")
        assert not list(folder.glob("no/*"))


FIXED = [script for scripts in (PLAIN, TURBO) for script in scripts.values() if fixed_flags(script)]


@pytest.mark.parametrize("script", FIXED, ids=stem)
def test_flags_that_a_resumed_run_cannot_change(script, tmp_path, capsys):
    check_flags_are_refused(script, fixed_flags(script), tmp_path, capsys)


IN_CI = (TURBO["fast_td3"], "v_max")
MISSING = [(script, flag) for script in FIXED for flag in fixed_flags(script)]
MISSING = [
    pytest.param(*case, id=f"{stem(case[0])}-{case[1]}", marks=[] if case == IN_CI else pytest.mark.planted)
    for case in MISSING
]


@pytest.mark.parametrize(("script", "flag"), MISSING)
def test_a_missing_refusal_is_noticed(script, flag, tmp_path, capsys):
    source = Path(script.__file__).read_text()
    condition = re.search(rf'if [^\n]*:\n +(?=refuse\("{flag}", [^\n]*the checkpoint has)', source)
    if condition:
        old, new = condition[0], "if False:\n            "
    else:
        old = re.search(r"(?<=\nFIXED = \()[^\n]*(?=\))", source)[0]
        new = old.replace(f'"{flag}"', '"seed"')
    flags = {flag: fixed_flags(script)[flag]}
    check = partial(check_flags_are_refused, flags=flags, folder=tmp_path, capsys=capsys)
    assert_noticed(script, old, new, check, tmp_path, (AssertionError, RuntimeError, pytest.fail.Exception))
