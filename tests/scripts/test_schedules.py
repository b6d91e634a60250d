"""The exact schedule of a run and its logged numbers, with a fake clock and three environments.

Each script makes a run and resumes it. Its steps and ends are not multiples of the intervals. To save time, nothing is
learned.
"""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import (
    ATARI,
    ENTRIES,
    MULTI,
    PLAIN,
    POPULATION,
    TURBO,
    algorithm,
    countdown,
    entry_of,
    learner_class,
    script_params,
    stem,
    train,
)
from formulas import assert_noticed, is_population, planted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_atari_off_policy_runs import StackingPool
from test_ppo_atari import GAMES, with_resets
from test_training_on_cuda import no_export

NUM_ENVS, SEED = 3, 5
LENGTH = 3  # of an episode of Countdown, whose rewards are 1
LEARNING_STARTS = 30
ROLLOUT = 11  # steps of each environment
ENDS = (230, 420)  # total_timesteps of the two parts
SIZES = {"learning_starts": LEARNING_STARTS, "batch_size": 4, "buffer_size": 600}
SIZES |= {"num_steps": ROLLOUT, "num_minibatches": 3, "update_epochs": 1, "learning_rate": 1e-3}
SIZES |= {"start_e": 0.9, "end_e": 0.1, "exploration_fraction": 0.5, "train_frequency": 20, "update_frequency": 20}
SIZES |= {"target_network_frequency": 50, "reward_scaler": 0.5}
SIZES |= {"num_envs": NUM_ENVS, "checkpoint_interval": 100, "cuda": False, "threads": 1}
SMALL_NETWORKS = {"critic_hidden_dim": 32, "actor_hidden_dim": 16}
RATES = {"actor": (1e-3, 2e-4), "critic": (5e-4, 3e-3)}  # of FastTD3, at the beginning and at the end
FAST_TD3 = {"learning_starts": LEARNING_STARTS // NUM_ENVS, "num_steps": 1, "batch_size": 6} | SMALL_NETWORKS
FAST_TD3 |= {f"{name}_learning_rate{end}": RATES[name][i] for name in RATES for i, end in enumerate(("", "_end"))}
OF_LEARNERS = {"fast_td3": FAST_TD3}


def sizes_of(script):
    """Those of SIZES that a script has, in an environment with short episodes."""
    defaults = vars(script.Args())  # of a population, tuples
    own = {name: value for name, value in SIZES.items() if not isinstance(defaults.get(name, ()), tuple)}
    own |= OF_LEARNERS.get(algorithm(script), {})
    return own if algorithm(script) in ATARI else own | {"env_id": countdown(script, "Truncates")}


def clock(step, first):
    """Seconds since step `first`: steps take longer and longer."""
    return (step**2 - first**2) / 1000


class Part:
    """A run, and what it has done at which steps."""

    def __init__(self, script, run_dir, **kwargs):
        self.saves, self.updates, self.targets, self.exploration = [], [], [], []
        self.rates, self.acting_rates = [], []  # at each log and, of a learner on the device, at each step
        self.resets, self.samplers, self.pools = [], [], []
        self.script, self.run = script, None
        settings = sizes_of(script) | ({"seeds": (SEED,)} if is_population(script) else {"seed": SEED})
        with pytest.MonkeyPatch.context() as patch, no_export():
            patch.setattr(script, "LOG_INTERVAL", 10, raising=False)
            patch.setattr(script.time, "perf_counter", self.now)
            leave_out_learning(script, patch)
            if algorithm(script) in ATARI:
                patch.setattr(script, "make_pool", self.make_pool)
            args = script.Args(**settings | kwargs, run_dir=str(run_dir))
            known = set(run_dir.glob("*"))
            train(script, args, on_start=self.watch)
        (self.folder,) = set(run_dir.glob("*")) - known
        self.agent = self.folder / "agent_0" if is_population(script) else self.folder

    def now(self):
        return clock(self.run.step, self.start) if self.run else 0.0

    def make_pool(self, args, seed):
        self.pools.append(seed)
        return StackingPool(GAMES[: args.num_envs])

    def watch(self, run):
        """Note from now on what is done."""
        self.run, self.start = run, run.step
        learner = run.learner
        self.note(run, "save", self.saves)
        self.note(run, "log", self.rates, lambda losses: rate_of(learner))
        if entry_of(self.script).on_device:
            self.note(learner, "act", self.acting_rates, lambda *inputs: rate_of(learner))
        self.note(learner, "update", self.updates)
        self.note(learner, "update_target", self.targets)
        for name in ("act", "next_actions"):
            self.note(learner, name, self.exploration, lambda *inputs: inputs[-1] if inputs else None)
        if not self.pools:
            envs = run.envs if hasattr(run, "envs") else run.runs[0].envs
            self.note(envs.unwrapped, "reset", self.resets, lambda seed=None, options=None: seed)
            self.note(envs.action_space, "seed", self.samplers, lambda seed: seed)

    def note(self, owner, name, notes, what=None):
        """Have a call of a method noted: `what` of its arguments, or the step."""
        method = getattr(owner, name, None)

        def noted(*args, **kwargs):
            notes.append(what(*args, **kwargs) if what else self.run.step)
            return method(*args, **kwargs)

        if method is not None:
            setattr(owner, name, noted)

    def scalars(self, tag):
        """Steps and values that were logged."""
        events = EventAccumulator(str(self.agent)).Reload().Scalars(tag)
        return [(event.step, event.value) for event in events]

    def summary(self):
        return json.loads((self.agent / "summary.json").read_text())


def leave_out_learning(script, patch):
    learner = script.SACPopulation if is_population(script) else learner_class(script)
    if is_on_policy(script):
        patch.setattr(learner, "learn_epoch", lambda learner, *batch: {}, raising=False)  # of images
        if algorithm(script) == "pqn_atari":
            patch.setattr(learner, "update_minibatch", lambda learner, *rows: None)
    elif not entry_of(script).on_device:  # where `update` also stores, and networks are small
        patch.setattr(learner, "update", count)


def count(learner):
    learner.updates += 1


def rate_of(learner):
    """PPO's or PQN's learning rate; the actor's and the critics' of FastTD3."""
    if type(learner).__name__ not in ("PPO", "PQN", "FastTD3"):
        return None
    optimizers = learner.optimizers.values()
    rates = [own.lr.item() if hasattr(own, "lr") else own.param_groups[0]["lr"] for own in optimizers]
    return rates if len(rates) > 1 else rates[0]


def both_parts(script, folder):
    """The script, a run and the one that resumes it."""
    first = Part(script, folder, total_timesteps=ENDS[0])
    return script, first, Part(script, folder, total_timesteps=ENDS[1], resume=str(first.folder))


def is_on_policy(script):
    return not entry_of(script).off_policy


def steps_of(script, first, total):
    """The steps after which a run from step `first` looks at its intervals: all, or those that end an iteration."""
    stride = NUM_ENVS * ROLLOUT if is_on_policy(script) else NUM_ENVS
    iterations = math.ceil((total - first) / stride)
    return [first + stride * i for i in range(1, iterations + 1)]


def each(script, first, second):
    """Both parts: the part, the step that it begins with, and `steps_of` it."""
    steps = steps_of(script, 0, ENDS[0])
    yield first, 0, steps
    yield second, steps[-1], steps_of(script, steps[-1], ENDS[1])


def reached(interval, first, steps):
    """The first steps from each multiple of `interval` on."""
    multiples = [multiple for multiple in range(interval, steps[-1] + 1, interval) if multiple > first]
    return [min(step for step in steps if step >= multiple) for multiple in multiples]


def check_checkpoints(script, *parts):
    """At the first step from each multiple of the interval on, and at the end."""
    for part, first, steps in each(script, *parts):
        assert part.saves == sorted({*reached(100, first, steps), steps[-1]})
        assert torch.load(part.folder / "checkpoint.pt", weights_only=True)["global_step"] == steps[-1]


def logs_of(script, steps):
    """The steps with a log."""
    if is_on_policy(script):
        return steps
    return [step for step in steps if step % 30 == 0 and step > LEARNING_STARTS]  # if there is something to log


def check_speed(script, *parts):
    """Steps since the last log by seconds since then, and the seconds of this part."""
    for part, first, steps in each(script, *parts):
        logs = logs_of(script, steps)
        before = [first, *logs[:-1]]
        speeds = [(step - last) / (clock(step, 0) - clock(last, 0)) for last, step in zip(before, logs, strict=True)]
        assert [step for step, _ in part.scalars("charts/SPS")] == logs
        assert [speed for _, speed in part.scalars("charts/SPS")] == pytest.approx(speeds)
        assert part.summary()["global_step"] == steps[-1]
        assert part.summary()["wall_seconds"] == pytest.approx(clock(steps[-1], first))


def episodes(script, first, last):
    """Step, return and length of all episodes that end in a run from step `first` to step `last`."""
    found = []
    for i in range(NUM_ENVS):
        reward, letters = 1, "." * (LENGTH - 1) + "t"
        if entry_of(script).on_device:
            letters += "s"  # gymnasium's environments are reset in a step of their own, which does not count
        if algorithm(script) in ATARI:
            reward, letters = i + 1, with_resets(GAMES[i])  # after an end a step that starts the next game
        total = length = 0
        for t in range((last - first) // NUM_ENVS):
            letter = letters[t % len(letters)]
            length += letter != "s"
            total += reward * (letter not in "rs")
            if letter in "gtx":
                found.append((first + NUM_ENVS * (t + 1), i, total, length))
                total = length = 0
    return [(step, total, length) for step, _, total, length in sorted(found)]


def check_episodes(script, *parts):
    returns, number = [], 0
    for part, first, steps in each(script, *parts):
        wanted = episodes(script, first, steps[-1])
        count = len(wanted)
        if entry_of(script).on_device:  # all of them are equal, and their means are logged
            logs = [step for step, _ in part.scalars("charts/SPS")]
            ends = [[step for step, *_ in wanted if last < step <= log] for last, log in pairwise([first, *logs])]
            wanted = [(log, LENGTH, LENGTH) for log, own in zip(logs, ends, strict=True) if own]
            count = sum(map(len, ends))
        assert part.scalars("charts/episodic_return") == [(step, total) for step, total, _ in wanted]
        assert part.scalars("charts/episodic_length") == [(step, length) for step, _, length in wanted]
        returns += [total for _, total, _ in wanted]
        number += count
        assert part.summary()["episodes"] == number
        assert part.summary()["episodic_return"] == pytest.approx(np.mean(returns[-20:]))


def check_seeds(script, *parts):
    """Environments get the seed and the step that the run begins with; so do action spaces that are sampled.

    PPO for discrete actions begins before it is watched here: its learner is made after the first reset, for the masks.
    """
    for part, first, _ in each(script, *parts):
        seen = first > 0 or algorithm(script) != "ppo_discrete"
        assert [seed for seed in part.resets + part.pools if seed is not None] == [SEED + first] * seen
        assert part.samplers == [SEED + first] * (algorithm(script) in ("sac", "td3"))


def check_rates(script, *parts):
    """PPO's and PQN's rate is that of the step with which an iteration begins, from the first rate down to almost 0."""
    if hasattr(script.Args, "anneal_lr"):
        for (part, first, steps), total in zip(each(script, *parts), ENDS, strict=True):
            assert part.rates == pytest.approx([1e-3 * (1 - step / total) for step in [first, *steps[:-1]]])


def check_rates_on_device(script, *parts):
    """At each step: FastTD3's follow a cosine from log to log, PPO's are those that the last iteration left."""
    if not entry_of(script).on_device:
        return
    left = SIZES["learning_rate"]
    for (part, first, steps), total in zip(each(script, *parts), ENDS, strict=True):
        if is_on_policy(script):
            logged = [rate for _, rate in part.scalars("losses/learning_rate")]
            assert part.acting_rates == pytest.approx(np.repeat([left, *logged[:-1]], ROLLOUT))
            assert len({left, *logged}) > 1
            left = logged[-1]
        else:
            logs = [first, *logs_of(script, steps)]
            set_at = [max(log for log in logs if log <= step) for step in [first, *steps[:-1]]]
            shares = (1 + np.cos(np.pi * np.array(set_at) / total)) / 2
            wanted = [end + (start - end) * shares for start, end in RATES.values()]
            np.testing.assert_allclose(part.acting_rates, np.stack(wanted, -1), rtol=1e-5)


def check_updates(script, *parts):
    """DQN's and discrete SAC's: as many as multiples of the frequency are reached; target networks once for these.

    FastTD3's: in each step once learning has started, which a resumed run does not wait for again.
    """
    if hasattr(learner_class(script), "update_target"):
        for part, first, steps in each(script, *parts):
            updates, targets = (reached(frequency, max(first, LEARNING_STARTS), steps) for frequency in (20, 50))
            assert part.updates == updates and part.targets == targets
    if algorithm(script) == "fast_td3":
        for part, _, steps in each(script, *parts):
            calls = 1 if stem(script) == stem(TURBO["fast_td3"]) else script.Args.updates_per_step
            assert part.updates == [step for step in steps if step > LEARNING_STARTS for _ in range(calls)]


def check_exploration(script, *parts):
    """DQN's and PQN's probability of random actions falls from 0.9 to 0.1 over half of the run."""
    if hasattr(script.Args, "start_e"):
        for (part, first, steps), total in zip(each(script, *parts), ENDS, strict=True):
            wanted = [0.9 - 0.8 * min(step / (total / 2), 1) for step in range(first, steps[-1], NUM_ENVS)]
            assert part.exploration == pytest.approx(wanted)


CHECKS = (check_checkpoints, check_speed, check_episodes, check_seeds, check_updates, check_exploration)
CHECKS += (check_rates, check_rates_on_device)


@pytest.mark.parametrize("script", script_params(left_out={}))
def test_a_run_and_the_one_that_resumes_it(script, tmp_path):
    parts = both_parts(script, tmp_path)
    for check in CHECKS:
        check(*parts)


OFF_POLICY = [name for name, entry in ENTRIES.items() if entry.off_policy]
CONSTANT = dict.fromkeys(OFF_POLICY, "its learning rate has another schedule or none")


@pytest.mark.parametrize("script", script_params(left_out=CONSTANT))
def test_a_learning_rate_can_stay(script, tmp_path):
    """And a resumed run's is that of its flags."""
    constant = {"desired_kl": None} if entry_of(script).on_device else {"anneal_lr": False}
    part = Part(script, tmp_path, total_timesteps=2 * NUM_ENVS * ROLLOUT, **constant)
    assert part.rates == pytest.approx([1e-3, 1e-3])
    more = {"total_timesteps": 3 * NUM_ENVS * ROLLOUT, "learning_rate": 2e-3, "resume": str(part.folder)}
    assert Part(script, tmp_path, **constant | more).rates == pytest.approx([2e-3])


SEEDED = "seed=args.seed + run.step)"
STARTED = "self.log_step = self.saved_step = self.step"
JUMPED = ("step // frequency - (step - num_envs) // frequency", "int(step % frequency == 0)")
TO_THE_END = ("max(args.exploration_fraction * args.total_timesteps, 1)", "args.total_timesteps")
ONE_EPSILON = ("epsilon(run.step, args)", "epsilon(run.step - t * args.num_envs, args)")
SAMPLED = ("action_space.seed(args.seed + run.step)", "action_space.seed(args.seed)")
WORLDS_AGAIN = ("envs.reset(args.seed + run.step)", "envs.reset(args.seed)")
GAMES_AGAIN = ('load_checkpoint(args.resume).get("global_step", 0)', "0")
OTHERS_RATE = ("(args.actor_learning_rate, args.actor", "(args.critic_learning_rate, args.actor")
OTHERS_END = ("args.critic_learning_rate_end)", "args.actor_learning_rate_end)")
ANNEALED = "learner.anneal(run.step / args.total_timesteps)\n"
FROM_0 = (f"{ANNEALED}        while", "learner.anneal(0.0)\n        while")
STAYS = (f"{ANNEALED}                    run.log", "run.log")
STARTS_AGAIN = ("if run.step > args.learning", "if run.step - run.bar.initial > args.learning")
NOT_RESUMED = ('        optimizers["agent"]["lr"] = self.optimizers["agent"].lr\n', "")
SCALED = ("for column in (rewards, ended", "for column in (self.args.reward_scaler * rewards, ended")
PLAIN_SCALED = ("episodes.count(rewards,", "episodes.count(self.args.reward_scaler * rewards,")
BUGS = [  # script, what is wrong, what is replaced by what, who notices
    (
        TURBO["dqn"],
        "checkpoints at multiples alone",
        "self.step // interval > self.saved_step // interval",
        "self.step % interval == 0",
        check_checkpoints,
    ),
    (
        TURBO["dqn"],
        "intervals that begin at 0",
        STARTED,
        "self.log_step = self.step\n        self.saved_step = 0",
        check_checkpoints,
    ),
    (
        TURBO["dqn"],
        "speed since the start",
        "self.log_step, self.log_time = self.step, now",
        "self.log_step = self.step",
        check_speed,
    ),
    (
        PLAIN["dqn"],
        "speed with steps of an earlier run",
        STARTED,
        "self.log_step = 0\n        self.saved_step = self.step",
        check_speed,
    ),
    (
        PLAIN["dqn"],
        "seconds since the last log",
        "perf_counter() - self.start_time",
        "perf_counter() - self.log_time",
        check_speed,
    ),
    (TURBO["dqn"], "lengths of all environments together", "self.lengths += 1", "self.lengths += 3", check_episodes),
    (TURBO["ppo"], "lengths that go on", " = self.lengths[i] = 0", " = 0", check_episodes),
    (PLAIN["dqn"], "the same episodes again", SEEDED, "seed=args.seed)", check_seeds),
    (TURBO["ppo"], "the same episodes again", SEEDED, "seed=args.seed)", check_seeds),
    (PLAIN["ppo_lstm"], "the same episodes again", SEEDED, "seed=args.seed)", check_seeds),
    (PLAIN["ppo_gpu"], "the same episodes again", *WORLDS_AGAIN, check_seeds),
    (TURBO["fast_td3"], "the same episodes again", *WORLDS_AGAIN, check_seeds),
    (TURBO["fast_td3"], "the other's rates", *OTHERS_RATE, check_rates_on_device),
    (PLAIN["fast_td3"], "the other's rates", *OTHERS_RATE, check_rates_on_device),
    (PLAIN["fast_td3"], "the other's last rate", *OTHERS_END, check_rates_on_device),
    (TURBO["fast_td3"], "the other's last rate", *OTHERS_END, check_rates_on_device),
    (PLAIN["fast_td3"], "rates from the beginning again", *FROM_0, check_rates_on_device),
    (TURBO["fast_td3"], "rates from the beginning again", *FROM_0, check_rates_on_device),
    (TURBO["fast_td3"], "rates that stay", *STAYS, check_rates_on_device),
    (PLAIN["fast_td3"], "rates that stay", *STAYS, check_rates_on_device),
    (PLAIN["fast_td3"], "learning that starts again", *STARTS_AGAIN, check_updates),
    (TURBO["ppo_gpu"], "a rate that is not resumed", *NOT_RESUMED, check_rates_on_device),
    (TURBO["ppo_gpu"], "returns of scaled rewards", *SCALED, check_episodes),
    (PLAIN["ppo_gpu"], "returns of scaled rewards", *PLAIN_SCALED, check_episodes),
    (TURBO["fast_td3"], "episodes of the last log alone", "self.episodes +=", "self.episodes =", check_episodes),
    (PLAIN["ppo_gpu"], "lengths with resets", "rewards * valid, valid)", "rewards * valid, valid**0)", check_episodes),
    (TURBO["ppo_gpu"], "steps of one environment", "self.step += self.args.num_envs", "self.step += 1", check_speed),
    (TURBO["dqn_atari"], "the same games again", *GAMES_AGAIN, check_seeds),
    (MULTI, "the same games again", *GAMES_AGAIN, check_seeds),
    (TURBO["sac"], "the same actions again", *SAMPLED, check_seeds),
    (PLAIN["td3"], "the same actions again", *SAMPLED, check_seeds),
    (
        POPULATION,
        "the same actions again",
        "action_space.seed(agents[i].seed + population.step)",
        "action_space.seed(agents[i].seed)",
        check_seeds,
    ),
    (TURBO["ppo"], "the next iteration's rate", "1 - run.step /", "1 - (run.step + args.num_steps) /", check_rates),
    (PLAIN["pqn"], "the next iteration's rate", "1 - run.step /", "1 - (run.step + args.num_steps) /", check_rates),
    (MULTI, "the next iteration's rate", "1 - run.step /", "1 - (run.step + args.num_steps) /", check_rates),
    (TURBO["dqn"], "exploration to the end", *TO_THE_END, check_exploration),
    (PLAIN["dqn_atari"], "exploration to the end", *TO_THE_END, check_exploration),
    (TURBO["pqn"], "exploration to the end", *TO_THE_END, check_exploration),
    (TURBO["pqn_atari"], "exploration to the end", *TO_THE_END, check_exploration),
    (PLAIN["pqn"], "one epsilon for a whole rollout", *ONE_EPSILON, check_exploration),
    (TURBO["pqn_atari"], "one epsilon for a whole rollout", *ONE_EPSILON, check_exploration),
    (TURBO["dqn"], "multiples that steps jump over", *JUMPED, check_updates),
    (PLAIN["sac_atari"], "multiples that steps jump over", *JUMPED, check_updates),
]


@pytest.mark.parametrize(("script", "bug", "old", "new", "check"), planted(BUGS))
def test_a_planted_bug_is_noticed(script, bug, old, new, check, tmp_path):
    (tmp_path / "runs").mkdir()
    assert_noticed(script, old, new, lambda edited: check(*both_parts(edited, tmp_path / "runs")), tmp_path)
