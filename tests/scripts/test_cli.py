"""The scripts' command lines: flags, modes, bad input, checkpoints that bring their flags."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ATARI, MULTI, PLAIN, TURBO, algorithm, script_params, stem, tiny, train
from copies import ROOT


@pytest.fixture(params=[*PLAIN.values(), *TURBO.values(), MULTI], ids=stem)
def script(request):
    return request.param


@pytest.fixture(params=[PLAIN["sac"], TURBO["dqn"]], ids=stem)
def either(request):
    """Two scripts for what the run's part does by itself, whose text is the same in all of them."""
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
    (line,) = capsys.readouterr().err.splitlines()
    return line


MODES = [pytest.param(TURBO["dqn"], True, True, id="dqn-both")]
MODES += [
    pytest.param(turbo, True, True, marks=pytest.mark.thorough, id=f"{stem(turbo)}-both")
    for turbo in (*TURBO.values(), MULTI)
    if turbo is not TURBO["dqn"]
]
MODES += [
    pytest.param(TURBO[name], *mode, marks=pytest.mark.thorough, id=f"{name}-{mode}")
    for name in ("ppo", "dqn")
    for mode in ((False, False), (False, True), (True, False))
]


@pytest.mark.parametrize(("turbo", "compile", "cudagraphs"), MODES)
def test_every_mode_trains_past_learning_starts(turbo, compile, cudagraphs, tmp_path):
    process = start(turbo, total_timesteps=300, run_dir=tmp_path, compile=compile, cudagraphs=cudagraphs, cuda=True)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    report = summary(next(tmp_path.iterdir()))
    on_cuda = torch.cuda.is_available()
    assert (report["compile"], report["cudagraphs"]) == (compile, cudagraphs and on_cuda)
    assert report["global_step"] == 300 and report["steady_sps"] > 0 and report["warmup_seconds"] > 0
    assert ("--cudagraphs needs a CUDA device" in errors) == (cudagraphs and not on_cuda)
    assert ("compiling" in errors) == compile


def test_help_shows_every_flag(script, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(script, monkeypatch, "--help")
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in vars(script.Args()))


BAD_INPUTS = [
    {"env_id": "NoSuchEnv-v0"},
    {"total_timesteps": 0},
    {"num_envs": 0},
    {"gamma": 1.5},
    {"checkpoint_interval": -5},
    {"threads": -1},
    {"seed": -1},
    {"run_dir": "{tmp}/file/runs"},
    {"run_dir": "{tmp}/file/runs", "capture_video": True},
    {"resume": "{tmp}/missing.pt"},
    {"resume": "{tmp}/damaged.pt"},
    {"resume": "{tmp}"},
    {"resume": ""},
]
ON_GYMNASIUM = [{"env_id": "Image-v0"}, {"env_id": ":CartPole-v1"}, {"env_id": "no_such_module:Env-v0"}]
ON_GYMNASIUM += [{"num_envs": 3 * 10**8, "buffer_size": 10**9}]
OFF_POLICY_INPUTS = [
    {"batch_size": 0},
    {"batch_size": 1001},
    {"buffer_size": 1, "num_envs": 2},
    {"buffer_size": 10**12},
    {"learning_starts": -1},
    {"tau": -0.1},
]
CONTINUOUS = [{"env_id": "CartPole-v1"}, {"env_id": "Unbounded-v0"}]
ON_POLICY_INPUTS = [
    {"num_minibatches": 3},
    {"num_minibatches": 50},
    {"num_minibatches": 32, "num_envs": 3, "num_steps": 5},
    {"num_steps": 0},
    {"num_steps": 10**11},
    {"update_epochs": 0},
    {"learning_rate": 0.0},
    {"gae_lambda": 1.01},
    {"clip_coef": 0.0},
    {"ent_coef": -0.1},
    {"vf_coef": float("inf")},
    {"max_grad_norm": -1.0},
    {"target_kl": 0.0},
]
OWN_INPUTS = {
    "sac": [
        *OFF_POLICY_INPUTS,
        *ON_GYMNASIUM,
        *CONTINUOUS,
        {"policy_lr": float("nan")},
        {"q_lr": 0.0},
        {"alpha": -1.0},
        {"policy_frequency": 0},
        {"target_network_frequency": 0},
    ],
    "td3": [
        *OFF_POLICY_INPUTS,
        *ON_GYMNASIUM,
        *CONTINUOUS,
        {"learning_rate": float("nan")},
        {"learning_rate": -0.1},
        {"policy_noise": -0.1},
        {"exploration_noise": -0.1},
        {"noise_clip": -0.1},
        {"policy_frequency": 0},
    ],
    "ppo": [*ON_GYMNASIUM[:-1], *CONTINUOUS, *ON_POLICY_INPUTS, {"num_envs": 3 * 10**8}],
    "ppo_atari": [*ON_POLICY_INPUTS, {"env_id": "Pong-v4"}],
    "dqn_atari": [
        *OFF_POLICY_INPUTS,
        {"env_id": "Pong-v4"},
        {"learning_rate": 0.0},
        {"tau": 2.0},
        {"start_e": 1.1},
        {"exploration_fraction": 0.0},
        {"train_frequency": 0},
        {"target_network_frequency": 0},
    ],
    "sac_atari": [
        *OFF_POLICY_INPUTS,
        {"env_id": "Pong-v4"},
        {"policy_lr": float("nan")},
        {"q_lr": 0.0},
        {"alpha": -1.0},
        {"update_frequency": 0},
        {"target_network_frequency": 0},
        {"target_entropy_scale": 1.1},
    ],
    "dqn": [
        *OFF_POLICY_INPUTS,
        *ON_GYMNASIUM,
        {"env_id": "Pendulum-v1"},
        {"env_id": "CountsFromOne-v0"},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"tau": 2.0},
        {"start_e": 1.1},
        {"end_e": -0.1},
        {"exploration_fraction": 0.0},
        {"train_frequency": 0},
        {"target_network_frequency": 0},
    ],
}
CASES = [
    pytest.param(module, arguments, id=f"{stem(module)}-{arguments}")
    for modules in (PLAIN, TURBO, {"ppo_atari": MULTI})
    for name, module in modules.items()
    for arguments in [*BAD_INPUTS, *OWN_INPUTS[name]]
]
CASES += [pytest.param(TURBO[name], {"updates_per_step": 0}, id=f"{name}-updates") for name in ("sac", "td3")]


@pytest.mark.parametrize(("script", "arguments"), CASES)
def test_bad_input_gets_one_clear_line(script, arguments, tmp_path, capsys):
    """The line names the first of the arguments, and nothing is left behind."""
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 not a checkpoint")
    (tmp_path / "file").touch()
    filled = {name: v.format(tmp=tmp_path) if isinstance(v, str) else v for name, v in arguments.items()}
    args = script.Args(**tiny(script) | {"run_dir": str(tmp_path / "runs")} | filled)
    with pytest.raises(SystemExit) as error:
        script.train(args)
    assert error.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    name, value = next(iter(filled.items()))
    assert len(lines) == 1 and lines[0].startswith(f"error: --{name.replace('_', '-')} {value}: "), lines
    assert not list(tmp_path.glob("runs/*"))


def test_words_that_are_no_arguments(either, tmp_path):
    for words in ({"no_such_flag": 1}, {"seed": "one"}, {"matmul_precision": "low"}):
        process = start(either, **words, run_dir=tmp_path / "runs")
        _, errors = process.communicate()
        assert process.returncode == 2 and "Traceback" not in errors
        assert flags(**words)[0] in errors


@pytest.mark.parametrize("script", script_params())
def test_checkpoints_that_do_not_fit_are_refused(script, tmp_path, capsys):
    name = algorithm(script)
    twin = (PLAIN if script is TURBO[name] else TURBO)[name]
    own, other = (run_tiny(s, tmp_path / folder) / "checkpoint.pt" for s, folder in ((script, "own"), (twin, "other")))
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(own.read_bytes()[: own.stat().st_size // 2])
    incomplete = tmp_path / "incomplete.pt"
    checkpoint = torch.load(own, weights_only=True)
    del checkpoint["learner"]["updates"]
    torch.save(checkpoint, incomplete)
    cases = [
        ({"resume": other}, "--resume", "does not fit"),
        ({"resume": own, "env_id": "Pong-v5" if name in ATARI else "Truncates-v0"}, "--env-id", tiny(script)["env_id"]),
        ({"resume": own, "total_timesteps": 200}, "--total-timesteps", "more than 200"),
        ({"resume": damaged}, "--resume", "intact"),
        ({"resume": incomplete}, "--resume", "'updates'"),
    ]
    if "buffer_size" in tiny(script):
        cases.append(({"resume": own, "buffer_size": 99}, "--buffer-size", "1000"))
    capsys.readouterr()
    if name == "dqn":
        cases[1] = ({"resume": own, "env_id": "DiscreteTruncates-v0"}, "--env-id", "CartPole-v1")
    for kwargs, flag, word in cases:
        args = script.Args(**tiny(script) | {"total_timesteps": 500, "run_dir": str(tmp_path / "no")} | kwargs)
        line = refused(capsys, partial(script.train, args))
        assert line.startswith(f"error: {flag} ") and word in line, (kwargs, line)
        assert not list(tmp_path.glob("no/*"))


@pytest.mark.parametrize("script", script_params())
def test_a_checkpoint_brings_its_flags(script, tmp_path, monkeypatch, capsys):
    """--resume needs no other flag; those that are given count."""
    path = run_tiny(script, tmp_path / "first") / "checkpoint.pt"
    words = ["--resume", path.parent, "--total-timesteps", 350, "--run-dir", tmp_path / "second", "--seed", 5]
    call(script, monkeypatch, *words)
    (folder,) = (tmp_path / "second").iterdir()
    config = json.loads((folder / "config.json").read_text())
    wanted = {"total_timesteps": 350, "seed": 5, "run_dir": str(tmp_path / "second"), "resume": str(path.parent)}
    assert (tiny(script) | wanted).items() <= config.items()
    assert config["gamma"] == script.Args.gamma and summary(folder)["global_step"] == 350


def test_flags_of_a_checkpoint_that_a_script_lacks_are_named(either, tmp_path, monkeypatch, capsys):
    path = run_tiny(either, tmp_path / "first") / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["args"]["old_flag"] = 3
    torch.save(checkpoint, path)
    words = ["--resume", path, "--total-timesteps", 250, "--run-dir", tmp_path / "second"]
    call(either, monkeypatch, *words)
    assert "old_flag" in next(line for line in capsys.readouterr().err.splitlines() if line.startswith("note: "))


@pytest.mark.parametrize("name", TURBO)
def test_compile_without_a_compiler_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    args = TURBO[name].Args(**tiny(TURBO[name]), compile=True, run_dir=str(tmp_path / "runs"))
    line = refused(capsys, partial(TURBO[name].train, args))
    assert line.startswith("error: --compile True: install no-such-compiler")
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("missing", ["wandb", "login"])
def test_track_without_wandb_or_login_is_refused(either, missing, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if missing == "wandb":
        monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as error:
        run_tiny(either, tmp_path / "runs", track=True)
    line = capsys.readouterr().err.splitlines()[-1]
    assert error.value.code == 2 and line.startswith("error: --track True: pip install wandb and `wandb login`")
    assert not list(tmp_path.glob("runs/*"))


def test_learning_that_starts_too_late_is_noted(either, tmp_path, capsys):
    run_tiny(either, tmp_path, learning_starts=200)
    assert "note: --learning-starts 200 is not before the end of the run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ppo", "ppo_atari"])
def test_an_iteration_beyond_the_end_is_noted(name, tmp_path, capsys):
    for script in (PLAIN[name], TURBO[name]):
        run_tiny(script, tmp_path / stem(script), total_timesteps=20)
        assert "note: " in capsys.readouterr().err
