"""Misbehaving environments: scripts do not silently lose data or learn from wrong data."""

import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    AGENTS,
    ALL,
    ENTRIES,
    GAMES,
    ON_DEVICE,
    PLAIN,
    TURBO,
    Countdown,
    DiscreteCountdown,
    assert_same_state,
    countdown,
    entry_of,
    on_vectors,
    script_params,
    stem,
    tiny,
    train,
)
from formulas import assert_noticed
from test_atari_off_policy_runs import StackingPool
from test_cli import refused, run_tiny, summary
from test_ppo_atari import GAMES as LETTERS
from test_training_on_cuda import no_export


class InPlace(gym.Wrapper):
    """Shows each step in the same arrays, writes over the actions, and has a `final_obs` of its own."""

    def __init__(self, env):
        super().__init__(env)
        self.shown = np.zeros(2, np.float32)
        self.reward, self.terminated, self.truncated = np.zeros(()), np.zeros((), bool), np.zeros((), bool)

    def reset(self, **kwargs):
        self.shown[:], infos = self.env.reset(**kwargs)
        return self.shown, infos

    def step(self, action):
        obs, *rest, infos = self.env.step(np.copy(action) if isinstance(action, np.ndarray) else action)
        self.shown[:] = obs
        shown = self.reward, self.terminated, self.truncated
        for array, number in zip(shown, rest, strict=True):
            array[...] = number
        if isinstance(action, np.ndarray):
            action[...] = 0
        return self.shown, *shown, infos | {"final_obs": np.full(2, 7, np.float32)}


class Shaped(gym.Wrapper):
    """Observations of `step` have another shape than the space says."""

    def __init__(self, env, shape):
        super().__init__(env)
        self.shape = shape

    def step(self, action):
        obs, *rest = self.env.step(action)
        return np.resize(obs, self.shape), *rest


class Exits(gym.Wrapper):
    """Calls sys.exit(7) in its 150th step, as a game whose window was closed."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 150:
            sys.exit(7)
        return self.env.step(action)


class ChangesFolder(gym.Wrapper):
    def reset(self, **kwargs):
        os.chdir("/")
        return self.env.reset(**kwargs)


class DoesNotClose(gym.Wrapper):
    def close(self):
        raise RuntimeError("no window")


class Tells(gym.Wrapper):
    """The infos of every second environment are of another type."""

    made = 0

    def __init__(self, env):
        super().__init__(env)
        Tells.made += 1
        self.info = {"goal": "none" if Tells.made % 2 else np.ones(2)}

    def reset(self, **kwargs):
        return self.env.reset(**kwargs)[0], self.info

    def step(self, action):
        return *self.env.step(action)[:4], self.info


class HasAWorker(gym.Wrapper):
    """With a process that is forked at each reset and ends at SIGTERM alone."""

    worker = None

    def reset(self, **kwargs):
        if self.worker is None:
            self.worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            self.worker.start()
        return self.env.reset(**kwargs)

    def close(self):
        self.worker.terminate()
        self.worker.join()


WRAPPERS = {"InPlace": InPlace, "Exits": Exits, "ChangesFolder": ChangesFolder, "DoesNotClose": DoesNotClose}
WRAPPERS |= {"HasAWorker": HasAWorker, "Tells": Tells}
SHAPES = {"OneNumber": (1,), "NoDimension": (), "OneRow": (1, 2)}
WRAPPERS |= {name: lambda env, shape=shape: Shaped(env, shape) for name, shape in SHAPES.items()}
for name, wrapper in WRAPPERS.items():
    for prefix, inner in (("", Countdown), ("Discrete", DiscreteCountdown)):
        gym.register(
            f"{prefix}{name}-v0",
            entry_point=lambda wrapper=wrapper, inner=inner: wrapper(inner(blind=False)),
            disable_env_checker=True,
        )


def learned(script, folder, name):
    """What a run of 250 steps in that environment leaves."""
    path = run_tiny(script, folder, env_id=countdown(script, name), total_timesteps=250) / "checkpoint.pt"
    return torch.load(path, weights_only=True)["learner"]


@on_vectors
def test_arrays_that_change_in_place(script, tmp_path):
    """A run is that of an environment with new arrays, bit for bit: what was stored stays, and infos are not read."""
    assert_same_state(learned(script, tmp_path, "InPlace"), learned(script, tmp_path, "Truncates"))


@on_vectors
def test_infos_of_different_types(script, tmp_path):
    """No script reads infos, so they are not collected."""
    sizes = {"env_id": countdown(script, "Tells"), "num_envs": 2, "num_minibatches": 1}
    folder = run_tiny(script, tmp_path, **{name: value for name, value in sizes.items() if hasattr(script.Args, name)})
    assert summary(folder)["global_step"] >= 200


@pytest.mark.parametrize("variant", ["", "Asymmetric", "NextStep", "Disabled", "WithoutFinal"])
@pytest.mark.parametrize("script", script_params([script for script in ALL if entry_of(script).on_device]))
def test_tensors_that_change_in_place(script, variant, tmp_path):
    """A run is that of worlds with new tensors, bit for bit."""
    states = []
    for name in ("Short", "ShortInPlace"):
        sizes = {"env_id": f"tests.torch_pendulum:{name}{variant}-v0", "total_timesteps": 200}
        with no_export():
            folder = run_tiny(script, tmp_path, **sizes)
        states.append(torch.load(folder / "checkpoint.pt", weights_only=True)["learner"])
    assert_same_state(*states)


@pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name in ON_DEVICE for variant in ("Disabled", "WithoutFinal")]
)
@pytest.mark.parametrize("scripts", [PLAIN, TURBO], ids=["plain", "turbo"])
def test_observations_that_are_not_copied_are_noticed(scripts, name, variant, tmp_path):
    (tmp_path / "runs").mkdir()
    old = "torch.cat(columns, -1).float()"
    check = partial(test_tensors_that_change_in_place, variant=variant, tmp_path=tmp_path / "runs")
    assert_noticed(scripts[name], old, f"{old} if columns[1:] else columns[0].float()", check, tmp_path)


class InPlacePool(StackingPool):
    """Shows each step in the same arrays, and writes over the actions."""

    def recv(self):
        obs, *rest, infos = super().recv()
        self.actions[:] = -1
        new = {"obs": obs} | dict(enumerate(rest)) | infos
        shown = vars(self).setdefault("shown", {name: array.copy() for name, array in new.items()})
        for name, array in new.items():
            shown[name][...] = array
        obs, *rest = (shown[name] for name in ("obs", 0, 1, 2))
        return obs, *rest, {name: shown[name] for name in infos}


@pytest.mark.parametrize("script", script_params([script for script in ALL if entry_of(script).atari]))
def test_games_that_change_in_place(script, tmp_path, monkeypatch):
    """A run is that of games with new arrays, bit for bit."""
    states = []
    for pool in (StackingPool, InPlacePool):
        monkeypatch.setattr(script, "make_pool", lambda args, seed, pool=pool: pool(LETTERS, seed=seed))
        with no_export():
            folder = run_tiny(script, tmp_path, num_envs=4, total_timesteps=140)
        states.append(torch.load(folder / "checkpoint.pt", weights_only=True)["learner"])
    assert_same_state(*states)


@pytest.mark.parametrize("script", script_params(left_out=GAMES))
def test_observations_of_another_shape(script, tmp_path):
    """They are an error, or all numbers are taken as they are, but none is repeated."""
    for name in ("OneNumber", "NoDimension"):
        with pytest.raises(ValueError):
            run_tiny(script, tmp_path / name, env_id=countdown(script, name))
    with suppress(ValueError):
        assert_same_state(learned(script, tmp_path, "OneRow"), learned(script, tmp_path, "Truncates"))


LARGEST = float(np.finfo(np.float32).max)
gym.register("LargestNumbers-v0", entry_point=Countdown, kwargs={"low": [-LARGEST], "high": [LARGEST]})
gym.register("WholeNumbers-v0", entry_point=Countdown, kwargs={"low": [-2], "high": [2], "dtype": np.int64})


@pytest.mark.parametrize("name", ["LargestNumbers-v0", "WholeNumbers-v0"])
@pytest.mark.parametrize("script", script_params(left_out=GAMES))
def test_actions_that_are_refused(script, name, tmp_path, capsys):
    no_bounds_needed = name == "LargestNumbers-v0" and entry_of(script).on_device
    if not no_bounds_needed:
        args = script.Args(**tiny(script) | {"env_id": name, "total_timesteps": 200}, run_dir=str(tmp_path))
        assert refused(capsys, lambda: script.train(args)).startswith(f"error: --env-id {name}: actions must be ")


@on_vectors
def test_an_environment_that_exits(script, tmp_path):
    """Everything up to there is saved; the exit code is the environment's."""
    with pytest.raises(SystemExit) as ended:
        run_tiny(script, tmp_path, env_id=countdown(script, "Exits"), total_timesteps=1000)
    (folder,) = tmp_path.iterdir()
    step = summary(folder)["global_step"]
    assert ended.value.code == 7
    assert step == 149 or (entry_of(script).on_device and step > 149)  # with steps that reset, in all environments
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] == step
    assert (folder / "policy.pt2").exists()


def test_an_environment_that_changes_the_folder(either, tmp_path, monkeypatch):
    """All files are where the run began."""
    monkeypatch.chdir(tmp_path)
    sizes = {"env_id": countdown(either, "ChangesFolder"), "total_timesteps": 200, "run_dir": "runs"}
    train(either, either.Args(**tiny(either) | sizes))
    assert Path.cwd() == Path("/")
    (folder,) = (tmp_path / "runs").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "checkpoint.pt", "policy.pt2", "summary.json", f"{stem(either)}.py"} < names


def test_an_environment_that_does_not_close(either, tmp_path):
    assert summary(run_tiny(either, tmp_path, env_id=countdown(either, "DoesNotClose")))["global_step"] == 200


def test_an_environments_process_ends_at_sigterm(either, tmp_path):
    """It has inherited the run's handlers, and still the run's end is not waited for."""
    seen = []

    def interrupt(learner, losses, step):
        seen.append(step)
        signal.raise_signal(signal.SIGTERM)

    sizes = {"env_id": countdown(either, "HasAWorker"), "total_timesteps": 1000, "run_dir": str(tmp_path)}
    with pytest.raises(SystemExit) as ended:
        train(either, either.Args(**tiny(either) | sizes), on_log=interrupt)
    assert ended.value.code == 128 + signal.SIGTERM and len(seen) == 1
    assert not multiprocessing.active_children()


def test_a_colon_is_no_part_of_a_folders_name(either, tmp_path):
    """Windows has drives before it."""
    folder = run_tiny(either, tmp_path, env_id=f"test_environments:{countdown(either, 'Truncates')}")
    assert folder.name.startswith(f"test_environments_{countdown(either, 'Truncates')}__")


class Clock(Countdown):
    """Observations are seconds since 1970: float32 cannot tell one from the next. Pays for actions above 0 alone."""

    def __init__(self):
        super().__init__(length=20)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def observation(self):
        odd = self.generator.integers(2)
        return np.array([1.7e9 + odd, 0.0])

    def reset(self, *, seed=None, options=None):
        self.generator = np.random.default_rng(seed)
        return super().reset(seed=seed)


gym.register("Clock-v0", entry_point=Clock)


FLOAT32 = {name: "its data are in float32" for name in ENTRIES if name not in ("ppo", "ppo_lstm")}


@pytest.mark.parametrize("script", script_params(left_out=AGENTS | FLOAT32))
def test_observations_in_double_precision(script, tmp_path):
    """The policy takes what the environment gives, and tells apart what float32 cannot."""
    folder = run_tiny(script, tmp_path, env_id="Clock-v0", total_timesteps=400)
    program = torch.export.load(folder / "policy.pt2")
    obs, *states = program.example_inputs[0]
    assert obs.dtype == torch.float64
    rows = torch.tensor([[1.7e9, 0.0], [1.7e9 + 1, 0.0]], dtype=torch.float64)
    outputs = program.module()(rows, *states)
    actions = outputs[0] if states else outputs
    assert (actions[0] != actions[1]).all()
