"""`python -m instruments evaluate` plays whole episodes, given only a run's folder."""

import json
import signal
import sys
from functools import partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import NOT_FLAT, script_params, tiny
from helpers import ROOT, python, refused
from torch import nn

import common.scripts
from benchmark.report import curves
from instruments import __main__ as command
from instruments import playing


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


class Written(Corridor):
    """Observations [place, steps] as `write` gives them."""

    def __init__(self, write):
        super().__init__()
        self.observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
        self.write = write

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0.5
        return self.write([0.5, 0.0]), {}

    def step(self, action):
        _, *rest = super().step(action)
        return self.write([0.5, self.steps]), *rest


class Shapeless(Corridor):
    def __init__(self, space):
        super().__init__()
        self.observation_space = space


class Blank(Corridor):
    """Renders nothing."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return None


class Broken(Corridor):
    """Something is wrong in the third of its episodes, or when it closes."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        if self.episodes == 3 and self.at == "reset":
            sys.exit()
        return super().reset(seed=seed)

    def step(self, action):
        obs, *rest = super().step(action)
        if self.episodes == 3 and self.at == "step":
            sys.exit(0)
        return obs * np.nan if self.episodes == 3 and self.at == "NaN" else obs, *rest

    def close(self):
        if self.at == "close":
            raise OSError("no")


gym.register("Corridor-v0", entry_point=Corridor)
for at in ("reset", "step", "NaN", "close"):
    gym.register(f"Broken-{at}-v0", entry_point=Broken, kwargs={"at": at})
gym.register("DoubleCorridor-v0", entry_point=Corridor, kwargs={"dtype": np.float64})
gym.register("EndlessCorridor-v0", entry_point=Corridor, kwargs={"length": -1})
gym.register("PartsCorridor-v0", entry_point=Parts)
gym.register("BlankCorridor-v0", entry_point=Blank)
WRITTEN = {
    "list": lambda obs: obs,
    "reversed": lambda obs: np.array(obs[::-1], np.float32)[::-1],
    "big-endian": lambda obs: np.array(obs, ">f4"),
    "float64": np.array,
}
for name, write in WRITTEN.items():
    gym.register(f"Written-{name}-v0", entry_point=Written, kwargs={"write": write})
for name, space in NOT_FLAT.items():
    gym.register(f"Shapeless-{name}-v0", entry_point=Shapeless, kwargs={"space": space})


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


@pytest.fixture
def refusal(capsys):
    """A function that returns the one line with which an evaluation is refused."""
    return partial(refused, capsys, evaluate)


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


@pytest.mark.parametrize("name", WRITTEN)
def test_observations_of_any_kind_are_read(name, make_run, capsys):
    """The policy answers 0.5, the first number of each, in five steps."""
    evaluate(make_run(f"Written-{name}-v0", Copied(), (2,)), "--episodes", "2")
    assert capsys.readouterr().out == "2 episodes: mean return 2.50, standard deviation 0.00\n"


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


@pytest.mark.parametrize(
    ("env_id", "policy", "shape", "dtype", "total"),
    [
        ("Pong-v5", Fixed(0), (4, 84, 84), torch.uint8, "0.00"),  # nobody has missed the ball yet
        ("EndlessCorridor-v0", Fixed([1.0]), (2,), torch.float32, "20.00"),
    ],
)
def test_an_episode_that_is_cut(env_id, policy, shape, dtype, total, make_run, capsys):
    pytest.importorskip("envpool")
    evaluate(make_run(env_id, policy, shape, dtype), "--episodes", "2", "--max-steps", "20")
    out, err = capsys.readouterr()
    assert out.startswith(f"2 episodes: mean return {total}")
    assert "note: 2 of 2 episodes did not end and were cut after 20 steps (--max-steps)" in err


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
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    # pytest in the background of a shell ignores SIGINT, and so would its children
    default = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = python("-m", "instruments", "evaluate", run, cwd=tmp_path, env=environment, timeout=120)
    finally:
        signal.signal(signal.SIGINT, default)
    assert done.returncode == 130, done.stderr
    assert done.stdout == "1 episodes: mean return 10.00, standard deviation 0.00\n"
    assert "note: stopped after 1 of 10 episodes" in done.stderr
    assert "note: imports the module slow" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("at", ["reset", "step"])
def test_an_environment_that_ends_the_program(at, make_run, capsys):
    """This is an error, whatever its exit code; episodes before that are printed."""
    with pytest.raises(RuntimeError, match=r"the environment ended the program with sys.exit\("):
        evaluate(make_run(f"Broken-{at}-v0", Fixed([1.0]), (2,)))
    out, err = capsys.readouterr()
    assert out.startswith("2 episodes: mean return 5.00,") and "note: stopped after 2 of 10 episodes" in err


def test_observations_that_are_nan(make_run, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate(make_run("Broken-NaN-v0", Fixed([1.0]), (2,)))
    assert ended.value.code == "error: episode 3: an observation is NaN; correct the environment"
    assert capsys.readouterr().out.startswith("2 episodes: mean return 5.00,")


def test_an_environment_that_cannot_be_closed(make_run, capsys):
    evaluate(make_run("Broken-close-v0", Fixed([1.0]), (2,)))
    out, err = capsys.readouterr()
    assert out.startswith("10 episodes: mean return 5.00,")
    assert err.endswith("note: Broken-close-v0 cannot be closed (OSError: no)\n")


def test_an_environment_that_nobody_registers(make_run, refusal):
    """tests/tools/test_own_script.py has one that the run's copy of the script registers."""
    run = make_run("Mine-v0", Fixed(0), (4,))
    assert refusal(run).startswith(f"RUN {run}: neither gymnasium nor envpool has its environment Mine-v0;")


def test_a_copy_that_cannot_be_imported(make_run, refusal):
    run = make_run("Mine-v0", Fixed(0), (4,))
    (run / "mine.py").write_text("import nothing_of_this_name")
    assert "Mine-v0 cannot be made (ModuleNotFoundError: No module" in refusal(run)


@pytest.mark.parametrize(
    ("env_id", "reason"),
    [
        (":CartPole-v1", "Empty module name"),
        ("nothing_of_this_name:Foo-v0", "No module named 'nothing_of_this_name'"),
        ("a:b:c", "No module named 'a:b'"),
    ],
)
def test_an_environment_that_cannot_be_made(env_id, reason, make_run, refusal):
    message = refusal(make_run(env_id, Fixed(0), (4,)))
    assert f"{env_id} cannot be made" in message and reason in message


@pytest.mark.parametrize("name", NOT_FLAT)
def test_observations_that_are_no_vector(name, make_run, refusal, capsys, tmp_path):
    env_id = f"Shapeless-{name}-v0"
    message = refusal(make_run(env_id, Fixed(0), (4,)))
    assert f"{env_id} cannot be made (ValueError: its observations cannot be flattened to a vector: " in message
    message = refused(capsys, curves.measure_random, tmp_path / "curves.csv", env_id)
    assert message.startswith(f"--env-id {env_id}: cannot be played (ValueError: its observations cannot be flattened")


@pytest.mark.parametrize(
    ("policy", "shape", "dtype", "reason"),
    [
        (Fixed(0), (5,), torch.float32, "does not fit CartPole-v1's observations, float32 (4,)"),
        (nn.Conv2d(4, 1, 84), (4, 84, 84), torch.float32, "does not fit CartPole-v1's observations, float32 (4,)"),
        (Fixed(2), (4,), torch.float32, "gives 2, which is not in CartPole-v1's Discrete(2)"),
        (Fixed([0.5]), (4,), torch.float32, "gives [0], which is not in CartPole-v1's Discrete(2)"),
    ],
)
def test_a_policy_of_another_environment(policy, shape, dtype, reason, make_run, refusal):
    message = refusal(make_run("CartPole-v1", policy, shape, dtype))
    assert reason in message and message.endswith("with all of its wrappers under an id of its own")


@pytest.mark.parametrize("script", script_params())
def test_a_run_gets_the_returns_of_its_learner(script, tmp_path, capsys):
    """Those of the learner's policy, with or without a memory, in the same episodes."""
    learners = []
    args = script.Args(**tiny(script) | {"total_timesteps": 200, "run_dir": str(tmp_path)})
    common.scripts.train(script, args, lambda run: learners.append(run.learner))
    env = playing.make_env(args.env_id, 5)
    policy, inputs = learners[0].policy()
    act = playing.acting(policy, env.action_space, inputs)
    returns = [episode.total for episode in islice(playing.play(env, act, 5, 300), 3)]
    (run,) = tmp_path.glob("*/")
    capsys.readouterr()
    evaluate(run, "--episodes", "3", "--seed", "5", "--max-steps", "300")
    mean, deviation = (float(word.split()[-1]) for word in capsys.readouterr().out.split(","))
    assert mean == pytest.approx(np.mean(returns), abs=0.02) and deviation == pytest.approx(np.std(returns), abs=0.02)


def test_a_policy_that_gives_nan(make_run, refusal):
    assert "gives [nan], which is not in Pendulum-v1's Box" in refusal(
        make_run("Pendulum-v1", Fixed([torch.nan]), (3,))
    )


@pytest.mark.parametrize(
    ("env_id", "shape", "dtype"),
    [("CartPole-v1", (4,), torch.float32), ("Pong-v5", (4, 84, 84), torch.uint8)],
)
def test_a_video_of_each_episode(env_id, shape, dtype, make_run, capsys):
    pytest.importorskip("envpool")
    run = make_run(env_id, Fixed(0), shape, dtype)
    for _ in range(2):  # the second one replaces the videos
        evaluate(run, "--episodes", "2", "--max-steps", "20", "--video")
        videos = sorted(run.glob("videos/*.mp4"))
        assert [path.name for path in videos] == ["evaluation-episode-0.mp4", "evaluation-episode-1.mp4"]
        assert all(path.stat().st_size > 500 for path in videos)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


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
def test_a_video_of_what_cannot_render(env_id, make_run, refusal):
    run = make_run(env_id, Fixed([0.0]), (2,))
    message = refusal(run, "--video")
    assert message.startswith(f"--video: {env_id} cannot be recorded (") and "leave it out" in message
    assert not (run / "videos").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--episodes 0", "--episodes 0: give a finite number from 1"),
        ("--seed -1", "--seed -1: give a number from 0 to 4294967295"),
        ("--seed 4294967296", "--seed 4294967296: give a number from 0 to 4294967295"),
        ("--max-steps 0", "--max-steps 0: give a finite number from 1"),
    ],
)
def test_numbers_out_of_range(flags, message, make_run, refusal):
    assert refusal(make_run("Corridor-v0", Fixed([0.0]), (2,)), *flags.split()) == message


def test_a_folder_that_is_not_a_run(tmp_path, make_run, refusal):
    assert refusal(tmp_path / "none") == f"RUN {tmp_path}/none: there is no such folder; give the folder of a run"
    assert "there is no" in (message := refusal(tmp_path)) and "config.json; give the folder" in message
    run = make_run("Corridor-v0", Fixed([0.0]), (2,))
    config = run / "config.json"
    for text in ("{", "[]", "{}", '"env_id"'):
        config.write_text(text)
        assert f"{config} is damaged" in refusal(run)


def test_a_damaged_policy(make_run, refusal):
    run = make_run("Corridor-v0", Fixed([0.0]), (2,))
    path = run / "policy.pt2"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"hello"):
        path.write_bytes(damaged)
        assert f"{path} cannot be read" in refusal(run)
    path.unlink()
    assert f"there is no {path}; a run writes it with every checkpoint" in refusal(run)


def test_help_names_the_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["evaluate", "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and all(flag in out for flag in ("--episodes", "--seed", "--max-steps", "--video"))
