"""The Atari scripts on a real game: they learn from clipped rewards, lives and frames, and log raw scores."""

import envpool
import numpy as np
import pytest
from conftest import ATARI, MULTI, PLAIN, TURBO, learner_class, scalars, stem, train
from formulas import assert_noticed, planted
from test_training_on_cuda import no_export

SCRIPTS = [scripts[name] for name in ATARI for scripts in (PLAIN, TURBO)] + [MULTI]
STEPS, LIMIT, GAMES = 100, 70, 3  # of each game in a run; of a game; of games that are played together
QUICK = (TURBO["ppo_atari"],)
RUN = {"env_id": "Asteroids-v5", "num_envs": GAMES, "total_timesteps": STEPS * GAMES, "cuda": False, "threads": 1}
OFF_POLICY = {"buffer_size": 1000, "learning_starts": STEPS * GAMES - 1}
ON_POLICY = {"num_steps": STEPS, "num_minibatches": 1}


class Recorder:
    """A pool of envpool that keeps what its games have shown, from the first observations on."""

    def __init__(self, pool):
        self.pool = pool

    def __getattr__(self, name):
        return getattr(self.pool, name)

    def reset(self):
        obs, infos = self.pool.reset()
        self.obs, self.lives = [obs.copy()], [infos["lives"].copy()]
        self.raw, self.over, self.late = [], [], []
        return obs, infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.pool.step(actions)
        shown = (obs, infos["lives"], infos["reward"], infos["terminated"] == 1, truncated)
        for column, values in zip((self.obs, self.lives, self.raw, self.over, self.late), shown, strict=True):
            column.append(values.copy())
        return obs, rewards, terminated, truncated, infos


def play(script, folder):
    """A run without updates; returns the learner and what the games have shown."""
    pools = []

    def make(*args, **kwargs):
        pools.append(Recorder(own_make(*args, max_episode_steps=LIMIT, **kwargs)))
        return pools[-1]

    learners = []
    own_make = envpool.make
    sizes = OFF_POLICY if hasattr(script, "FrameReplay") else ON_POLICY
    if hasattr(script, "PQN"):
        sizes = sizes | {"end_e": 1.0}  # who plays at random loses lives
    with pytest.MonkeyPatch.context() as patch, no_export():
        patch.setattr(envpool, "make", make)
        patch.setattr(learner_class(script), "update", lambda learner, *args: None)
        args = script.Args(**RUN | sizes, run_dir=str(folder))
        train(script, args, on_start=lambda run: learners.append(run.learner))
    return *learners, *pools


def learnt_from(learner):
    """The newest frames, and rewards, terminated and which steps count, of all steps in order, (steps, games, ...)."""
    if hasattr(learner, "rollout"):
        columns = learner.rollout
        frames = columns["obs"][:STEPS, :, -1]
        return frames, *(columns[name] for name in ("rewards", "terminated", "valid"))
    columns = {name: column.unflatten(0, (-1, GAMES)) for name, column in learner.replay.columns.items()}
    valid = np.isin(np.arange(GAMES, (STEPS + 1) * GAMES), learner.replay.transitions[: learner.replay.stored])
    outcomes = [columns[name][1 : STEPS + 1] for name in ("rewards", "terminated")]
    return columns["frames"][:STEPS], *outcomes, valid.reshape(STEPS, GAMES)


def check_games(script, folder):
    learner, shown = play(script, folder)
    frames, rewards, terminated, valid = map(np.asarray, learnt_from(learner))
    raw, over, late = map(np.array, (shown.raw, shown.over, shown.late))
    died = np.diff(np.array(shown.lives), axis=0) < 0
    died |= over
    starts = np.concatenate((np.zeros((1, GAMES), bool), (died | late)[:-1]))  # steps that ignore their actions
    assert np.array_equal(frames, np.array(shown.obs)[:STEPS, :, -1])
    assert np.array_equal(valid, ~starts)
    assert (abs(raw) > 1).any() and np.array_equal(rewards[~starts], np.sign(raw)[~starts])
    assert (died & ~over).any() and np.array_equal(terminated[~starts], died[~starts])

    returns, lengths, first = [], [], np.zeros(GAMES, int)
    for step, game in np.argwhere(over | late):
        returns.append(raw[first[game] : step + 1, game].sum())
        lengths.append(step + 1 - first[game])
        first[game] = step + 1
    (run,) = folder.iterdir()
    assert returns and max(returns) > 10
    assert scalars(run, "charts/episodic_return") == returns and scalars(run, "charts/episodic_length") == lengths


EACH = [pytest.param(s, id=stem(s), marks=[] if s in QUICK else [pytest.mark.thorough]) for s in SCRIPTS]


@pytest.mark.parametrize("script", EACH)
def test_learners_get_clipped_rewards_lives_and_frames_and_logs_raw_scores(script, tmp_path):
    check_games(script, tmp_path)


UNCLIPPED = ("reward_clip=True", "reward_clip=False")
ONE_LIFE = ("episodic_life=True", "episodic_life=False")
LOGGED = ('run.advance(infos["raw_rewards"], ', "run.advance(rewards, ")
BUGS = [(script, "rewards are not clipped", *UNCLIPPED) for script in reversed(SCRIPTS)]
BUGS += [(script, "lives do not end episodes", *ONE_LIFE) for script in SCRIPTS]
BUGS += [(script, "clipped rewards are logged", *LOGGED) for script in SCRIPTS[:-1]]
BUGS += [(MULTI, "clipped rewards are logged", 'append((infos["raw_rewards"]', "append((rewards")]
BUGS += [(SCRIPTS[0], "lives are logged as games", '_ended": game_over |', '_ended": terminated |')]
BUGS += [(SCRIPTS[0], "an older frame", "self.store(t, obs=obs", "self.store(t, obs=obs.roll(1, 1)")]


@pytest.mark.parametrize(("script", "bug", "old", "new"), planted(BUGS))
def test_a_planted_bug_is_noticed(script, bug, old, new, tmp_path):
    (tmp_path / "runs").mkdir()
    assert_noticed(script, old, new, lambda edited: check_games(edited, tmp_path / "runs"), tmp_path)
