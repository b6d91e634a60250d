"""The scripts as a user runs them: flags, run directory, bad input, Ctrl-C, kill -9, resume, evaluation, video."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ATARI, PLAIN, TURBO, algorithm, equal, learner_class, leaves, scalars
from gymnasium.wrappers import RecordEpisodeStatistics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
OFF_POLICY = {"learning_starts": 100, "batch_size": 32, "buffer_size": 1000, "cuda": False}
SMALL = {
    "sac": OFF_POLICY | {"env_id": "Pendulum-v1"},
    "td3": OFF_POLICY | {"env_id": "Pendulum-v1"},
    "ppo": {"env_id": "Pendulum-v1", "num_steps": 50, "num_minibatches": 2, "update_epochs": 2, "cuda": False},
    "dqn": OFF_POLICY | {"env_id": "CartPole-v1"},
    "ppo_atari": {"env_id": "Breakout-v5", "num_envs": 1, "num_steps": 50, "num_minibatches": 2, "update_epochs": 1},
}
SMALL["ppo_atari"] |= {"cuda": False}
SMALL |= {name: OFF_POLICY | {"env_id": "Breakout-v5", "batch_size": 8} for name in ("dqn_atari", "sac_atari")}
GYMNASIUM = [scripts[name] for scripts in (PLAIN, TURBO) for name in PLAIN if name not in ATARI]
on_gymnasium = pytest.mark.parametrize("script", GYMNASIUM, ids=lambda module: module.SCRIPT)


@pytest.fixture(params=[*PLAIN.values(), *TURBO.values()], ids=lambda module: module.SCRIPT)
def script(request):
    return request.param


@pytest.fixture(params=TURBO.values(), ids=lambda module: module.SCRIPT)
def turbo(request):
    return request.param


@pytest.fixture(params=[PLAIN["sac"], TURBO["dqn"]], ids=lambda module: module.SCRIPT)
def either(request):
    """Two scripts for what the shell does by itself, whose text is the same in all of them."""
    return request.param


def small(script):
    """Arguments with which a run takes a second."""
    return SMALL[algorithm(script)]


def flags(**kwargs):
    """Args as a command line: {"num_envs": 2, "autotune": False} to --num-envs 2 --no-autotune."""
    words = []
    for name, value in kwargs.items():
        name = name.replace("_", "-")
        words += [f"--{name}"] if value is True else [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
    return words


def start(script, start_new_session=False, **kwargs):
    command = [sys.executable, str(ROOT / "leanrl" / f"{script.SCRIPT}.py"), *flags(**small(script) | kwargs)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, start_new_session=start_new_session)


def run_folders(run_dir):
    return sorted(Path(run_dir).iterdir(), key=lambda folder: folder.stat().st_mtime)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def train(script, run_dir, **kwargs):
    """Train in this process; returns the run's folder."""
    script.train(script.Args(**small(script) | {"total_timesteps": 200} | kwargs, run_dir=str(run_dir)))
    return run_folders(run_dir)[-1]


MODES = [(turbo, True, True) for turbo in TURBO.values()]
MODES += [(TURBO[name], *flags) for name in ("ppo", "dqn") for flags in ((False, False), (False, True), (True, False))]


@pytest.mark.parametrize(("turbo", "compile", "cudagraphs"), MODES)
def test_every_mode_trains_past_learning_starts(turbo, compile, cudagraphs, tmp_path):
    process = start(turbo, total_timesteps=300, run_dir=tmp_path, compile=compile, cudagraphs=cudagraphs, cuda=True)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    report = summary(run_folders(tmp_path)[0])
    on_cuda = torch.cuda.is_available()
    assert (report["compile"], report["cudagraphs"]) == (compile, cudagraphs and on_cuda)
    assert report["global_step"] == 300 and report["steady_sps"] > 0 and report["warmup_seconds"] > 0
    assert ("warning: --cudagraphs needs a CUDA device" in errors) == (cudagraphs and not on_cuda)
    assert ("compiling" in errors) == compile


def test_run_directory(script, tmp_path):
    folder = train(script, tmp_path, total_timesteps=500, num_envs=2)
    config, report = json.loads((folder / "config.json").read_text()), summary(folder)
    args = script.Args(**small(script) | {"total_timesteps": 500, "num_envs": 2, "run_dir": str(tmp_path)})
    assert vars(args).items() <= config.items()
    assert {"versions", "device", "cores", "git_commit"} <= config.keys()
    keys = "script env_id seed num_envs device compile cudagraphs matmul_precision global_step episodic_return episodes"
    assert set(f"{keys} steady_sps warmup_seconds wall_seconds versions".split()) == report.keys()
    assert (report["compile"], report["cudagraphs"]) == (False, False)
    assert report["global_step"] == 500 and report["steady_sps"] > 0 and report["warmup_seconds"] > 0
    events = EventAccumulator(str(folder)).Reload()
    returns, lengths = (scalars(folder, f"charts/episodic_{name}") for name in ("return", "length"))
    least = 1 if algorithm(script) in ATARI else 2  # a game takes a while
    assert report["episodes"] == len(returns) == len(lengths) >= least
    assert report["episodic_return"] == pytest.approx(sum(returns[-20:]) / len(returns[-20:]))
    if args.env_id == "Pendulum-v1":
        assert lengths == [200, 200] and max(returns) < 0
    else:
        assert sum(lengths) <= 500
        assert returns == lengths or args.env_id != "CartPole-v1"
    assert "charts/SPS" in events.Tags()["scalars"]
    assert any(name.startswith("losses/") and "loss" in name[7:] for name in events.Tags()["scalars"])


def test_threads_and_the_precision_of_matmuls(script, tmp_path, monkeypatch):
    """By default what suits the algorithm, and full precision; a run that is resumed keeps its own."""
    default = 1 if algorithm(script) in ("ppo", "dqn") else 0
    assert (script.Args().threads, script.Args().matmul_precision) == (default, "highest")
    before = torch.get_float32_matmul_precision()
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: chosen.append(threads))
    try:
        folder = train(script, tmp_path, threads=3, matmul_precision="high")
        assert chosen == [3] and torch.get_float32_matmul_precision() == "high"
        assert summary(folder)["matmul_precision"] == "high"
        call_main(script, monkeypatch, "--resume", folder, "--total-timesteps", 250, "--threads", 0)
        assert chosen == [3] and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def count_episodes(script, monkeypatch):
    """From now on environments come with gymnasium's statistics, which land, for each call, in the list returned."""
    counted, make_envs = [], script.make_envs

    def counting(*args):
        envs = make_envs(*args)
        envs.envs = [RecordEpisodeStatistics(env, buffer_length=1000) for env in envs.envs]
        counted.append(envs.envs[0])
        for env in envs.envs:  # in one order
            env.return_queue, env.length_queue = counted[-1].return_queue, counted[-1].length_queue
        return envs

    monkeypatch.setattr(script, "make_envs", counting)
    return counted


@on_gymnasium
def test_episodes_are_counted_as_gymnasium_does(script, tmp_path, monkeypatch):
    counted = count_episodes(script, monkeypatch)
    folder = train(script, tmp_path, total_timesteps=1500, num_envs=3)
    returns, lengths = (scalars(folder, f"charts/episodic_{name}") for name in ("return", "length"))
    assert summary(folder)["episodes"] == len(returns) == len(counted[0].return_queue) >= 6
    assert returns == pytest.approx(list(counted[0].return_queue)) and lengths == list(counted[0].length_queue)
    assert summary(folder)["episodic_return"] == pytest.approx(np.mean(returns[-20:]))


def test_same_seed_same_numbers(script, tmp_path):
    states = []
    for seed in (3, 3, 4):
        steps = 240 if algorithm(script) in ATARI else 400
        folder = train(script, tmp_path, total_timesteps=steps, seed=seed)
        checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
        states.append(dict(leaves({"returns": checkpoint["returns"], "learner": checkpoint["learner"]})))
    one, same, other = states
    assert one.keys() == same.keys() and all(equal(one[path], same[path]) for path in one)
    assert not all(equal(one[path], other[path]) for path in one.keys() & other.keys())  # as many episodes or not


def test_resuming_continues_the_run(script, tmp_path):
    """Steps, episodes, updates and, where there is one, the replay buffer count on from the first run's."""
    first = train(script, tmp_path, total_timesteps=450)
    before = torch.load(first / "checkpoint.pt", weights_only=True)
    again = train(script, tmp_path, total_timesteps=700, resume=str(first / "checkpoint.pt"))
    after = torch.load(again / "checkpoint.pt", weights_only=True)
    assert (before["global_step"], after["global_step"]) == (450, 700)
    assert after["episodes"] > before["episodes"]
    if after["episodes"] <= 20:  # the returns of the last 20 are kept
        assert after["returns"][: len(before["returns"])] == before["returns"]
    assert sum(scalars(again, "charts/episodic_length")) <= 250  # steps of the second run
    updates = {"sac": (350, 600), "td3": (350, 600), "dqn": (35, 60), "ppo": (9, 14), "ppo_atari": (9, 14)}
    updates |= {"dqn_atari": (87, 150), "sac_atari": (87, 150)}
    assert (before["learner"]["updates"], after["learner"]["updates"]) == updates[algorithm(script)]
    if "replay" in after["learner"] and algorithm(script) not in ATARI:
        assert int(after["learner"]["replay"]["stored"]) == 700


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_learning_starts_at_zero_and_several_updates_per_step(algorithm, tmp_path):
    folder = train(TURBO[algorithm], tmp_path, total_timesteps=50, learning_starts=0, updates_per_step=3)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["learner"]["updates"] == 150


def test_nothing_is_learnt_from_rows_that_were_never_stored(script, tmp_path, monkeypatch):
    """Memory that was never written holds NaN here; one row of it would spoil every parameter."""

    def poison(library, is_float):
        empty = library.empty

        def poisoned(*size, **kwargs):
            array = empty(*size, **kwargs)
            if is_float(array):
                array[...] = float("nan")
            return array

        monkeypatch.setattr(library, "empty", poisoned)

    poison(torch, lambda tensor: tensor.is_floating_point() and not tensor.is_meta)
    poison(np, lambda array: array.dtype.kind == "f")
    folder = train(script, tmp_path, total_timesteps=300)
    for path, leaf in leaves(torch.load(folder / "checkpoint.pt", weights_only=True)["learner"]):
        assert not isinstance(leaf, torch.Tensor) or leaf.isfinite().all(), path


BAD_INPUTS = [
    {"env_id": "NoSuchEnv-v0"},
    {"env_id": "Image-v0"},
    {"total_timesteps": 0},
    {"num_envs": 0},
    {"gamma": 1.5},
    {"checkpoint_interval": -5},
    {"measure_burnin": -1},
    {"eval_episodes": 0},
    {"threads": -1},
    {"seed": -1},
    {"run_dir": "{tmp}/file/runs"},
    {"run_dir": "{tmp}/file/runs", "capture_video": True},
    {"resume": "{tmp}/missing.pt"},
    {"resume": "{tmp}/damaged.pt"},
    {"resume": "{tmp}"},
]
OFF_POLICY_INPUTS = [
    {"batch_size": 0},
    {"buffer_size": 1, "num_envs": 2},
    {"learning_starts": -1},
    {"tau": -0.1},
]
CONTINUOUS = [{"env_id": "CartPole-v1"}, {"env_id": "Unbounded-v0"}]
BOTH_PPO = [
    {"num_minibatches": 3},
    {"num_minibatches": 50},
    {"num_minibatches": 32, "num_envs": 3, "num_steps": 5},
    {"num_steps": 0},
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
        *CONTINUOUS,
        {"policy_lr": float("nan")},
        {"q_lr": 0.0},
        {"alpha": -1.0},
        {"policy_frequency": 0},
        {"target_network_frequency": 0},
    ],
    "td3": [
        *OFF_POLICY_INPUTS,
        *CONTINUOUS,
        {"learning_rate": float("nan")},
        {"learning_rate": -0.1},
        {"policy_noise": -0.1},
        {"exploration_noise": -0.1},
        {"noise_clip": -0.1},
        {"policy_frequency": 0},
    ],
    "ppo": [
        *CONTINUOUS,
        *BOTH_PPO,
        {"env_id": "NoSuchEnv-v0", "env_backend": "envpool"},
        {"env_backend": "envpool", "capture_video": True},
    ],
    "ppo_atari": [*BOTH_PPO, {"num_envs": 257}, {"env_id": "Pong-v4"}],
    "dqn_atari": [
        *OFF_POLICY_INPUTS,
        {"num_envs": 257},
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
        {"num_envs": 257},
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
    pytest.param(module, arguments, id=f"{module.SCRIPT}-{arguments}")
    for modules in (PLAIN, TURBO)
    for name, module in modules.items()
    for arguments in [*BAD_INPUTS, *OWN_INPUTS[name]]
]


@pytest.mark.parametrize(("script", "arguments"), CASES)
def test_bad_input_gets_one_clear_line(script, arguments, tmp_path, capsys):
    """The line names the first of the arguments."""
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 not a checkpoint")
    (tmp_path / "file").touch()
    fill = {name: v.format(tmp=tmp_path) if isinstance(v, str) else v for name, v in arguments.items()}
    with pytest.raises(SystemExit) as error:
        script.train(script.Args(**small(script) | {"run_dir": str(tmp_path / "runs")} | fill))
    assert error.value.code == 2
    lines, (name, value) = capsys.readouterr().err.splitlines(), next(iter(fill.items()))
    assert len(lines) == 1 and lines[0].startswith(f"error: --{name.replace('_', '-')} {value}: "), lines
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_no_updates_per_step_are_refused(algorithm, capsys):
    with pytest.raises(SystemExit) as error:
        TURBO[algorithm].train(TURBO[algorithm].Args(updates_per_step=0))
    assert error.value.code == 2 and "error: --updates-per-step 0: " in capsys.readouterr().err


def test_words_that_are_no_arguments(either, tmp_path):
    for words in ({"no_such_flag": 1}, {"seed": "one"}, {"matmul_precision": "low"}):
        process = start(either, **words, run_dir=tmp_path / "runs")
        _, errors = process.communicate()
        assert process.returncode == 2 and "Traceback" not in errors
        assert flags(**words)[0] in errors


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A small checkpoint of each script."""
    scripts = [*PLAIN.values(), *TURBO.values()]
    return {s.SCRIPT: train(s, tmp_path_factory.mktemp("runs")) / "checkpoint.pt" for s in scripts}


def test_checkpoints_that_do_not_fit_are_refused(script, checkpoints, tmp_path, capsys):
    name = algorithm(script)
    other, own = (PLAIN if script is TURBO[name] else TURBO)[name].SCRIPT, checkpoints[script.SCRIPT]
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(own.read_bytes()[: own.stat().st_size // 2])
    cases = [
        ({"resume": checkpoints[other]}, "--resume", f"{other}.py"),
        ({"resume": own, "env_id": "Truncates-v0", "total_timesteps": 500}, "--env-id", small(script)["env_id"]),
        ({"resume": own}, "--total-timesteps", "step 200"),
        ({"resume": damaged}, "--resume", "intact"),
    ]
    if "buffer_size" in small(script):
        cases.append(({"resume": own, "buffer_size": 99, "total_timesteps": 500}, "--buffer-size", "1000"))
    for kwargs, flag, word in cases:
        with pytest.raises(SystemExit) as error:
            script.train(script.Args(**small(script) | {"total_timesteps": 200} | kwargs))
        line = capsys.readouterr().err
        assert error.value.code == 2 and line.startswith(f"error: {flag} ") and word in line, (kwargs, line)


@on_gymnasium
def test_evaluation_is_deterministic_and_leaves_no_run(script, checkpoints, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counted, printed = count_episodes(script, monkeypatch), []
    for _ in range(2):
        path = str(checkpoints[script.SCRIPT])
        script.evaluate(script.Args(**small(script), evaluate=path, eval_episodes=3))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    pattern = r"3 episodes: mean return (-?[\d.]+), standard deviation ([\d.]+)\n"
    mean, deviation = re.fullmatch(pattern, printed[0]).groups()
    returns = counted[-1].return_queue
    assert len(returns) == 3
    assert (float(mean), float(deviation)) == pytest.approx((np.mean(returns), np.std(returns)), abs=0.01)
    assert not list(tmp_path.iterdir())


def call_main(script, monkeypatch, *words):
    """Run the script's command line in this process."""
    monkeypatch.setattr(sys, "argv", [f"{script.SCRIPT}.py", *map(str, words)])
    script.main()


def test_evaluation_of_what_is_not_there_is_refused(script, tmp_path, monkeypatch, capsys):
    for flag in ("--evaluate", "--export", "--resume"):
        with pytest.raises(SystemExit) as error:
            call_main(script, monkeypatch, flag, tmp_path / "missing.pt")
        line = capsys.readouterr().err
        assert error.value.code == 2 and line.startswith(f"error: {flag} {tmp_path}/missing.pt: "), line


def test_a_checkpoint_brings_its_flags(script, checkpoints, tmp_path, monkeypatch, capsys):
    """--resume and --evaluate need no other flag; those that are given count, structural ones are refused by name."""
    if algorithm(script) in ATARI:  # a game may take its 27 000 steps
        monkeypatch.setattr(script, "make_pool", partial(script.make_pool, max_episode_steps=100))
    path = checkpoints[script.SCRIPT]
    call_main(
        script, monkeypatch, "--resume", path.parent, "--total-timesteps", 350, "--run-dir", tmp_path, "--seed", 5
    )
    (folder,) = run_folders(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    wanted = small(script) | {"total_timesteps": 350, "seed": 5, "run_dir": str(tmp_path), "resume": str(path.parent)}
    assert wanted.items() <= config.items()
    assert config["gamma"] == script.Args.gamma and summary(folder)["global_step"] == 350
    capsys.readouterr()
    call_main(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 2)
    assert capsys.readouterr().out.startswith("2 episodes: ")
    for flag, value in (("env_id", "Acrobot-v1"), ("buffer_size", 999)):
        if flag in small(script):
            with pytest.raises(SystemExit) as error:
                words = ("--resume", path, "--total-timesteps", 350, "--run-dir", tmp_path / "no")
                call_main(script, monkeypatch, *words, *flags(**{flag: value}))
            line = capsys.readouterr().err
            assert error.value.code == 2 and line.startswith(
                f"error: {flags(x=1)[0][:2]}{flag.replace('_', '-')} {value}: "
            )
    assert not (tmp_path / "no").exists()


WITHOUT_THE_REPOSITORY = """
import sys, json, torch
for path, obs in zip(sys.argv[1::2], sys.argv[2::2]):
    policy = torch.export.load(path).module()
    print(json.dumps(policy(torch.tensor(json.loads(obs))).tolist()))
assert not any("leanrl" in name or "gymnasium" in name for name in sys.modules)
"""


@on_gymnasium
def test_an_exported_policy_acts_as_evaluation_does(script, checkpoints, tmp_path, monkeypatch, capsys):
    """In a fresh process with torch alone, for one observation and for seven; --export writes the same again."""
    path = checkpoints[script.SCRIPT]
    seen, acted = [], []
    make_policy = script.make_policy

    def remember(module, inputs, outputs):
        seen.append(inputs[0])
        acted.append(outputs)

    def watched(*args):
        policy = make_policy(*args)
        policy.register_forward_hook(remember)
        return policy

    monkeypatch.setattr(script, "make_policy", watched)
    script.evaluate(script.Args(**small(script), evaluate=str(path), eval_episodes=1))
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_THE_REPOSITORY)
    monkeypatch.setattr(script, "make_policy", make_policy)
    copied = tmp_path / "checkpoint.pt"
    copied.write_bytes(path.read_bytes())
    call_main(script, monkeypatch, "--export", copied)
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "policy.pt2")
    command, wanted = [sys.executable, str(program)], []
    for policy, rows in ((path.with_name("policy.pt2"), 7), (tmp_path / "policy.pt2", 1)):
        command += [str(policy), json.dumps(torch.cat(seen[:rows]).tolist())]
        wanted.append(torch.cat(acted[:rows]).numpy())
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for printed, actions in zip(done.stdout.splitlines(), wanted, strict=True):
        np.testing.assert_allclose(json.loads(printed), actions, rtol=1e-5, atol=1e-6)


@on_gymnasium
@pytest.mark.parametrize("env_id", ["DictObservations-v0", "TupleObservations-v0", "DiscreteObservations-v0"])
def test_observations_of_several_parts_are_flattened(script, env_id, tmp_path, capsys):
    prefix = "Pick" if algorithm(script) == "dqn" else "Push"
    sizes = {"learning_starts": 20, "total_timesteps": 60} if "learning_starts" in small(script) else {}
    folder = train(script, tmp_path, env_id=f"{prefix}{env_id}", **sizes)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and "flattened" in notes[0]
    script.evaluate(
        script.Args(**small(script) | {"env_id": f"{prefix}{env_id}"}, evaluate=str(folder), eval_episodes=1)
    )


def test_training_stops_where_numbers_are_no_longer_finite(script, tmp_path, monkeypatch, capsys):
    """Exit code 1, one line, the checkpoint from before, a summary, and no policy."""
    losses_of = learner_class(script).losses
    calls = iter(range(100))

    def explode(learner):
        losses = losses_of(learner)
        return losses if next(calls) == 0 else {name: float("nan") for name in losses}

    monkeypatch.setattr(learner_class(script), "losses", explode)
    with pytest.raises(SystemExit) as error:
        train(script, tmp_path, total_timesteps=1000, checkpoint_interval=50)
    line = capsys.readouterr().err.splitlines()[-1]
    assert error.value.code == 1 and line.startswith("error: step ") and " is nan" in line
    (folder,) = run_folders(tmp_path)
    step = torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"]
    assert str(folder / "checkpoint.pt") in line and step < summary(folder)["global_step"] < 1000
    assert not (folder / "policy.pt2").exists()


def test_a_checkpoint_is_not_overwritten_with_nan(script, tmp_path, capsys):
    def spoil(learner, losses, step):
        if step >= 300:
            networks = (learner.tensors() if hasattr(learner, "tensors") else learner.state_dict())["networks"]
            next(tensor for _, tensor in leaves(networks) if tensor.is_floating_point()).data.fill_(float("nan"))

    sizes = {"total_timesteps": 300, "checkpoint_interval": 100, "run_dir": str(tmp_path)}
    with pytest.raises(SystemExit) as error:
        script.train(script.Args(**small(script) | sizes), on_log=spoil)
    assert error.value.code == 1 and "holds a NaN" in capsys.readouterr().err.splitlines()[-1]
    (folder,) = run_folders(tmp_path)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] == 200


def test_compile_without_a_compiler_is_refused(turbo, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit) as error:
        train(turbo, tmp_path / "runs", compile=True)
    assert error.value.code == 2 and capsys.readouterr().err.startswith(
        "error: --compile True: install no-such-compiler"
    )
    assert not (tmp_path / "runs").exists()


def test_a_buffer_beyond_memory_is_refused(script, tmp_path, capsys):
    if "buffer_size" not in small(script):
        pytest.skip("has no buffer")
    with pytest.raises(SystemExit) as error:
        train(script, tmp_path / "runs", buffer_size=10**12)
    assert error.value.code == 2 and capsys.readouterr().err.startswith(
        "error: --buffer-size 1000000000000: give at most "
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("missing", ["wandb", "login"])
def test_track_without_wandb_or_login_is_refused(either, missing, tmp_path, monkeypatch, capsys):
    """Before the run's folder is made."""
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if missing == "wandb":
        monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as error:
        train(either, tmp_path / "runs", track=True)
    lines = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and lines[-1].startswith("error: --track True: ")
    assert ("pip install wandb" if missing == "wandb" else "wandb login") in lines[-1]
    assert not (tmp_path / "runs").exists()


def test_an_error_in_the_step_of_a_ctrl_c_is_shown(either, tmp_path, monkeypatch):
    """Only what Ctrl-C itself does to a compiler is kept quiet."""

    def fail(learner, losses, step):
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError("in the very step")

    with pytest.raises(ZeroDivisionError, match="very step"):
        either.train(either.Args(**small(either), total_timesteps=1000, run_dir=str(tmp_path)), on_log=fail)


def test_help_groups_the_flags(script, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call_main(script, monkeypatch, "--help")
    text = capsys.readouterr().out
    titles = ["run options", "environment options", "algorithm options"]
    titles += ["speed options"] if script in TURBO.values() else []
    assert all(title in text for title in titles)


def test_capture_video_records_mp4(turbo, tmp_path):
    folder = train(turbo, tmp_path, total_timesteps=201, capture_video=True)
    assert [video.suffix for video in (folder / "videos").glob("*.mp4")]


def test_track_logs_to_wandb_without_a_network(either, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    process = start(either, total_timesteps=250, track=True, run_dir=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert list((run_folders(tmp_path)[0] / "wandb").glob("offline-run-*"))


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_ends_every_loop(script, tmp_path):
    interrupted = []

    def interrupt(learner, losses, step):
        if step >= 150 and not interrupted:  # a second one would end pytest
            interrupted.append(step)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as ended:
        script.train(script.Args(**small(script), total_timesteps=1000, run_dir=str(tmp_path)), on_log=interrupt)
    assert ended.value.code == 130
    (folder,) = run_folders(tmp_path)
    step = summary(folder)["global_step"]
    assert step == torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] and 150 <= step < 500


def test_ctrl_c_ends_the_process_with_everything_written(either, tmp_path):
    process = start(either, total_timesteps=10**6, run_dir=tmp_path, checkpoint_interval=150)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors
    folder = run_folders(tmp_path)[0]
    step = summary(folder)["global_step"]
    assert step == torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] >= 150


def test_ctrl_c_while_the_compiler_runs(tmp_path, monkeypatch):
    """In a terminal Ctrl-C reaches the C++ compiler too; the run still ends with checkpoint and summary."""
    turbo = TURBO["dqn"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    process = start(turbo, total_timesteps=10**6, run_dir=tmp_path / "runs", compile=True, start_new_session=True)
    while "compiling" not in process.stderr.readline(200):
        assert process.poll() is None
    wait_for(lambda: list((tmp_path / "cache").rglob("*.cpp")))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors
    folder = run_folders(tmp_path / "runs")[0]
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] == summary(folder)["global_step"]


def test_a_checkpoint_holds_no_more_than_is_stored(script, tmp_path):
    """200 transitions, not the room for a million. A network for Atari takes 6.8 MB, as does each of Adam's moments."""
    folder = train(script, tmp_path, **{"buffer_size": 10**6} if "buffer_size" in small(script) else {})
    limit = {"ppo_atari": 22, "dqn_atari": 30, "sac_atari": 76}.get(algorithm(script), 10)
    assert (folder / "checkpoint.pt").stat().st_size < limit * 2**20


@pytest.mark.parametrize("name", ["sac", "td3", "ppo"])
def test_actions_in_double_precision(name, tmp_path):
    for script in (PLAIN[name], TURBO[name]):
        train(script, tmp_path, env_id="DoublePrecision-v0")


def test_a_checkpoint_is_replaced_whole_or_not_at_all(either, tmp_path, monkeypatch):
    """The run dies in the middle of writing its second checkpoint: the first is still there."""
    write, calls = torch.save, iter(range(10))

    def die_halfway(checkpoint, file):
        write(checkpoint, file)
        if next(calls) == 1:
            file.truncate(file.tell() // 2)
            raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", die_halfway)
    with pytest.raises(OSError, match="no space"):
        train(either, tmp_path, checkpoint_interval=150, total_timesteps=400)
    checkpoint = torch.load(run_folders(tmp_path)[0] / "checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 150


def test_kill_9_leaves_a_checkpoint_to_resume_from(either, tmp_path):
    """Twice in a row, with SAC five times, each run resuming the one before, at a random moment between checkpoints."""
    script = either
    step, resume = 0, {}
    for _ in range(5 if algorithm(script) == "sac" else 2):
        known = set(tmp_path.glob("*"))
        process = start(script, total_timesteps=10**6, run_dir=tmp_path, checkpoint_interval=20, **resume)
        wait_for(lambda known=known: [p for p in tmp_path.glob("*/checkpoint.pt") if p.parent not in known])
        time.sleep(random.uniform(0, 1))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        path = next(p for p in tmp_path.glob("*/checkpoint.pt") if p.parent not in known)
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["global_step"] > step
        step, resume = checkpoint["global_step"], {"resume": path}
    folder = train(script, tmp_path, total_timesteps=step + 10, resume=str(resume["resume"]))
    assert step + 10 <= summary(folder)["global_step"] < step + 10 + small(script).get("num_steps", 1)
