"""Bugs that show only on a CUDA device, planted in copies of the scripts: each is caught by the named test.

CI plants one of each kind. To plant all: `pytest -m "planted or thorough" tests/cuda/test_planted_bugs.py -s`. The
unchanged scripts pass the same tests in their own files. doc/cuda_without_a_gpu.md counts the bugs by kind.
"""

import itertools
import re
from pathlib import Path

import pytest
import test_atari_off_policy
import test_atari_off_policy_runs
import test_dqn
import test_multigpu
import test_population
import test_ppo
import test_ppo_atari
import test_pqn
import test_replay
from conftest import ENTRIES, MULTI, POPULATION, TURBO, algorithm, load_copy, stem
from emulated_cuda import emulated_cuda
from tensordict.nn import CudaGraphModule
from test_training_on_cuda import OTHERS, SIZES, check_against_cpu, check_training, no_export

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "doc" / "cuda_without_a_gpu.md").read_text()
TRAINING = "test_training_is_the_same_in_all_modes_and_schedules"
THAT_OF_THE_CPU = "test_training_is_that_of_the_cpu"
ACTIONS_ALONE = "test_the_host_waits_for_actions_alone"
FRESH_NOISE = "test_replays_draw_fresh_noise"
CONTINUES = "test_a_checkpoint_continues_in_captured_graphs"
WEIGHTS_ALONE = "test_the_host_waits_for_weights_alone"
FRESH_BATCHES = "test_replays_draw_fresh_batches"
STEP_COUNT = (
    "self.corrections.add_(self.rates * (1 - self.corrections))",
    "self.steps = getattr(self, 'steps', 0) + 1\n        self.corrections.copy_(1 - (1 - self.rates) ** self.steps)",
)
NEXT_STEP_COUNT = (STEP_COUNT[0], STEP_COUNT[1].replace("'steps', 0", "'steps', 1"))
READ_BY_FOREACH = ("self.eps * root, alpha=1)", "self.eps * root)")
LEARNING_RATE = ('self.optimizers["agent"].lr.fill_(learning_rate)', 'self.optimizers["agent"].lr = learning_rate')
RATE_OF_Q = ('self.optimizers["q"].lr.fill_(learning_rate)', 'self.optimizers["q"].lr = learning_rate')
RADAM_COUNT = ("self.steps.add_(1)", "self.count = getattr(self, 'count', 0) + 1\n        self.steps.fill_(self.count)")
RADAM_BRANCH = (
    "rectified, momentum = self.sizes[self.steps.clamp(max=len(self.sizes) - 1)].unbind(-1)",
    "self.count = getattr(self, 'count', 0) + 1\n        rectified, momentum = self.sizes[self.count - 1].unbind(-1)",
)
REBOUND_Q = ("load_tensors(tensors, {", "self.q = copy.deepcopy(self.q)\n        load_tensors(self.tensors(), {")
NO_WAIT = ("self.actions_arrived.synchronize()", "pass")
EARLY_EVENT = (
    "self.host_actions.copy_(self.actions, non_blocking=True)\n        self.actions_arrived.record()",
    "self.actions_arrived.record()\n        self.host_actions.copy_(self.actions, non_blocking=True)",
)
EARLY_DEVICE_EVENT = tuple(text.replace("self.actions,", "self.device_actions,") for text in EARLY_EVENT)
CURSOR = (
    "self.stored.add_(len(rows))",
    "self.total = getattr(self, 'total', 0) + len(rows)\n        self.stored.fill_(self.total)",
)
REBOUND_COUNT = ('self.stored.copy_(state["stored"])', 'self.stored = state["stored"].to(self.rows.device)')
REBOUND_AGENT = (
    "load_tensors(tensors, {",
    "self.agent = copy.deepcopy(self.agent)\n        load_tensors(self.tensors(), {",
)
REBOUND_TARGET = (
    "for target, learned in zip(self.target_q",
    "self.target_q = copy.deepcopy(self.target_q)\n        for target, learned in zip(self.target_q",
)
WAIT_IN_LOOP = ("self.updates += 1", "self.updates += 1\n        self.losses()")
OTHER_ROWS = ("self.uniform.uniform_()", "self.uniform = torch.rand_like(self.uniform)")
OTHER_NOISE = ("self.noise.exponential_()", "self.noise = torch.empty_like(self.noise).exponential_()")
SAME_NOISE = ("self.noise.exponential_()", "self.noise.count_nonzero() or self.noise.exponential_()")
WAIT_IN_UPDATE = ("self.make_batch()\n        for _", "self.make_batch()\n        self.losses()\n        for _")
SHORT = {"buffer_size": 20, "learning_starts": 4, "total_timesteps": 24, "target_network_frequency": 10}
SETTINGS = {
    "sac": {"target_network_frequency": 2},  # updates with and without a step of the targets
    "dqn": OTHERS["dqn"],  # two updates in one step
    "dqn_atari": SHORT | {"exploration_fraction": 0.9},  # some steps without a greedy action
    "sac_atari": SHORT,
}
BUGS = [  # algorithm, what is wrong, what is replaced by what, who sees it
    ("sac", "no wait for the actions", *NO_WAIT, TRAINING),
    ("sac", "event recorded before the copy that it stands for", *EARLY_DEVICE_EVENT, TRAINING),
    ("sac", "step count of Adam kept in Python", *STEP_COUNT, TRAINING),
    ("sac", "cursor of the ring kept in Python", *CURSOR, TRAINING),
    (
        "sac",
        "host read in a graph",
        "next_q = self.q_values(",
        "float(next_actions.mean())\n            next_q = self.q_values(",
        TRAINING,
    ),
    ("sac", "host read by a foreach operator", *READ_BY_FOREACH, TRAINING),
    (
        "sac",
        "branch on a tensor in a graph",
        "if self.args.autotune:\n            with",
        "if self.log_alpha < 10:\n            with",
        TRAINING,
    ),
    (
        "sac",
        "a tensor left on the CPU",
        "self.noise = torch.zeros(args.batch_size, act_dim, device=device)",
        "self.noise = torch.zeros(args.batch_size, act_dim)",
        TRAINING,
    ),
    (
        "sac",
        "a number of the host among the losses",
        "q_values=q.mean(-1).mean()",
        "q_values=torch.tensor(0.5)",
        TRAINING,
    ),
    (
        "sac",
        "transitions that are not sent to the device",
        "self.device_input.copy_(self.host_input, non_blocking=True)",
        "pass",
        THAT_OF_THE_CPU,
    ),
    (
        "sac",
        "target networks rebound instead of moved",
        "for target, learned in zip(self.target_critics.values()",
        "self.target_critics = {name: tensor.clone() for name, tensor in self.target_critics.items()}\n"
        "            for target, learned in zip(self.target_critics.values()",
        TRAINING,
    ),
    (
        "sac",
        "step of the targets rebound instead of filled",
        "self.tau.fill_(",
        "self.tau = torch.full_like(self.tau, ",
        TRAINING,
    ),
    ("sac", "rows drawn into other memory", *OTHER_ROWS, TRAINING),
    (
        "sac",
        "noise drawn into other memory",
        "self.actor_noise.normal_()",
        "self.actor_noise = torch.randn_like(self.actor_noise)",
        TRAINING,
    ),
    (
        "sac",
        "noise drawn once",
        "self.acting_noise.normal_()",
        "self.acting_noise.any() or self.acting_noise.normal_()",
        FRESH_NOISE,
    ),
    ("sac", "loaded by rebinding after capture", *REBOUND_COUNT, CONTINUES),
    ("sac", "a wait in the loop", *WAIT_IN_LOOP, ACTIONS_ALONE),
    ("td3", "no wait for the actions", *NO_WAIT, TRAINING),
    ("td3", "step count of Adam kept in Python", *STEP_COUNT, TRAINING),
    ("td3", "cursor of the ring kept in Python", *CURSOR, TRAINING),
    (
        "td3",
        "a schedule computed in Python",
        "target.lerp_(tensor, self.args.tau)",
        "target.lerp_(tensor, self.args.tau / (1 + self.updates))",
        TRAINING,
    ),
    (
        "td3",
        "target actor rebound instead of moved",
        "targets = [*self.target_actor.parameters()",
        "self.target_actor = copy.deepcopy(self.target_actor)\n        targets = [*self.target_actor.parameters()",
        TRAINING,
    ),
    ("td3", "host read in a graph", "actor_loss = -func", "float(obs.mean())\n        actor_loss = -func", TRAINING),
    ("td3", "rows drawn into other memory", *OTHER_ROWS, TRAINING),
    ("td3", "loaded by rebinding after capture", *REBOUND_COUNT, CONTINUES),
    ("td3", "a wait in the loop", *WAIT_IN_LOOP, ACTIONS_ALONE),
    ("ppo", "learning rate kept in Python", *LEARNING_RATE, TRAINING),
    (
        "ppo",
        "learning rate left on the CPU",
        "torch.tensor(lr, device=device)",
        "torch.tensor(lr)",
        TRAINING,
    ),
    (
        "ppo",
        "a tensor left on the CPU",
        "self.batch = torch.zeros(batch_size, sum(self.batch_widths.values()), device=device)",
        "self.batch = torch.zeros(batch_size, sum(self.batch_widths.values()))",
        TRAINING,
    ),
    ("ppo", "host read in a graph", "approx_kl=(ratio", "approx_kl=float(ratio.mean()) * (ratio", TRAINING),
    (
        "ppo",
        "branch on a tensor in a graph",
        "gradient = gradient * (self",
        "if norm > 0:\n            gradient = gradient * (self",
        TRAINING,
    ),
    ("ppo", "step count of Adam kept in Python", *NEXT_STEP_COUNT, TRAINING),
    (
        "ppo",
        "rollout rebound instead of filled",
        "self.rollout.copy_(self.host_rollout)",
        "self.rollout = self.host_rollout.to(self.device, copy=True)",
        TRAINING,
    ),
    (
        "ppo",
        "order of minibatches drawn into other memory",
        "self.orders.copy_(torch.rand(self.orders.shape, device=self.device).argsort(-1))",
        "self.orders = torch.rand(self.orders.shape, device=self.device).argsort(-1)",
        TRAINING,
    ),
    ("ppo", "loaded by rebinding after capture", *REBOUND_AGENT, CONTINUES),
    (
        "ppo",
        "learning rate rebound when a checkpoint is loaded",
        "load_tensors(tensors, {",
        'self.optimizers["agent"].lr = self.optimizers["agent"].lr.clone()\n        load_tensors(tensors, {',
        CONTINUES,
    ),
    (
        "dqn",
        "no wait before the host's block is written again",
        "self.block_uploaded.synchronize()",
        "pass",
        TRAINING,
    ),
    ("dqn", "no wait for the weights to act with", "self.arrived.synchronize()", "pass", TRAINING),
    (
        "dqn",
        "event recorded before the copy that it stands for",
        "self.arriving.copy_(torch.cat(self.newest), non_blocking=True)  # one copy instead of one per tensor\n"
        "        self.arrived.record()",
        "self.arrived.record()\n        self.arriving.copy_(torch.cat(self.newest), non_blocking=True)",
        TRAINING,
    ),
    ("dqn", "step count of Adam kept in Python", *STEP_COUNT, TRAINING),
    (
        "dqn",
        "number of transitions kept in Python",
        "self.uploaded.fill_(self.collected)",
        "self.uploaded = self.collected",
        TRAINING,
    ),
    ("dqn", "number of transitions read by the host", "i < self.uploaded,", "i < int(self.uploaded),", TRAINING),
    ("dqn", "host read in a graph", "td_loss = (", "float(q.detach().mean())\n        td_loss = (", TRAINING),
    ("dqn", "rows drawn into other memory", *OTHER_ROWS, TRAINING),
    ("dqn", "target network rebound instead of moved", *REBOUND_TARGET, TRAINING),
    ("dqn", "loaded by rebinding after capture", *REBOUND_COUNT, CONTINUES),
    ("dqn", "a wait in the loop", *WAIT_IN_LOOP, WEIGHTS_ALONE),
    ("ppo_atari", "no wait for the actions", *NO_WAIT, TRAINING),
    ("ppo_atari", "event recorded before the copy that it stands for", *EARLY_EVENT, TRAINING),
    ("ppo_atari", "noise drawn into other memory", *OTHER_NOISE, TRAINING),
    ("ppo_atari", "noise drawn once", *SAME_NOISE, FRESH_NOISE),
    (
        "ppo_atari",
        "step of the rollout rebound instead of filled",
        "self.t.fill_(t)",
        "self.t = torch.full_like(self.t, t)",
        TRAINING,
    ),
    (
        "ppo_atari",
        "decisions rebound instead of filled",
        "self.rollout[name].index_copy_(0",
        "self.rollout[name] = self.rollout[name].index_copy(0",
        TRAINING,
    ),
    ("ppo_atari", "learning rate kept in Python", *LEARNING_RATE, TRAINING),
    ("ppo_atari", "step count of Adam kept in Python", *NEXT_STEP_COUNT, TRAINING),
    (
        "ppo_atari",
        "branch on a tensor in a graph",
        "if self.args.norm_adv:",
        "if self.args.norm_adv and valid.sum() > 1:",
        TRAINING,
    ),
    (
        "ppo_atari",
        "host read in a graph",
        "ratio = log_ratio.exp()\n        clipped",
        "ratio = log_ratio.exp() * float(loss.detach())**0\n        clipped",
        TRAINING,
    ),
    ("ppo_atari", "rows of a minibatch drawn into other memory", "self.rows.copy_(rows)", "self.rows = rows", TRAINING),
    ("ppo_atari", "loaded by rebinding after capture", *REBOUND_AGENT, CONTINUES),
    (
        "ppo_atari",
        "observations sent by a copy that waits",
        '"obs"][t].copy_(self.host_obs[t], non_blocking=True)',
        '"obs"][t].copy_(self.host_obs[t])',
        ACTIONS_ALONE,
    ),
    ("ppo_atari", "a wait in the loop", *WAIT_IN_UPDATE, ACTIONS_ALONE),
    ("dqn_atari", "no wait for the actions", *NO_WAIT, TRAINING),
    (
        "dqn_atari",
        "no wait where all actions are random",
        "self.actions_arrived.synchronize()\n        explore = self.rng.random(self.args.num_envs) < exploration",
        "explore = self.rng.random(self.args.num_envs) < exploration\n"
        "        explore.all() or self.actions_arrived.synchronize()",
        TRAINING,
    ),
    (
        "dqn_atari",
        "cursor of the frames kept in Python",
        "self.stepped.add_(1)",
        "self.count = getattr(self, 'count', 0) + 1\n        self.stepped.fill_(self.count)",
        TRAINING,
    ),
    (
        "dqn_atari",
        "a tensor left on the CPU",
        "torch.arange(self.stack, -1, -1, device=self.device)",
        "torch.arange(self.stack, -1, -1)",
        TRAINING,
    ),
    ("dqn_atari", "target network rebound instead of moved", *REBOUND_TARGET, TRAINING),
    (
        "dqn_atari",
        "rows drawn once",
        "self.uniform.uniform_()",
        "self.updates or self.uniform.uniform_()",
        FRESH_BATCHES,
    ),
    (
        "dqn_atari",
        "loaded by rebinding after capture",
        "load_tensors(tensors, {",
        "self.q = self.networks['q'] = copy.deepcopy(self.q)\n        load_tensors(self.tensors(), {",
        CONTINUES,
    ),
    (
        "dqn_atari",
        "observations sent by a copy that waits",
        "self.obs.copy_(self.host_obs, non_blocking=True)",
        "self.obs.copy_(self.host_obs)",
        ACTIONS_ALONE,
    ),
    (
        "dqn_atari",
        "number of transitions read by the host",
        "self.stored.add_(count[-1])",
        "self.stored.add_(int(count[-1]))",
        TRAINING,
    ),
    (
        "dqn_atari",
        "first frames rebound instead of filled",
        "self.first.copy_(torch.where(starts_game, number, self.first))",
        "self.first = torch.where(starts_game, number, self.first)",
        TRAINING,
    ),
    ("dqn_atari", "rows drawn into other memory", *OTHER_ROWS, TRAINING),
    (
        "dqn_atari",
        "rewards and ends that are not sent to the device",
        "self.outcomes.copy_(self.host_outcomes, non_blocking=True)",
        "pass",
        THAT_OF_THE_CPU,
    ),
    ("pqn", "learning rate kept in Python", *RATE_OF_Q, TRAINING),
    ("pqn", "step count of RAdam kept in Python", *RADAM_COUNT, TRAINING),
    ("pqn", "sizes of RAdam's steps by a count in Python", *RADAM_BRANCH, TRAINING),
    (
        "pqn",
        "rollout rebound instead of filled",
        "self.rollout.copy_(self.host_rollout)",
        "self.rollout = self.host_rollout.to(self.device, copy=True)",
        TRAINING,
    ),
    (
        "pqn",
        "order of minibatches drawn into other memory",
        "self.orders.copy_(torch.rand(self.orders.shape, device=self.device).argsort(-1))",
        "self.orders = torch.rand(self.orders.shape, device=self.device).argsort(-1)",
        TRAINING,
    ),
    (
        "pqn",
        "a tensor left on the CPU",
        "self.sizes = self.step_sizes().to(device)",
        "self.sizes = self.step_sizes()",
        TRAINING,
    ),
    ("pqn", "rollout that is not sent to the device", "self.rollout.copy_(self.host_rollout)", "pass", THAT_OF_THE_CPU),
    ("pqn", "loaded by rebinding after capture", *REBOUND_Q, CONTINUES),
    ("pqn_atari", "no wait for the actions", *NO_WAIT, TRAINING),
    ("pqn_atari", "event recorded before the copy that it stands for", *EARLY_EVENT, TRAINING),
    (
        "pqn_atari",
        "step of the rollout rebound instead of filled",
        "self.t.fill_(t)",
        "self.t = torch.full_like(self.t, t)",
        TRAINING,
    ),
    ("pqn_atari", "step count of RAdam kept in Python", *RADAM_COUNT, TRAINING),
    ("pqn_atari", "rows of a minibatch drawn into other memory", "self.rows.copy_(rows)", "self.rows = rows", TRAINING),
    (
        "pqn_atari",
        "host read in a graph",
        "td_loss = masked",
        "float(q.detach().mean())\n        td_loss = masked",
        TRAINING,
    ),
    ("pqn_atari", "loaded by rebinding after capture", *REBOUND_Q, CONTINUES),
    ("pqn_atari", "a wait in the loop", *WAIT_IN_UPDATE, ACTIONS_ALONE),
    (
        "pqn_atari",
        "columns that are not sent to the device",
        "self.rollout[name].copy_(column, non_blocking=True)",
        "pass",
        THAT_OF_THE_CPU,
    ),
    ("sac_atari", "event recorded before the copy that it stands for", *EARLY_EVENT, TRAINING),
    ("sac_atari", "noise drawn into other memory", *OTHER_NOISE, TRAINING),
    ("sac_atari", "noise drawn once", *SAME_NOISE, FRESH_NOISE),
    (
        "sac_atari",
        "temperature rebound instead of filled",
        "alpha_loss = (",
        "self.log_alpha = self.log_alpha.detach().clone().requires_grad_()\n"
        '            self.optimizers["alpha"].weights = [self.log_alpha]\n'
        "            alpha_loss = (",
        TRAINING,
    ),
    (
        "sac_atari",
        "loaded by rebinding after capture",
        "load_tensors(tensors, {",
        "self.actor = self.networks['actor'] = copy.deepcopy(self.actor)\n        load_tensors(self.tensors(), {",
        CONTINUES,
    ),
    ("sac_atari", "a wait in the loop", *WAIT_IN_LOOP, ACTIONS_ALONE),
    (
        "sac_atari",
        "frames that are not sent to the device",
        "self.obs.copy_(self.host_obs, non_blocking=True)",
        "pass",
        THAT_OF_THE_CPU,
    ),
]
IN_CI = (  # one of each kind, and for each test that sees them
    "no wait for the actions",
    "step count of Adam kept in Python",
    "loaded by rebinding after capture",
    "noise drawn once",
    "a wait in the loop",
    "transitions that are not sent to the device",
)
CASES = [
    pytest.param(
        *bug, id=f"{bug[0]}, {bug[1]}", marks=[] if bug[0] == "sac" and bug[1] in IN_CI else pytest.mark.planted
    )
    for bug in BUGS
]


def catch(name, algorithm, script, folder, monkeypatch):
    """Run the test of this name on `script`."""
    settings = SETTINGS.get(algorithm, {})
    if name == TRAINING:
        return check_training(script, folder, settings=settings, runs=[(False, False), (True, True)])
    if name == THAT_OF_THE_CPU:
        return check_against_cpu(script, folder, settings)
    with emulated_cuda():
        if algorithm == "ppo":
            monkeypatch.setattr(test_ppo, "TURBO", script)
            getattr(test_ppo, name)("cudagraphs")
        elif algorithm == "ppo_atari":
            monkeypatch.setattr(test_ppo_atari, "TURBO", script)
            getattr(test_ppo_atari, name)("cudagraphs")
        elif algorithm in ("pqn", "pqn_atari"):
            monkeypatch.setitem(test_pqn.TURBO, algorithm, script)
            getattr(test_pqn, name)(name=algorithm, mode="cudagraphs")
        elif algorithm == "dqn":
            monkeypatch.setitem(test_dqn.CUDA, "script", script)
            getattr(test_dqn.TestOnCuda(), name)("cudagraphs")
        elif algorithm in ("dqn_atari", "sac_atari"):
            getattr(test_atari_off_policy, name)(turbo=script, mode="cudagraphs")
        else:
            getattr(test_replay, name)(script, "cudagraphs")


def keep_addresses_real(algorithm, script, monkeypatch):
    """Games that take no actions as addresses, as envpool does: a planted bug may send any number."""
    if algorithm in ("ppo_atari", "pqn_atari"):
        test_ppo_atari.script_games(script, monkeypatch)
    elif algorithm in ("dqn_atari", "sac_atari"):
        test_ppo_atari.script_games(script, monkeypatch, test_atari_off_policy_runs.StackingPool)


def train_on_cpu(algorithm, script, folder):
    sizes = SIZES[algorithm] | SETTINGS.get(algorithm, {}) | {"checkpoint_interval": 32, "run_dir": str(folder)}
    with no_export():
        script.train(script.Args(**sizes))


@pytest.mark.parametrize(("algorithm", "bug", "old", "new", "caught_by"), CASES)
def test_a_planted_bug_is_caught(algorithm, bug, old, new, caught_by, tmp_path, monkeypatch):
    name = ENTRIES[algorithm].turbo
    source = (ROOT / "leanrl" / f"{name}.py").read_text()
    assert source.count(old) == 1, f"not there once: {old}"
    script = load_copy(name, source.replace(old, new), tmp_path)
    keep_addresses_real(algorithm, script, monkeypatch)
    train_on_cpu(algorithm, script, tmp_path / "cpu")
    # IndexError: memory that was never written, taken as rows, steps or actions
    with pytest.raises((AssertionError, RuntimeError, SystemExit, IndexError)) as caught:
        catch(caught_by, algorithm, script, tmp_path / "runs", monkeypatch)
    assert caught.type is not NotImplementedError  # which the emulated device raises
    assert caught.type is not SystemExit or str(caught.value).startswith("error: step ")  # NaN
    print(f"\n{algorithm}, {bug}: {caught.type.__name__}: {str(caught.value).splitlines()[0][:100]}")


def test_ci_plants_a_bug_of_each_kind():
    planted = [name for name in IN_CI if any(bug[:2] == ("sac", name) for bug in BUGS)]
    assert all(any(re.search(words, name) for name in planted) for words in KINDS.values())


KINDS = {  # by words in what is wrong
    "waits": "no wait|event recorded before",
    "Python": "in Python",
    "rebound": "rebound|rebinding",
    "random numbers": "drawn",
    "host reads": "host read|read by the host|branch on|a wait in|copy that waits",
    "placement": "left on|number of the host|not sent",
}


def test_the_page_counts_the_planted_bugs():
    counted = 0
    for kind, words in KINDS.items():
        bugs = [bug for bug in BUGS if re.search(words, bug[1])]
        scripts = ", ".join(name for name in TURBO if name in {bug[0] for bug in bugs})
        assert re.search(rf"^\| {kind} \| .* \| {scripts} \| {len(bugs)} \|$", PAGE, re.M), (kind, scripts, len(bugs))
        counted += len(bugs)
    assert counted == len(BUGS)


FIRST_CALLS = ("skipped in the warm-up", "made twice at the capture")
UPDATES = re.compile("learn|update|step|store_and_learn")
CASES = [
    pytest.param(script, bug, id=f"{stem(script)}, {bug}", marks=[] if script is TURBO["sac"] else pytest.mark.planted)
    for script in (*TURBO.values(), MULTI, POPULATION)
    for bug in FIRST_CALLS
]


def graphs_with(bug):
    """CudaGraphModule with one bug where it is given updates."""

    def make(function, warmup):
        module = CudaGraphModule(function, warmup=warmup)
        calls = itertools.count(1)

        def call():
            number = next(calls)
            if bug == "made twice at the capture" and number == warmup:
                function()
            if bug != "skipped in the warm-up" or number >= warmup:
                module()

        return call if UPDATES.match(getattr(function, "func", function).__name__) else module

    return make


@pytest.mark.parametrize(("script", "bug"), CASES)
def test_updates_before_the_replays_are_counted(script, bug, tmp_path, monkeypatch):
    """The first calls of what becomes a graph are no replays, and make each update once."""
    monkeypatch.setattr(script, "CudaGraphModule", graphs_with(bug))
    with pytest.raises((AssertionError, SystemExit)) as caught:
        if script is MULTI:
            test_multigpu.test_graphs_change_nothing_on_an_emulated_device({}, tmp_path)
        elif script is POPULATION:
            test_population.test_a_gpu_may_take_its_time(True, tmp_path)
        else:
            keep_addresses_real(algorithm(script), script, monkeypatch)
            check_training(
                script, tmp_path, settings=SETTINGS.get(algorithm(script)), runs=[(False, False), (True, True)]
            )
    assert caught.type is not SystemExit or str(caught.value).startswith("error: step ")  # NaN
