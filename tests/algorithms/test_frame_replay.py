"""FrameReplay against a buffer that stores whole stacks: streams of envpool and similar ones, checkpoints, CUDA."""

import io
import itertools
from collections import deque
from functools import partial

import envpool
import numpy as np
import pytest
import torch
from checks import no_waits
from conftest import saved

from leanrl import dqn_atari
from leanrl.dqn_atari import FrameReplay

CPU = torch.device("cpu")
SMALL = (4, 3, 2)
ATARI = (4, 84, 84)
COLUMNS = ("obs", "next_obs", "actions", "rewards", "terminated")  # of a transition


class StackReplay:
    """Every transition with both of its stacks, as they came. Those of the newest vector steps can be drawn."""

    def __init__(self, size, num_envs):
        self.steps = deque(maxlen=size // num_envs)
        self.obs = [None] * num_envs

    def store(self, obs, actions, rewards, terminated, is_reset):
        rows = zip(self.obs, obs, actions, rewards, terminated, strict=True)
        self.steps.append([row for row, reset in zip(rows, is_reset, strict=True) if not reset])
        self.obs = obs

    def columns(self):
        """All transitions that can be drawn, from the oldest to the newest, by name."""
        columns = zip(*itertools.chain(*self.steps), strict=True)
        return {name: np.stack(column) for name, column in zip(COLUMNS, columns, strict=True)}


class Streams:
    """Environments that stack frames as envpool does. Frames are small and all of one colour; many repeat the last one.

    Lives and games are short. `ended` is what the last step of each environment ended: "", "life", "game", by a game
    over, or "time". The step behind it is a reset. Now and then a lost life is followed by a new game, as in envpool.
    """

    def __init__(self, num_envs, seed=0):
        self.generator = np.random.default_rng(seed)
        self.num_envs = num_envs
        self.frames = 0

    def frame(self):
        self.frames += 1
        return np.full(SMALL[1:], self.frames % 256, np.uint8)

    def reset(self):
        self.ended = [""] * self.num_envs
        self.obs = np.stack([np.stack([self.frame()] * SMALL[0]) for _ in range(self.num_envs)])
        return self.obs, {}

    def step(self):
        """Arguments for `store`."""
        is_reset = np.array(self.ended) != ""
        obs = []
        for i, ended in enumerate(self.ended):
            stands_still = self.generator.random() < 0.3
            newest = self.obs[i, -1] if stands_still else self.frame()
            starts_game = ended in ("game", "time") or (ended == "life" and self.generator.random() < 0.2)
            obs.append(np.stack([newest] * SMALL[0] if starts_game else [*self.obs[i, 1:], newest]))
        self.obs = np.stack(obs)
        ends = self.generator.choice(["", "life", "game", "time"], self.num_envs, p=[0.8, 0.12, 0.04, 0.04])
        self.ended = np.where(is_reset, "", ends).tolist()
        terminated = np.isin(self.ended, ("life", "game"))
        actions = self.generator.integers(0, 18, self.num_envs)
        rewards = self.generator.normal(size=self.num_envs).astype(np.float32)
        return self.obs, actions, rewards, terminated, is_reset


def buffers_and_streams(size, num_envs, seed=0, device=CPU):
    """Both buffers, in which the same transitions can be drawn, and streams for them."""
    return FrameReplay(size, num_envs, SMALL, device), StackReplay(size, num_envs), Streams(num_envs, seed)


def begin(buffers, envs):
    """Store what `reset` returns, to which no actions led."""
    obs, _ = envs.reset()
    nothing = np.zeros(envs.num_envs)
    for buffer in buffers:
        buffer.store(obs, nothing, nothing, nothing, np.ones(envs.num_envs, bool))
    return obs


def advance(buffers, streams, steps=1):
    for _ in range(steps):
        step = streams.step()
        for buffer in buffers:
            buffer.store(*step)


def draw_all(replay, count):
    """What `sample` returns if each of `count` transitions is drawn once, from the oldest to the newest; numpy."""
    uniform = (torch.arange(count, dtype=torch.float64, device=replay.device) + 0.5) / count
    return {name: column.cpu().numpy() for name, column in sample(replay, uniform).items()}


def sample(replay, uniform):
    """What `replay.sample` returns, by name."""
    return dict(zip(COLUMNS, replay.sample(uniform), strict=True))


def assert_same_transitions(replay, naive):
    """The same can be drawn from both, bit for bit, and nothing else."""
    wanted = naive.columns()
    got = draw_all(replay, len(wanted["actions"]))
    assert got.keys() == wanted.keys()
    for name, column in got.items():
        assert np.array_equal(column, wanted[name]), name


def assert_drawn(columns, naive, uniform):
    """These numbers have drawn these transitions."""
    wanted = naive.columns()
    rows = (uniform * len(wanted["actions"])).long().numpy()
    for name, column in columns.items():
        assert np.array_equal(column.cpu().numpy(), wanted[name][rows]), name


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("size", "num_envs"), [(2, 1), (3, 1), (50, 1), (16, 8), (50, 3), (100, 16)])
def test_transitions_come_out_as_they_went_in(size, num_envs, seed):
    """After each of the steps in which the ring is filled and overwritten several times."""
    replay, naive, streams = buffers_and_streams(size, num_envs, seed)
    begin((replay, naive), streams)
    for _ in range(max(100, 8 * replay.steps)):
        advance((replay, naive), streams)
        assert_same_transitions(replay, naive)


def test_streams_have_all_that_can_go_wrong():
    """What ended before a step, and its stack: the one before moved on or not, one frame four times or not."""
    streams, seen = Streams(10), set()
    streams.reset()
    for _ in range(500):
        before, ended = streams.obs, streams.ended
        obs, *_ = streams.step()
        moved_on = (obs[:, :-1] == before[:, 1:]).all((1, 2, 3))
        one_frame = (obs == obs[:, :1]).all((1, 2, 3))
        seen |= set(zip(ended, moved_on.tolist(), one_frame.tolist(), strict=True))
    of_play = {("", True, False), ("", True, True)}
    of_lives = {("life", True, False), ("life", True, True), ("life", False, True)}
    of_games = {(end, moved_on, True) for end in ("game", "time") for moved_on in (False, True)}
    assert seen == of_play | of_lives | of_games


LIFE, NEW_GAME_IN_LIFE, GAME, TIME = ("life", True), ("life", False), ("game", False), ("time limit", False)


@pytest.mark.parametrize(
    ("game", "settings", "sights"),
    [
        ("Breakout-v5", {}, {LIFE, GAME}),
        ("Breakout-v5", {"max_episode_steps": 40}, {LIFE, TIME}),
        ("Pong-v5", {"max_episode_steps": 60}, {TIME}),
        ("SpaceInvaders-v5", {"noop_max": 1500, "max_episode_steps": 150}, {LIFE, NEW_GAME_IN_LIFE}),
    ],
)
def test_stacks_are_envpools(game, settings, sights, monkeypatch):
    """`sights` are what has ended an episode, and whether the next one's first stack has gone on.

    In the last case games are lost while a life begins with many actions that do nothing.
    """
    monkeypatch.setattr(envpool, "make", partial(envpool.make, **settings))
    envs = dqn_atari.AtariEnvs(dqn_atari.Args(env_id=game, num_envs=4), seed=1)
    replay, naive = FrameReplay(150, 4, ATARI, CPU), StackReplay(150, 4)
    generator, seen, ended = np.random.default_rng(0), set(), [""] * 4
    obs = begin((replay, naive), envs)
    for step in range(600):
        actions = generator.integers(0, envs.single_action_space.n, 4)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        for buffer in (replay, naive):
            buffer.store(next_obs, actions, rewards, terminated, infos["is_reset"])
        if step % 30 == 29:
            assert_same_transitions(replay, naive)
        goes_on = (next_obs[:, :-1] == obs[:, 1:]).all((1, 2, 3)).tolist()
        seen |= {sight for sight in zip(ended, goes_on, strict=True) if sight[0]}
        lost = np.where(infos["game_ended"], "game", "life")
        ended = np.where(terminated, lost, np.where(truncated, "time limit", "")).tolist()
        obs = next_obs
    envs.close()
    assert sights <= seen <= {LIFE, NEW_GAME_IN_LIFE, GAME, TIME}


def test_only_resets_are_not_drawn_and_all_others_with_equal_probability():
    """The numbers that draw are cut into one piece of the same length for each transition, at both ends too."""
    replay, naive, streams = buffers_and_streams(60, 3)
    begin((replay, naive), streams)
    advance((replay, naive), streams, 70)
    rewards = naive.columns()["rewards"]
    count = len(rewards)
    assert len(set(rewards)) == count < 60
    uniform = np.random.default_rng(0).random(20_000)
    uniform[:2] = 0, np.nextafter(1, 0)
    drawn = sample(replay, torch.from_numpy(uniform))["rewards"].numpy()
    assert np.array_equal(drawn, rewards[(uniform * count).astype(int)])


def test_compiled_in_one_graph_it_does_the_same():
    """Writing and drawing, for several rounds of the ring, without a recompilation."""
    torch._dynamo.reset()
    replay, naive, streams = buffers_and_streams(30, 3)
    begin((replay, naive), streams)
    uniform = torch.rand(100, dtype=torch.float64)

    @partial(torch.compile, fullgraph=True)
    def store_and_sample(*step):
        replay.store(*step)
        return sample(replay, uniform)

    for step in range(60):
        values = streams.step()
        naive.store(*values)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            columns = store_and_sample(*map(torch.from_numpy, values))
        assert_drawn(columns, naive, uniform)


@pytest.mark.parametrize("num_envs", [1, 8, 256])
def test_a_million_transitions_take_7_gigabytes(num_envs):
    replay = FrameReplay(10**6, num_envs, ATARI, torch.device("meta"))
    tensors = replay.tensors(replay.steps).values()
    assert 84 * 84 * 10**6 < sum(tensor.nbytes for tensor in tensors) < 7.2e9


@pytest.mark.parametrize("begins_anew", [False, True])
@pytest.mark.parametrize(("steps", "used"), [(0, False), (5, False), (20, True), (33, False), (200, False)])
def test_a_restored_buffer_goes_on(steps, used, begins_anew):
    """With the same games, or with new ones, as in a run that is resumed; and without all that it had before."""
    replay, naive, streams = buffers_and_streams(100, 3)
    restored = FrameReplay(100, 3, SMALL, CPU)
    if used:
        begin([restored], streams)
        advance([restored], streams, 200)
    begin((replay, naive), streams)
    advance((replay, naive), streams, steps)
    restored.load_state_dict(saved(replay))
    if steps:
        assert_same_transitions(restored, naive)
    if begins_anew:
        begin((restored, naive), streams)
    for _ in range(100):
        advance((restored, naive), streams)
        assert_same_transitions(restored, naive)


def test_a_checkpoint_has_what_is_stored_and_is_no_copy():
    """It is the buffer's own memory, and of a large tensor torch.save writes no more than what is filled."""
    replay, streams = FrameReplay(10**6, 2, SMALL, CPU), Streams(2)
    begin([replay], streams)
    advance([replay], streams, 30)
    frames = replay.state_dict()["frames"]
    assert frames.data_ptr() == replay.columns["frames"].data_ptr()
    assert frames.untyped_storage().nbytes() == 31 * 2 * 6
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    assert file.tell() < replay.stored_before.nbytes + 10_000


CUDA = torch.device("cuda")


@pytest.mark.gpu
class TestOnCuda:
    def test_a_graph_writes_and_draws_and_nothing_waits(self):
        replay, naive, streams = buffers_and_streams(50, 3, device=CUDA)
        begin((replay, naive), streams)
        inputs = [torch.as_tensor(values, device=CUDA) for values in streams.step()]
        uniform = torch.rand(100, dtype=torch.float64)
        on_device = uniform.to(CUDA)
        with no_waits():
            replay.store(*inputs)
            sample(replay, on_device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replay.store(*inputs)
            columns = sample(replay, on_device)
        for step in range(100):
            values = streams.step()
            naive.store(*values)
            for tensor, array in zip(inputs, values, strict=True):
                tensor.copy_(torch.from_numpy(array))
            graph.replay()
            if step >= 20:  # the one from before capture cannot be drawn any more
                assert_drawn(columns, naive, uniform)

    @pytest.mark.parametrize(("first", "second"), [(CPU, CUDA), (CUDA, CPU)])
    def test_batches_and_checkpoints(self, first, second):
        """What is saved on one device comes back on the other, and batches are where the buffer is."""
        replay, naive, streams = buffers_and_streams(50, 3, device=first)
        restored = FrameReplay(50, 3, SMALL, second)
        begin((replay, naive), streams)
        advance((replay, naive), streams, 40)
        assert_same_transitions(replay, naive)
        restored.load_state_dict(saved(replay))
        advance((restored, naive), streams, 10)
        assert_same_transitions(restored, naive)
        columns = restored.sample(torch.zeros(5, dtype=torch.float64, device=second))
        assert {column.device.type for column in columns} == {second.type}
