"""`python -m instruments evaluate` plays whole episodes, given only a run's folder."""

import json
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import PLAIN, TURBO, load_copy
from torch import nn

import common.scripts
from instruments import __main__ as command
from instruments import playing
from leanrl import ppo_lstm, ppo_lstm_torchcompile

ROOT = next(path for path in Path(__file__).resolve().parents if (path / "instruments").is_dir())


class Fixed(nn.Module):
    """Answers `action`, whatever it observes."""

    def __init__(self, action):
        super().__init__()
        self.register_buffer("action", torch.as_tensor(action))

    def forward(self, obs):
        first = obs.flatten(1)[:, :1].to(self.action.dtype)
        return self.action + 0 * (first if self.action.ndim else first[:, 0])


class Copied(nn.Module):
    """Answers the first number of an observation."""

    def forward(self, obs):
        return obs[:, :1]


class Remembers(nn.Module):
    """Answers with its state, which is 0.1 larger after each step."""

    def forward(self, obs, state):
        return state + 0 * obs[:, :1], state + 0.1


class Corridor(gym.Env):
    """Rewards each step with its action; ends after `length` steps."""

    def __init__(self, length=5, dtype=np.float32, render_mode=None):
        self.observation_space = gym.spaces.Box(-9, 9, (2,), np.float64)
        self.action_space = gym.spaces.Box(-1, 1, (1,), dtype)
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.place = self.np_random.uniform(-0.5, 0.5)
        return np.full(2, self.place), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        return np.full(2, self.place), float(action[0]), False, self.steps == self.length, {}


class Parts(Corridor):
    """Observations with two parts."""

    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Dict(number=gym.spaces.Discrete(3), vector=gym.spaces.Box(-9, 9, (2,)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        _, *rest = super().step(action)
        return self.observation_space.sample(), *rest


class Blank(Corridor):
    """Renders nothing."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return None


gym.register("Corridor-v0", entry_point=Corridor)
gym.register("DoubleCorridor-v0", entry_point=Corridor, kwargs={"dtype": np.float64})
gym.register("EndlessCorridor-v0", entry_point=Corridor, kwargs={"length": -1})
gym.register("PartsCorridor-v0", entry_point=Parts)
gym.register("BlankCorridor-v0", entry_point=Blank)

NOT_REGISTERED = '''
"""A script's copy that registers its own environment."""
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

gym.register("Mine-v0", entry_point=CartPoleEnv, max_episode_steps=4)
'''


@pytest.fixture
def make_run(tmp_path):
    """A function that makes a run's folder."""

    def make(env_id, policy, shape, dtype=torch.float32):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"env_id": env_id, "script": "mine"}))
        inputs = [torch.zeros(2, *shape, dtype=dtype)]
        if isinstance(policy, Remembers):
            inputs.append(torch.zeros(2, 1))
        shapes = [{0: torch.export.Dim("batch")}] * len(inputs)
        program = torch.export.export(policy, tuple(inputs), dynamic_shapes=tuple(shapes))
        torch.export.save(program, folder / "policy.pt2")
        return folder

    return make


def evaluate(folder, *flags):
    command.main(["evaluate", str(folder), *flags])


def refused(capsys, folder, *flags):
    """The one line with which an evaluation is refused."""
    with pytest.raises(SystemExit) as stop:
        evaluate(folder, *flags)
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert stop.value.code == 2 and not out and len(errors) == 1, err
    assert errors[0].startswith("error: ")
    return errors[0].removeprefix("error: ")


def test_discrete_actions(make_run, capsys):
    evaluate(make_run("CartPole-v1", Fixed(1), (4,)), "--episodes", "20")
    out, err = capsys.readouterr()
    words = out.split()
    assert words[:4] == ["20", "episodes:", "mean", "return"]
    assert 8 < float(words[4].strip(",")) < 11 and 0 < float(words[-1]) < 2  # the pole falls at once
    assert "note" not in err


def test_a_memory_goes_from_step_to_step_and_begins_anew_with_each_episode(make_run, capsys):
    evaluate(make_run("Corridor-v0", Remembers(), (2,)), "--episodes", "3")
    assert capsys.readouterr().out == "3 episodes: mean return 1.00, standard deviation 0.00\n"


def test_the_same_seed_plays_the_same_episodes(make_run, capsys):
    run = make_run("Pendulum-v1", Fixed([0.5]), (3,))
    said = []
    for seed in ("3", "3", "4"):
        evaluate(run, "--episodes", "2", "--seed", seed)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_the_policy_sees_the_observations(make_run, capsys):
    """Each episode's return is 5 times its observation."""
    evaluate(make_run("Corridor-v0", Copied(), (2,)), "--episodes", "4", "--seed", "7")
    env = Corridor()
    places = [env.reset(seed=7 if episode == 0 else None)[0][0] for episode in range(4)]
    mean, deviation = 5 * np.mean(places), 5 * np.std(places)
    assert capsys.readouterr().out == f"4 episodes: mean return {mean:.2f}, standard deviation {deviation:.2f}\n"


@pytest.mark.parametrize("env_id", ["Corridor-v0", "DoubleCorridor-v0"])
def test_actions_keep_to_the_bounds_and_the_type_of_the_space(env_id, make_run, capsys):
    evaluate(make_run(env_id, Fixed([3.0]), (2,)), "--episodes", "2")
    assert capsys.readouterr().out == "2 episodes: mean return 5.00, standard deviation 0.00\n"


def test_observations_with_parts_are_flattened(make_run, capsys):
    evaluate(make_run("PartsCorridor-v0", Fixed([1.0]), (5,)), "--episodes", "2")
    assert capsys.readouterr().out.startswith("2 episodes: mean return 5.00,")


def test_a_file_of_the_run_names_it_too(make_run, capsys):
    run = make_run("Corridor-v0", Fixed([1.0]), (2,))
    (run / "policy.pt2").rename(run / "other.pt2")
    evaluate(run / "other.pt2")
    (run / "other.pt2").rename(run / "policy.pt2")
    evaluate(run / "config.json")
    assert capsys.readouterr().out.count("10 episodes: mean return 5.00") == 2


def test_a_whole_atari_game_for_its_own_rewards(make_run, capsys):
    """A pellet of Ms. Pac-Man is worth 10; a policy that never turns eats a few in each of three lives."""
    pytest.importorskip("envpool")
    evaluate(make_run("MsPacman-v5", Fixed(2), (4, 84, 84), torch.uint8), "--episodes", "2")
    out, err = capsys.readouterr()
    mean = float(out.split("mean return ")[1].split(",")[0])
    assert mean >= 50 and mean % 5 == 0
    assert "cut" not in err
    game = playing.AtariGame("MsPacman-v5", 1)
    game.reset()
    length = 0
    ended = False
    while not ended:
        _, _, terminated, truncated, _ = game.step(2)
        ended = terminated or truncated
        length += 1
    game.close()
    assert length > 300  # a life lasts about 150 steps


def test_an_atari_game_that_is_cut(make_run, capsys):
    pytest.importorskip("envpool")
    run = make_run("Pong-v5", Fixed(0), (4, 84, 84), torch.uint8)
    evaluate(run, "--episodes", "2", "--max-steps", "20")
    out, err = capsys.readouterr()
    assert out.startswith("2 episodes: mean return 0.00")  # nobody has missed the ball yet
    assert "note: 2 of 2 episodes did not end and were cut after 20 steps (--max-steps)" in err


def test_an_environment_that_never_ends(make_run, capsys):
    evaluate(make_run("EndlessCorridor-v0", Fixed([1.0]), (2,)), "--episodes", "3", "--max-steps", "50")
    out, err = capsys.readouterr()
    assert out.startswith("3 episodes: mean return 50.00")
    assert "note: 3 of 3 episodes did not end and were cut after 50 steps" in err


def test_ctrl_c_prints_what_has_been_played(make_run, tmp_path):
    """Slow episodes of ten steps; the signal comes in the second."""
    run = make_run("slow:Slow-v0", Fixed([1.0]), (2,))
    (tmp_path / "slow.py").write_text("""
import os, signal
import gymnasium as gym
import numpy as np

class Slow(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 15:
            os.kill(os.getpid(), signal.SIGINT)
        return np.zeros(2, np.float32), 1.0, False, self.steps % 10 == 0, {}

gym.register("Slow-v0", entry_point=Slow)
""")
    words = [sys.executable, "-m", "instruments", "evaluate", str(run)]
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    # pytest in the background of a shell ignores SIGINT, and so would its children
    default = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    finally:
        signal.signal(signal.SIGINT, default)
    assert done.returncode == 130, done.stderr
    assert done.stdout == "1 episodes: mean return 10.00, standard deviation 0.00\n"
    assert "note: stopped after 1 of 10 episodes" in done.stderr
    assert "note: imports the module slow" in done.stderr and "Traceback" not in done.stderr


def test_a_copy_of_the_script_may_register_the_environment(make_run, capsys):
    run = make_run("Mine-v0", Fixed(0), (4,))
    message = refused(capsys, run)
    assert message.startswith(f"RUN {run}: neither gymnasium nor envpool has its environment Mine-v0;")
    (run / "mine.py").write_text(NOT_REGISTERED)
    try:
        evaluate(run)
    finally:
        gym.registry.pop("Mine-v0", None)
    out, err = capsys.readouterr()
    assert out == "10 episodes: mean return 4.00, standard deviation 0.00\n"
    assert f"note: imports {run / 'mine.py'}, which may register Mine-v0" in err


def test_a_copy_that_cannot_be_imported(make_run, capsys):
    run = make_run("Mine-v0", Fixed(0), (4,))
    (run / "mine.py").write_text("import nothing_of_this_name")
    assert "Mine-v0 cannot be made (ModuleNotFoundError: No module" in refused(capsys, run)


@pytest.mark.parametrize(
    ("env_id", "reason"),
    [
        (":CartPole-v1", "Empty module name"),
        ("nothing_of_this_name:Foo-v0", "No module named 'nothing_of_this_name'"),
        ("a:b:c", "No module named 'a:b'"),
    ],
)
def test_an_environment_that_cannot_be_made(env_id, reason, make_run, capsys):
    message = refused(capsys, make_run(env_id, Fixed(0), (4,)))
    assert f"{env_id} cannot be made" in message and reason in message


@pytest.mark.parametrize(
    ("policy", "shape", "dtype", "reason"),
    [
        (Fixed(0), (5,), torch.float32, "does not fit CartPole-v1's observations, float32 (4,)"),
        (nn.Conv2d(4, 1, 84), (4, 84, 84), torch.float32, "does not fit CartPole-v1's observations, float32 (4,)"),
        (Fixed(2), (4,), torch.float32, "gives 2, which is not in CartPole-v1's Discrete(2)"),
        (Fixed([0.5]), (4,), torch.float32, "gives [0], which is not in CartPole-v1's Discrete(2)"),
    ],
)
def test_a_policy_of_another_environment(policy, shape, dtype, reason, make_run, capsys):
    message = refused(capsys, make_run("CartPole-v1", policy, shape, dtype))
    assert reason in message and message.endswith("with all of its wrappers under an id of its own")


@pytest.mark.parametrize("script", [ppo_lstm, ppo_lstm_torchcompile], ids=["plain", "turbo"])
def test_a_run_with_memory(script, tmp_path, capsys):
    """policy.pt2 gets the returns of the learner's policy."""
    learners = []
    flags = {"total_timesteps": 64, "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "cuda": False}
    common.scripts.train(script, script.Args(run_dir=str(tmp_path), **flags), lambda run: learners.append(run.learner))
    env = gym.make("CartPole-v1")
    policy, inputs = learners[0].policy()
    act = playing.acting(policy, env.action_space, inputs)
    returns = [episode.total for episode in islice(playing.play(env, act, seed=5), 10)]
    (run,) = tmp_path.glob("*/")
    capsys.readouterr()
    evaluate(run, "--episodes", "10", "--seed", "5")
    words = capsys.readouterr().out.split()
    assert words[4] == f"{np.mean(returns):.2f}," and words[-1] == f"{np.std(returns):.2f}"


@pytest.mark.parametrize("scripts", [PLAIN, TURBO], ids=["plain", "turbo"])
def test_an_edited_copy_of_a_script(scripts, tmp_path, capsys):
    """It registers its own environment, in which the learner's policy gets the same returns."""
    source = Path(scripts["sac"].__file__).read_text()
    register = 'gym.register("Short-v0", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=20)\n\n\n'
    script = load_copy("short", source.replace("@dataclass\nclass Args", f"{register}@dataclass\nclass Args"), tmp_path)
    learners = []
    flags = {"env_id": "Short-v0", "total_timesteps": 60, "learning_starts": 20, "batch_size": 8, "buffer_size": 100}
    common.scripts.train(script, script.Args(run_dir=str(tmp_path), **flags), lambda run: learners.append(run.learner))
    env = gym.make("Short-v0")
    policy, inputs = learners[0].policy()
    act = playing.acting(policy, env.action_space, inputs)
    returns = [episode.total for episode in islice(playing.play(env, act, seed=5), 3)]
    gym.registry.pop("Short-v0")
    capsys.readouterr()
    (run,) = tmp_path.glob("*/")
    try:
        evaluate(run, "--episodes", "3", "--seed", "5")
    finally:
        gym.registry.pop("Short-v0", None)
    out, err = capsys.readouterr()
    assert f"note: imports {run / 'short.py'}, which may register Short-v0" in err
    mean, deviation = (float(word.split()[-1]) for word in out.split(","))
    assert mean == pytest.approx(np.mean(returns), abs=0.02) and deviation == pytest.approx(np.std(returns), abs=0.02)


def test_a_policy_that_gives_nan(make_run, capsys):
    assert "gives [nan], which is not in Pendulum-v1's Box" in refused(
        capsys, make_run("Pendulum-v1", Fixed([torch.nan]), (3,))
    )


@pytest.mark.parametrize(("env_id", "shape", "dtype"), [("CartPole-v1", (4,), torch.float32)])
def test_a_video_of_each_episode(env_id, shape, dtype, make_run, capsys):
    run = make_run(env_id, Fixed(0), shape, dtype)
    evaluate(run, "--episodes", "2", "--video")
    videos = sorted(run.glob("videos/*.mp4"))
    assert [path.name for path in videos] == ["evaluation-episode-0.mp4", "evaluation-episode-1.mp4"]
    assert all(path.stat().st_size > 500 for path in videos)
    evaluate(run, "--episodes", "2", "--video")
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_a_video_of_an_atari_game(make_run):
    pytest.importorskip("envpool")
    run = make_run("Pong-v5", Fixed(0), (4, 84, 84), torch.uint8)
    evaluate(run, "--episodes", "1", "--max-steps", "20", "--video")
    assert [path.name for path in run.glob("videos/*.mp4")] == ["evaluation-episode-0.mp4"]


def test_a_video_keeps_to_its_memory(make_run, monkeypatch):
    from moviepy import VideoFileClip

    monkeypatch.setattr(playing, "VIDEO_BYTES", 5 * 400 * 600 * 3)
    run = make_run("CartPole-v1", Fixed(0), (4,))
    evaluate(run, "--episodes", "1", "--video")
    (path,) = run.glob("videos/*.mp4")
    with VideoFileClip(str(path)) as clip:
        assert clip.n_frames <= 6 + 1  # one more than asked for shows that there are too many


@pytest.mark.parametrize("env_id", ["BlankCorridor-v0", "Corridor-v0"])
@pytest.mark.filterwarnings("ignore:.*not in the possible render_modes")
def test_a_video_of_what_cannot_render(env_id, make_run, capsys):
    run = make_run(env_id, Fixed([0.0]), (2,))
    message = refused(capsys, run, "--video")
    assert message.startswith(f"--video: {env_id} cannot be recorded (") and "leave it out" in message
    assert not (run / "videos").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--episodes", "0"], "--episodes 0: give a number from 1"),
        (["--seed", "-1"], "--seed -1: give a number from 0"),
        (["--max-steps", "0"], "--max-steps 0: give a number from 1"),
    ],
)
def test_numbers_out_of_range(flags, message, make_run, capsys):
    assert refused(capsys, make_run("Corridor-v0", Fixed([0.0]), (2,)), *flags) == message


def test_a_folder_that_is_not_a_run(tmp_path, make_run, capsys):
    assert (
        refused(capsys, tmp_path / "none") == f"RUN {tmp_path}/none: there is no such folder; give the folder of a run"
    )
    assert "there is no" in (message := refused(capsys, tmp_path)) and "config.json; give the folder" in message
    run = make_run("Corridor-v0", Fixed([0.0]), (2,))
    config = run / "config.json"
    for text in ("{", "[]", "{}", '"env_id"'):
        config.write_text(text)
        assert f"{config} is damaged" in refused(capsys, run)


def test_a_damaged_policy(make_run, capsys):
    run = make_run("Corridor-v0", Fixed([0.0]), (2,))
    path = run / "policy.pt2"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"hello"):
        path.write_bytes(damaged)
        assert f"{path} cannot be read" in refused(capsys, run)
    path.unlink()
    assert f"there is no {path}; a run writes it with every checkpoint" in refused(capsys, run)


def test_help_names_the_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["evaluate", "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and all(flag in out for flag in ("--episodes", "--seed", "--max-steps", "--video"))
