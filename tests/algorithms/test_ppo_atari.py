"""PPO for Atari: the meaning of envpool's steps, learning from them, plain against turbo, capture."""

import itertools
import json
from functools import partial
from unittest.mock import patch

import checks
import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODES, assert_close_in_norm, clones, copy_networks, learnt, make_learner, scalars, train
from formulas import double, noticing
from test_cli import refused
from test_ppo import fix_order, textbook_advantages

PLAIN, TURBO = conftest.PLAIN["ppo_atari"], conftest.TURBO["ppo_atari"]
script = checks.plain_and_turbo("ppo_atari")
SHAPE = (4, 84, 84)
GAMES = ("..l...g....", "t..lg.x.ll.", "...........", "xtlg.......")
MEANING = {  # of a step: terminated and truncated of the five that envpool returns, info["terminated"]
    ".": (0, 0, 0),  # goes on
    "l": (1, 0, 0),  # a life is lost
    "g": (1, 0, 1),  # game over
    "t": (0, 1, 0),  # time limit
    "x": (0, 1, 1),  # game over in the last step that is allowed
    "r": (0, 0, 0),  # starts an episode: the step behind each of those that end one
}


class ScriptedPool:
    """Stands in for envpool's pool in `AtariEnvs`: games go as `games` says, one string of MEANING's letters for each.

    They are played over and over. Observations are random bytes. Rewards are the game's number plus 1 in each step that
    the player has, and `reset_rewards` in those that start an episode.
    """

    def __init__(self, games=GAMES, seed=0, reset_rewards=0.0, num_actions=4):
        self.games = [itertools.cycle(with_resets(game)) for game in games]
        self.observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
        self.action_space = gym.spaces.Discrete(num_actions)
        self.generator = np.random.default_rng(seed)
        self.rewards = np.arange(1, len(games) + 1)
        self.reset_rewards = reset_rewards

    def observe(self):
        return self.generator.integers(0, 256, (len(self.games), *SHAPE), np.uint8)

    def reset(self):
        return self.observe(), {}

    def step(self, actions):
        self.send(actions)
        return self.recv()

    def send(self, actions):
        assert actions.dtype == np.int32 and all(map(self.action_space.contains, actions))
        self.actions = actions

    def recv(self):
        letters = [next(game) for game in self.games]
        terminated, truncated, game_over = np.array([MEANING[letter] for letter in letters]).T
        raw = np.where(np.array(letters) == "r", self.reset_rewards, self.rewards).astype(np.float32)
        infos = {"reward": raw, "terminated": game_over.astype(np.int32)}
        return self.observe(), raw.clip(-1, 1), terminated.astype(bool), truncated.astype(bool), infos


def with_resets(game):
    """ "..l." to "..lr.": the steps that start an episode are put in."""
    return "".join(letter if letter == "." else f"{letter}r" for letter in game)


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    """Learners that are made in a test play GAMES."""
    for module in (PLAIN, TURBO):
        script_games(module, monkeypatch)


def script_games(module, monkeypatch, pool=ScriptedPool, **scripted):
    def make_pool(args, seed):
        games = itertools.islice(itertools.cycle(GAMES), args.num_envs)
        return pool(**{"games": list(games), "seed": seed} | scripted)

    monkeypatch.setattr(module, "make_pool", make_pool)


def make_envs(script, num_envs=4, seed=0):
    return script.AtariEnvs(script.Args(num_envs=num_envs), seed)


def roll_out(learners, envs, obs=None):
    """Give all learners the same rollout, with the decisions of the first one; returns the last observations."""
    obs = envs.reset()[0] if obs is None else obs
    first = learners[0]
    for t in range(first.args.num_steps):
        actions = first.act(t, obs)
        for learner in learners[1:]:
            learner.act(t, obs)
            for name in ("actions", "log_prob", "values"):
                learner.rollout[name][t] = first.rollout[name][t]
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for learner in learners:
            learner.record(t, rewards, terminated, truncated, infos["is_reset"])
    return obs


def is_plain(learner):
    return not hasattr(learner, "scalars")


def columns_of(learner, last_obs):
    """The columns of a rollout by name, each (num_steps, num_envs, ...), advantages among them."""
    steps = (learner.args.num_steps, learner.args.num_envs)
    if is_plain(learner):
        batch = learner.make_batch(last_obs)
    else:
        with patch.object(learner, "learn_epoch", lambda: None):
            learner.update(1.0, last_obs)
        batch = learner.batch
    names = ("actions", "log_prob", "values", "valid", "advantages", "returns")
    return learner.rollout | {name: batch[name].unflatten(0, steps) for name in names}


def values_of(learner, obs):
    """V of obs, numpy, (batch, 4, 84, 84): (batch,)."""
    obs = torch.from_numpy(obs).to(learner.device)
    with torch.no_grad():
        _, values = learner.agent.logits_and_values(obs)
    return values.cpu().double().numpy()


def test_a_step_says_what_the_learner_and_what_the_statistics_need(script):
    """A life lost ends an episode and no game; a game over is terminal, even in the last step that is allowed."""
    envs = make_envs(script)
    envs.reset()
    letters = [with_resets(game) for game in GAMES]
    for t in range(11):
        _, rewards, terminated, truncated, infos = envs.step(np.zeros(4, np.int64))
        now = [game[t] for game in letters]
        assert terminated.tolist() == [letter in "lgx" for letter in now]
        assert truncated.tolist() == [letter == "t" for letter in now]
        assert infos["game_ended"].tolist() == [letter in "gtx" for letter in now]
        assert infos["is_reset"].tolist() == [letter == "r" for letter in now]
        played = np.array([letter != "r" for letter in now], float)
        assert rewards.tolist() == played.tolist()
        assert infos["raw_rewards"].tolist() == (played * np.arange(1, 5)).tolist()


def naive_advantages(learner, env, gamma, gae_lambda):
    """Advantages of one environment's rollout in GAMES, by step: for each episode by itself, in float64."""
    envs = make_envs(conftest.PLAIN["ppo_atari"])
    obs = [envs.reset()[0]]
    letters = with_resets(GAMES[env] * 2)
    while len(obs) <= learner.args.num_steps:
        obs.append(envs.step(np.zeros(4))[0])
    values = values_of(learner, np.stack(obs)[:, env])
    advantages = {}
    episode = []
    for t in range(learner.args.num_steps):
        if letters[t] != "r":
            episode.append(t)
        if letters[t] in "lgxt" or t == learner.args.num_steps - 1:
            final_value = 0.0 if letters[t] in "lgx" else values[t + 1]
            following = [*values[[*episode[1:]]], final_value]
            rewards = np.ones((len(episode), 1))
            flags = np.zeros((2, len(episode), 1))
            here = values[episode][:, None]
            found = textbook_advantages(rewards, here, np.array(following)[:, None], *flags, gamma, gae_lambda)
            advantages |= dict(zip(episode, found[:, 0], strict=True))
            episode = []
    return advantages


def test_advantages_equal_those_of_each_episode_by_itself(script):
    """Over lives lost, games over, time limits, and rollouts that end in the middle of an episode."""
    learner = make_learner(script, num_envs=4, num_steps=17)
    columns = columns_of(learner, roll_out([learner], make_envs(script)))
    for env in range(4):
        wanted = naive_advantages(learner, env, 0.99, 0.95)
        learnt_from = columns["valid"][:, env].nonzero().flatten().tolist()
        assert learnt_from == sorted(wanted)
        got = columns["advantages"][learnt_from, env].numpy()
        np.testing.assert_allclose(got, [wanted[t] for t in learnt_from], rtol=1e-4, atol=1e-5)


def test_an_episode_that_ends_with_the_rollout_is_not_learnt_from_in_the_next(script):
    """The step that starts an episode is the next rollout's first one."""
    learner = make_learner(script, num_envs=4, num_steps=3)
    envs = make_envs(script)
    obs = roll_out([learner], envs)
    first = columns_of(learner, obs)["valid"].clone()
    second = columns_of(learner, roll_out([learner], envs, obs))["valid"]
    letters = np.array([list(with_resets(game)[:6]) for game in GAMES]).T
    assert letters[3, 0] == "r"
    assert np.array_equal(np.concatenate((first, second)), letters != "r")


def random_rows(count, valid, seed=0):
    """Rows of a batch, by column."""
    torch.manual_seed(seed)
    rows = {name: torch.randn(count) for name in ("log_prob", "values", "advantages", "returns")}
    rows["obs"] = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8)
    rows["actions"] = torch.randint(4, (count,))
    rows["valid"] = torch.as_tensor(valid, dtype=torch.float32)
    rows["log_prob"] = rows["log_prob"] / 10 - 1.4
    return rows


@pytest.mark.parametrize("norm_adv", [False, True])
def test_the_loss_is_that_of_the_valid_rows_alone(script, norm_adv):
    learner = make_learner(script, norm_adv=norm_adv)
    valid = np.array([1, 0, 1, 1, 0, 1, 1, 0])
    rows = random_rows(8, valid)
    kept = {name: column[valid == 1] for name, column in rows.items()}
    with torch.no_grad():
        got, wanted = learner.loss(rows), learner.loss(kept)
    torch.testing.assert_close(got[:3], wanted[:3])
    if norm_adv:
        used = kept["advantages"]
        torch.testing.assert_close(script.masked_variance(rows["advantages"], rows["valid"]), used.var())


def test_the_variance_of_one_row_is_zero(script):
    """And not undefined: advantages are divided by its root."""
    assert script.masked_variance(torch.randn(8), torch.eye(8)[3]) == 0


def test_a_minibatch_without_a_valid_row_changes_nothing(script):
    """At first: later Adam's first moments move the parameters, as in any minibatch."""
    learner = make_learner(script)
    before = clones(conftest.networks(learner))
    obs = np.zeros((2, *SHAPE), np.uint8)
    for t in range(16):
        learner.act(t, obs)
        learner.record(t, np.ones(2), np.zeros(2, bool), np.zeros(2, bool), np.ones(2, bool))
    learner.update(1e-3, obs)
    for name, tensor in conftest.leaves(conftest.networks(learner)):
        assert torch.equal(tensor, before[name])
    losses = learner.losses()
    assert losses.pop("explained_variance") != 0 and set(losses.values()) == {0.0}


def test_what_is_in_steps_that_start_an_episode_changes_nothing(script, monkeypatch):
    """Their rewards and actions; their observations are the last ones of the episode before."""
    results = []
    for reset_rewards in (0.0, 1000.0):
        script_games(script, monkeypatch, reset_rewards=reset_rewards)
        learner = make_learner(script, num_envs=4)
        envs = make_envs(script)
        obs = envs.reset()[0]
        for t in range(16):
            actions = learner.act(t, obs)
            reset_next = envs.ended
            learner.rollout["actions"][t][torch.from_numpy(reset_next)] = 0 if reset_rewards else 3
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            learner.record(t, rewards, terminated, truncated, infos["is_reset"])
        torch.manual_seed(0)
        learner.update(1e-3, obs)
        results.append(clones(conftest.networks(learner)))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


def update_both(monkeypatch, mode="eager", **kwargs):
    """Plain and turbo after each of ten iterations with the same rollouts and minibatches, 5 in each."""
    kwargs = {"num_envs": 4, "num_steps": 10, "num_minibatches": 5, "update_epochs": 1} | kwargs
    plain, turbo = make_learner(PLAIN, **kwargs), make_learner(TURBO, **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    fix_order(monkeypatch)
    envs = make_envs(PLAIN)
    torch.manual_seed(100)
    obs = None
    for iteration in range(10):
        obs = roll_out([plain, turbo], envs, obs)
        for learner in (plain, turbo):
            learner.update(3e-5 * (1 - iteration / 10), obs)
        yield plain, turbo


OTHER_LOSSES = {"clip_vloss": False, "norm_adv": False}


@pytest.mark.parametrize("kwargs", [{}, OTHER_LOSSES], ids=["default", "other losses"])
def test_turbo_equals_plain_in_double_precision(kwargs, monkeypatch, double_precision):
    """From the same weights and rollouts, to rounding."""
    for plain, turbo in update_both(monkeypatch, **kwargs):
        conftest.assert_learners_agree(plain, turbo, tolerance=1e-9)


@checks.settings({"other losses": OTHER_LOSSES})
def test_turbo_equals_plain(kwargs, mode, monkeypatch):
    """From the same weights and rollouts, parameters agree after each iteration, of 5 minibatches.

    Gradients and losses agree less: in float32 rounding decides on which side of 0 some units are.
    """
    with conftest.one_graph_each({"eager": 0, "compile": 2}[mode]):  # acting, update
        for plain, turbo in update_both(monkeypatch, mode, **kwargs):
            got, wanted = (torch.cat([w.flatten() for w in learner.agent.parameters()]) for learner in (turbo, plain))
            assert_close_in_norm({"agent": got}, {"agent": wanted}, 3e-5)
            assert turbo.losses() == pytest.approx(plain.losses(), rel=1e-2, abs=1e-4)


def test_decisions_are_stored_with_their_densities_and_values(script):
    """Those of the sampled actions, which are not the likeliest ones alone."""
    learner = make_learner(script, num_envs=8)
    learner.agent.actor.bias.data.copy_(torch.tensor([0.5, 0.3, 0.15, 0.05]).log())
    obs = make_envs(script, 8).reset()[0]
    actions = learner.act(3, obs)
    with torch.no_grad():
        logits, values = map(double, learner.agent.logits_and_values(torch.from_numpy(obs)))
    log_prob = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = {"actions": actions, "log_prob": log_prob[np.arange(8), actions], "values": values}
    assert len(set(actions)) > 1
    for name, column in wanted.items():
        np.testing.assert_allclose(learner.rollout[name][3], column, rtol=1e-4, atol=1e-6)


def test_actions_are_drawn_by_their_probabilities(script):
    learner = make_learner(script, num_envs=200)
    learner.agent.actor.weight.data.zero_()
    learner.agent.actor.bias.data.copy_(torch.tensor([0.5, 0.3, 0.15, 0.05]).log())
    obs = np.zeros((200, *SHAPE), np.uint8)
    actions = np.concatenate([learner.act(t, obs) for t in range(10)])
    np.testing.assert_allclose(np.bincount(actions, minlength=4) / 2000, [0.5, 0.3, 0.15, 0.05], atol=0.04)


@pytest.mark.parametrize(("target_kl", "epochs"), [(None, 4), (1e9, 4), (1e-9, 1)])
def test_target_kl_ends_the_epochs(script, target_kl, epochs):
    learner = make_learner(script, target_kl=target_kl, update_epochs=4)
    minibatches = checks.watch_minibatches(learner)
    learner.update(1e-3, roll_out([learner], make_envs(script, 2)))
    assert len(minibatches) == epochs * 4


def test_every_transition_is_drawn_once_an_epoch(script):
    learner = make_learner(script, update_epochs=3)
    if script is PLAIN:
        drawn = checks.watch_minibatches(learner, lambda rows: rows["log_prob"])
    else:
        drawn = checks.watch_minibatches(learner, lambda: learner.batch["log_prob"][learner.rows])
    learner.update(1e-3, roll_out([learner], make_envs(script, 2)))
    checks.draws_all_rows(drawn, 32)


def test_a_restored_learner_continues_bit_by_bit(script):
    def advance(learner, part):
        envs = make_envs(script, 2, part)
        obs = None
        for _ in range(3):
            obs = roll_out([learner], envs, obs)
            learner.update(1e-3, obs)

    checks.goes_on_when_restored(partial(make_learner, script), advance)


@pytest.fixture
def envpool(monkeypatch):
    """The real thing."""
    monkeypatch.undo()


@pytest.mark.usefixtures("envpool")
class TestEnvpool:
    """Breakout itself."""

    def test_games_are_seeded(self, script):
        def frames(seed):
            envs = make_envs(script, 2, seed)
            envs.reset()
            return np.stack([envs.step(np.full(2, t % 4))[0] for t in range(60)])

        assert np.array_equal(frames(2**31 + 3), frames(3)) and not np.array_equal(frames(3), frames(4))

    @pytest.mark.parametrize("name", ["Brakeout-v5", "HalfCheetah-v5", "Pendulum-v1"])
    def test_an_unknown_game_is_refused(self, script, name, tmp_path, capsys):
        line = refused(capsys, partial(script.train, script.Args(env_id=name, run_dir=str(tmp_path / "runs"))))
        assert line.startswith(f"error: --env-id {name}: name an Atari game of envpool, ")
        assert not (tmp_path / "runs").exists()

    def test_the_policy_and_its_export_agree(self, script, tmp_path):
        """policy.pt2 chooses the actions with the largest logits."""
        sizes = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "total_timesteps": 64, "run_dir": str(tmp_path)}
        learners = []
        train(script, script.Args(**sizes), on_start=lambda run: learners.append(run.learner))
        (folder,) = tmp_path.iterdir()
        exported = torch.export.load(folder / "policy.pt2").module()
        for batch in (1, 7):
            obs = torch.randint(0, 256, (batch, *SHAPE), dtype=torch.uint8)
            with torch.no_grad():
                logits, _ = learners[0].agent.logits_and_values(obs)
            assert torch.equal(exported(obs), logits.argmax(-1))

    def check_a_run_of_breakout(self, script, run_dir, **flags):
        """2048 steps, after which games have ended, and the policy has changed but can still be anything."""
        args = script.Args(num_steps=64, update_epochs=1, total_timesteps=2048, run_dir=str(run_dir), **flags)
        logged = []
        train(script, args, on_log=lambda learner, losses, step: logged.append(losses))
        (folder,) = run_dir.iterdir()
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["global_step"] == 2048 and summary["episodes"] > 0
        assert all(value in range(20) for value in scalars(folder, "charts/episodic_return"))
        entropies = [losses["entropy"] for losses in logged]
        assert entropies[0] == pytest.approx(np.log(4), abs=1e-3) and 1 < entropies[-1] < np.log(4) - 1e-5

    def test_a_run_on_the_cpu(self, script, tmp_path):
        self.check_a_run_of_breakout(script, tmp_path, cuda=False)

    @pytest.mark.gpu
    @pytest.mark.parametrize("mode", ["cudagraphs", "compile+cudagraphs"])
    def test_a_run_with_graphs(self, mode, tmp_path):
        self.check_a_run_of_breakout(TURBO, tmp_path, **MODES[mode])

    def test_videos_show_the_screen(self, script, tmp_path):
        sizes = {"num_envs": 2, "num_steps": 50, "num_minibatches": 2, "update_epochs": 1, "total_timesteps": 100}
        script.train(script.Args(capture_video=True, run_dir=str(tmp_path), **sizes))
        (folder,) = tmp_path.iterdir()
        assert [video.suffix for video in (folder / "videos").iterdir()][:1] == [".mp4"]


def train_on_cuda(iterations, target_kl=None, **mode):
    """A learner on CUDA after some iterations."""
    sizes = {"num_steps": 8, "num_minibatches": 2, "update_epochs": 2}
    learner = make_learner(TURBO, device="cuda", target_kl=target_kl, **sizes, **mode)
    advance_on_cuda(learner, iterations)
    return learner


def advance_on_cuda(learner, iterations):
    envs = make_envs(TURBO, 2)
    obs = None
    for i in range(iterations):
        obs = roll_out([learner], envs, obs)
        learner.update(1e-3 * (1 - i / 20), obs)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", checks.OTHER_MODES)
@pytest.mark.parametrize("target_kl", [None, 1e9])
@pytest.mark.parametrize("iterations", [1, 6])
def test_modes_agree(mode, target_kl, iterations):
    """Before and after capture, a mode has made exactly the updates that eager code makes."""
    wanted, got = train_on_cuda(iterations, target_kl), train_on_cuda(iterations, target_kl, **MODES[mode])
    assert 1 - got.optimizers["agent"].corrections[0].item() == pytest.approx(0.9 ** (4 * iterations + 1))
    assert_close_in_norm(learnt(got), learnt(wanted), 1e-5 if iterations == 1 else 1e-3, least=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_replays_draw_fresh_noise(mode):
    """Past capture, the same observation gets each action."""
    learner = train_on_cuda(4, **MODES[mode])
    obs = make_envs(TURBO, 2).reset()[0]
    seen = {tuple(learner.act(t % 8, obs).tolist()) for t in range(256)}
    assert len(seen) == 16


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_the_host_waits_for_actions_alone(mode):
    """In the steady loop, by the event of `act`."""
    learner = train_on_cuda(5, **MODES[mode])
    with checks.no_waits():
        advance_on_cuda(learner, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_continues_in_captured_graphs(mode):
    learner = train_on_cuda(5, **MODES[mode])
    checks.goes_on_when_captured(learner, learner, partial(advance_on_cuda, iterations=1))


# planted bugs


check_decisions = test_decisions_are_stored_with_their_densities_and_values
OTHERS_DENSITY = ("log_prob=policy.log_prob(actions)", "log_prob=policy.log_prob(policy.probs.argmax(-1))")
BUGS = [
    (PLAIN, "the density of the likeliest action", *OTHERS_DENSITY, check_decisions),
    (PLAIN, "values that do not belong to it", "values=values)", "values=values.mean())", check_decisions),
]
test_a_planted_bug_is_noticed = noticing(BUGS)
