"""Bugs that only a CUDA device shows, planted in copies of the scripts: each is caught by the test that is named.

doc/cuda_without_a_gpu.md counts them by kind.
"""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import test_atari_off_policy
import test_atari_off_policy_runs
import test_dqn
import test_ppo
import test_ppo_atari
import test_replay
import torch
from conftest import ALGORITHMS, TURBO, load_copy
from emulated_cuda import emulated_cuda
from test_training_on_cuda import OTHERS, SIZES, check_against_cpu, check_training

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "doc" / "cuda_without_a_gpu.md").read_text()
TRAINING = "test_training_is_the_same_in_all_modes_and_schedules"
THAT_OF_THE_CPU = "test_training_is_that_of_the_cpu"
ACTIONS_ALONE = "test_the_host_waits_for_actions_alone"
FRESH_NOISE = "test_replays_draw_fresh_noise"
CONTINUES = "test_a_checkpoint_continues_in_captured_graphs"
WEIGHTS_ALONE = "test_the_host_waits_for_weights_alone"
FRESH_BATCHES = "test_replays_draw_fresh_batches"
FROM_THE_HOST = "test_training_with_the_buffer_on_the_host_is_the_same_with_graphs"
NEWEST = "test_the_host_acts_with_the_newest_parameters"
STEP_COUNT = (
    "self.decay.mul_(self._betas)",
    "self.m.steps = getattr(self.m, 'steps', 0) + 1\n        self.decay.copy_(self._betas**self.m.steps)",
)
CURSOR = (
    "self.stored.add_(count)",
    "self.total = getattr(self, 'total', 0) + len(rows)\n        self.stored.fill_(self.total)",
)
REBOUND_COUNT = ('self.stored.copy_(state["stored"])', 'self.stored = state["stored"].to(self.rows.device)')
REBOUND_SCALARS = (
    "torch.stack(list(scalars.values()), out=self.groups[names])",
    "self.groups[names] = torch.stack(list(scalars.values()))",
)
WAIT_IN_LOOP = ("self.updates += 1", "self.updates += 1\n        self.losses()")
OTHER_ROWS = ("self.uniform.uniform_()", "self.uniform = torch.rand_like(self.uniform)")
OTHER_NOISE = ("self.noise.exponential_()", "self.noise = torch.empty_like(self.noise).exponential_()")
SAME_NOISE = ("self.noise.exponential_()", "self.updates or self.noise.exponential_()")
SENT = "        self.input.copy_(self.host_input, non_blocking=True)\n"
SHORT = {"buffer_size": 20, "learning_starts": 4, "total_timesteps": 24, "target_network_frequency": 10}
SETTINGS = {
    "dqn": OTHERS["dqn"],  # two updates in one step
    "dqn_atari": SHORT | {"exploration_fraction": 0.9},  # some steps without a greedy action
    "sac_atari": SHORT,
}
BUGS = [  # algorithm, what is wrong, what is replaced by what, who sees it
    ("sac", "no wait for the actions", "self.actions_arrived.synchronize()", "pass", TRAINING),
    (
        "sac",
        "event recorded before the copy that it stands for",
        "self.host_actions.copy_(self.actions, non_blocking=True)\n        self.actions_arrived.record()",
        "self.actions_arrived.record()\n        self.host_actions.copy_(self.actions, non_blocking=True)",
        TRAINING,
    ),
    ("sac", "step count of Adam kept in Python", *STEP_COUNT, TRAINING),
    ("sac", "cursor of the ring kept in Python", *CURSOR, TRAINING),
    (
        "sac",
        "host read in a graph",
        "next_q = self.target_critics(",
        "float(next_actions.mean())\n            next_q = self.target_critics(",
        TRAINING,
    ),
    (
        "sac",
        "branch on a tensor in a graph",
        "if self.args.autotune:\n                _,",
        "if alpha < 10:\n                _,",
        TRAINING,
    ),
    ("sac", "a tensor left on the CPU", "args.alpha, device=device).log()", "args.alpha).log()", TRAINING),
    (
        "sac",
        "target networks rebound instead of moved",
        "self.target_critics.weights.lerp_(",
        "self.target_critics = FlatNetwork(copy.deepcopy(self.target_critics.network))\n"
        "            self.target_critics.weights.lerp_(",
        TRAINING,
    ),
    ("sac", "losses rebound instead of filled", *REBOUND_SCALARS, TRAINING),
    ("sac", "rows drawn into other memory", *OTHER_ROWS, TRAINING),
    (
        "sac",
        "noise drawn after the copy that sends it",
        f"        noise.normal_()\n{SENT}",
        f"{SENT}        noise.normal_()\n",
        TRAINING,
    ),
    (
        "sac",
        "noise drawn once",
        f"noise.normal_()\n{SENT}",
        f"noise.any() or noise.normal_()\n{SENT}",
        FRESH_NOISE,
    ),
    ("sac", "loaded by rebinding after capture", *REBOUND_COUNT, CONTINUES),
    ("sac", "a wait in the loop", *WAIT_IN_LOOP, ACTIONS_ALONE),
    ("td3", "no wait for the actions", "self.actions_arrived.synchronize()", "pass", TRAINING),
    ("td3", "step count of Adam kept in Python", *STEP_COUNT, TRAINING),
    ("td3", "cursor of the ring kept in Python", *CURSOR, TRAINING),
    (
        "td3",
        "a schedule computed in Python",
        "self.target_critics.weights.lerp_(self.critics.weights, self.args.tau)",
        "self.target_critics.weights.lerp_(self.critics.weights, self.args.tau / (1 + self.updates))",
        TRAINING,
    ),
    (
        "td3",
        "target actor rebound instead of moved",
        "self.target_actor.weights.lerp_(",
        "self.target_actor = FlatNetwork(copy.deepcopy(self.target_actor.network))\n"
        "        self.target_actor.weights.lerp_(",
        TRAINING,
    ),
    (
        "td3",
        "host read in a graph",
        "actor_loss = -self",
        "float(obs.mean())\n        actor_loss = -self",
        TRAINING,
    ),
    ("td3", "rows drawn into other memory", *OTHER_ROWS, TRAINING),
    ("td3", "loaded by rebinding after capture", *REBOUND_COUNT, CONTINUES),
    ("td3", "a wait in the loop", *WAIT_IN_LOOP, ACTIONS_ALONE),
    (
        "ppo",
        "learning rate kept in Python",
        'self.optimizers["agent"].lr = learning_rate',
        "vars(self.optimizers['agent'])['lr'] = learning_rate",
        TRAINING,
    ),
    (
        "ppo",
        "learning rate left on the CPU",
        "torch.as_tensor(lr, dtype=torch.float64, device=weights.device)",
        "torch.as_tensor(lr, dtype=torch.float64)",
        TRAINING,
    ),
    (
        "ppo",
        "a tensor left on the CPU",
        "args.num_steps * self.num_envs, batch_width, device=device)",
        "args.num_steps * self.num_envs, batch_width)",
        TRAINING,
    ),
    ("ppo", "host read in a graph", "approx_kl=(", "approx_kl=float(ratio.mean()) * (", TRAINING),
    ("ppo", "branch on a tensor in a graph", "scale = (", "if gradient.norm() > 0:\n            scale = (", TRAINING),
    ("ppo", "step count of Adam kept in Python", *STEP_COUNT, TRAINING),
    (
        "ppo",
        "rollout rebound instead of filled",
        "self.rollout.copy_(self.host_rollout, non_blocking=True)",
        "self.rollout = self.host_rollout.to(self.device, non_blocking=True)",
        TRAINING,
    ),
    (
        "ppo",
        "order of minibatches drawn by the host",
        "torch.rand(len(self.batch), device=self.device)",
        "torch.rand(len(self.batch)).to(self.device)",
        TRAINING,
    ),
    (
        "sac",
        "a number of the host among the losses",
        "self.scalars.store(**losses)",
        "self.scalars.store(**losses, beta=torch.tensor(0.5))",
        TRAINING,
    ),
    (
        "ppo",
        "no wait for the weights to act with",
        "self.host_agent.weights.copy_(self.agent.weights)\n        self.updates += 1",
        "self.host_agent.weights.copy_(self.agent.weights, non_blocking=True)\n        self.updates += 1",
        NEWEST,
    ),
    (
        "ppo",
        "loaded by rebinding after capture",
        "load_tensors(tensors, {",
        "self.agent = FlatNetwork(self.agent.network)\n        load_tensors(self.tensors(), {",
        CONTINUES,
    ),
    (
        "dqn",
        "no wait before the host's block is written again",
        "self.block_sent.synchronize()",
        "pass",
        TRAINING,
    ),
    (
        "dqn",
        "no wait for the weights to act with",
        "self.weights_arrived.synchronize()",
        "pass",
        TRAINING,
    ),
    (
        "dqn",
        "event recorded before the copy that it stands for",
        "self.arriving_weights.copy_(self.q.weights, non_blocking=True)\n        self.weights_arrived.record()",
        "self.weights_arrived.record()\n        self.arriving_weights.copy_(self.q.weights, non_blocking=True)",
        TRAINING,
    ),
    ("dqn", "step count of Adam kept in Python", *STEP_COUNT, TRAINING),
    ("dqn", "number of transitions read by the host", "self.block[-1, 0].long()", "int(self.block[-1, 0])", TRAINING),
    ("dqn", "host read in a graph", "td_loss = (", "float(q.detach().mean())\n        td_loss = (", TRAINING),
    ("dqn", "rows drawn into other memory", *OTHER_ROWS, TRAINING),
    (
        "dqn",
        "target network rebound instead of moved",
        "self.target_q.weights.lerp_(",
        "self.target_q = FlatNetwork(copy.deepcopy(self.target_q.network))\n        self.target_q.weights.lerp_(",
        TRAINING,
    ),
    ("dqn", "loaded by rebinding after capture", *REBOUND_COUNT, CONTINUES),
    ("dqn", "a wait in the loop", *WAIT_IN_LOOP, WEIGHTS_ALONE),
    ("ppo_atari", "no wait for the actions", "self.actions_arrived.synchronize()", "pass", TRAINING),
    (
        "ppo_atari",
        "event recorded before the copy that it stands for",
        "self.host_actions.copy_(self.actions, non_blocking=True)\n        self.actions_arrived.record()",
        "self.actions_arrived.record()\n        self.host_actions.copy_(self.actions, non_blocking=True)",
        TRAINING,
    ),
    (
        "ppo_atari",
        "steps of the rollout counted in Python",
        "self.t.add_(1)",
        "self.s = getattr(self, 's', 0) % self.args.num_steps + 1\n        self.t.fill_(self.s)",
        TRAINING,
    ),
    ("ppo_atari", "noise drawn into other memory", *OTHER_NOISE, TRAINING),
    ("ppo_atari", "noise drawn once", *SAME_NOISE, FRESH_NOISE),
    (
        "ppo_atari",
        "decisions rebound instead of filled",
        "self.decisions.index_copy_(0",
        "self.decisions = self.decisions.index_copy(0",
        TRAINING,
    ),
    (
        "ppo_atari",
        "outcomes rebound instead of filled",
        "self.outcomes.copy_(self.host_outcomes, non_blocking=True)",
        "self.outcomes = self.host_outcomes.to(self.device, non_blocking=True)",
        TRAINING,
    ),
    (
        "ppo_atari",
        "learning rate kept in Python",
        'self.optimizers["agent"].lr = learning_rate',
        "vars(self.optimizers['agent'])['lr'] = learning_rate",
        TRAINING,
    ),
    ("ppo_atari", "step count of Adam kept in Python", *STEP_COUNT, TRAINING),
    (
        "ppo_atari",
        "branch on a tensor in a graph",
        "if self.args.norm_adv:",
        "if self.args.norm_adv and valid.sum() > 1:",
        TRAINING,
    ),
    ("ppo_atari", "host read in a graph", "scale = (self", "float(grad_norm)\n        scale = (self", TRAINING),
    (
        "ppo_atari",
        "order of minibatches drawn by the host",
        "torch.rand(len(self.batch), device=self.device)",
        "torch.rand(len(self.batch)).to(self.device)",
        TRAINING,
    ),
    (
        "ppo_atari",
        "loaded by rebinding after capture",
        "load_tensors(tensors, {",
        "self.agent = FlatNetwork(self.agent.network)\n        load_tensors(self.tensors(), {",
        CONTINUES,
    ),
    (
        "ppo_atari",
        "observations sent by a copy that waits",
        "self.obs[t].copy_(self.host_obs[t], non_blocking=True)",
        "self.obs[t].copy_(self.host_obs[t])",
        ACTIONS_ALONE,
    ),
    ("ppo_atari", "a wait in the loop", *WAIT_IN_LOOP, ACTIONS_ALONE),
    ("dqn_atari", "no wait for the actions", "self.actions_arrived.synchronize()", "pass", TRAINING),
    (
        "dqn_atari",
        "no wait where all actions are random",
        "self.actions_arrived.synchronize()",
        "self.explore.all() or self.actions_arrived.synchronize()",
        TRAINING,
    ),
    (
        "dqn_atari",
        "cursor of the frames kept in Python",
        "self.written.add_(1)",
        "self.steps = getattr(self, 'steps', 0) + 1\n        self.written.fill_(self.steps)",
        TRAINING,
    ),
    (
        "dqn_atari",
        "a tensor left on the CPU",
        "torch.arange(self.stack, -1, -1, device=self.storage)",
        "torch.arange(self.stack, -1, -1)",
        TRAINING,
    ),
    (
        "dqn_atari",
        "target network rebound instead of moved",
        "self.target_q.weights.lerp_(",
        "self.target_q = FlatNetwork(copy.deepcopy(self.target_q.network))\n        self.target_q.weights.lerp_(",
        TRAINING,
    ),
    (
        "dqn_atari",
        "rows drawn once",
        "self.uniform.uniform_()",
        "self.updates or self.uniform.uniform_()",
        FRESH_BATCHES,
    ),
    (
        "dqn_atari",
        "a batch of the host sampled in the graph",
        "self.update_q = CudaGraphModule(self.update_q, warmup=GRAPH_WARMUP)",
        "self.learn = CudaGraphModule(self.learn, warmup=GRAPH_WARMUP)",
        FROM_THE_HOST,
    ),
    (
        "dqn_atari",
        "loaded by rebinding after capture",
        "target.copy_(piece)",
        "target.copy_(piece)\n        self.stored = self.stored.clone()",
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
        "depth of the stacks rebound instead of filled",
        "self.depth.add_(1).clamp_(max=self.stack).masked_fill_(",
        "self.depth = self.depth.add(1).clamp(max=self.stack).masked_fill(",
        TRAINING,
    ),
    ("dqn_atari", "rows drawn into other memory", *OTHER_ROWS, TRAINING),
    (
        "sac_atari",
        "event recorded before the copy that it stands for",
        "self.host_actions.copy_(self.actions, non_blocking=True)\n        self.actions_arrived.record()",
        "self.actions_arrived.record()\n        self.host_actions.copy_(self.actions, non_blocking=True)",
        TRAINING,
    ),
    ("sac_atari", "noise drawn into other memory", *OTHER_NOISE, TRAINING),
    ("sac_atari", "noise drawn once", *SAME_NOISE, FRESH_NOISE),
    (
        "sac_atari",
        "temperature rebound instead of filled",
        'self.optimizers["alpha"].step(self.log_alpha',
        'self.log_alpha = self.log_alpha.clone()\n            self.optimizers["alpha"].step(self.log_alpha',
        TRAINING,
    ),
    (
        "sac_atari",
        "loaded by rebinding after capture",
        "load_tensors(tensors, {",
        "self.log_alpha = self.log_alpha.clone()\n        load_tensors(self.tensors(), {",
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
    (
        "dqn_atari",
        "rewards and ends that are not sent to the device",
        "self.outcomes.copy_(self.host_outcomes, non_blocking=True)",
        "pass",
        THAT_OF_THE_CPU,
    ),
    (
        "ppo",
        "learning rate rebound when a checkpoint is loaded",
        "load_tensors(tensors, {",
        "vars(self.optimizers['agent'])['lr'] = self.optimizers['agent'].lr.clone()\n        load_tensors(tensors, {",
        CONTINUES,
    ),
]


def catch(name, algorithm, script, folder, monkeypatch):
    """Run the test of this name on `script`."""
    if name == TRAINING:
        return check_training(script, folder, settings=SETTINGS.get(algorithm), runs=[(False, False), (True, True)])
    if name == THAT_OF_THE_CPU:
        return check_against_cpu(script, folder, SETTINGS.get(algorithm))
    if name == FROM_THE_HOST:
        return getattr(test_atari_off_policy_runs, name)(script, folder, monkeypatch)
    with emulated_cuda():
        if algorithm == "ppo":
            monkeypatch.setattr(test_ppo, "TURBO", script)
            getattr(test_ppo, name)("cudagraphs")
        elif algorithm == "ppo_atari":
            monkeypatch.setattr(test_ppo_atari, "TURBO", script)
            getattr(test_ppo_atari, name)("cudagraphs")
        elif algorithm == "dqn":
            monkeypatch.setitem(test_dqn.CUDA, "script", script)
            getattr(test_dqn.TestTheLoopOnCuda(), name)("cudagraphs")
        elif algorithm in ("dqn_atari", "sac_atari"):
            getattr(test_atari_off_policy, name)(turbo=script, mode="cudagraphs")
        else:
            getattr(test_replay, name)(script, "cudagraphs")


def simplify(algorithm, script, monkeypatch):
    """Keep actions that are none from envpool, which takes them as addresses, and export no policies, to save time."""
    monkeypatch.setattr(torch.export, "export", Mock(side_effect=RuntimeError("to save time")))
    if algorithm == "ppo_atari":
        test_ppo_atari.script_games(script, monkeypatch)
    elif algorithm in ("dqn_atari", "sac_atari"):
        test_ppo_atari.script_games(script, monkeypatch, test_atari_off_policy_runs.StackingPool)


def train_on_cpu(algorithm, script, folder):
    sizes = SIZES[algorithm] | SETTINGS.get(algorithm, {}) | {"checkpoint_interval": 32, "run_dir": str(folder)}
    script.train(script.Args(**sizes))


@pytest.mark.parametrize(("algorithm", "bug", "old", "new", "caught_by"), BUGS, ids=[f"{b[0]}, {b[1]}" for b in BUGS])
def test_a_planted_bug_is_caught(algorithm, bug, old, new, caught_by, tmp_path, monkeypatch):
    name = f"{ALGORITHMS[algorithm]}_torchcompile"
    source = (ROOT / "leanrl" / f"{name}.py").read_text()
    assert source.count(old) == 1, f"not there once: {old}"
    script = load_copy(name, source.replace(old, new), tmp_path)
    simplify(algorithm, script, monkeypatch)
    train_on_cpu(algorithm, script, tmp_path / "cpu")
    rows = (IndexError,) if bug == "rows drawn into other memory" else ()  # which numbers that are NaN draw
    with pytest.raises((AssertionError, RuntimeError, SystemExit, *rows)) as caught:
        catch(caught_by, algorithm, script, tmp_path / "runs", monkeypatch)
    assert caught.type is not NotImplementedError  # which the emulated device raises
    assert caught.type is not SystemExit or str(caught.value).startswith("error: step ")  # NaN
    print(f"\n{algorithm}, {bug}: {caught.type.__name__}: {str(caught.value).splitlines()[0][:100]}")


@pytest.mark.parametrize(("algorithm", "test"), sorted({(bug[0], bug[-1]) for bug in BUGS}))
def test_the_scripts_as_they_are_pass(algorithm, test, tmp_path, monkeypatch):
    simplify(algorithm, TURBO[algorithm], monkeypatch)
    catch(test, algorithm, TURBO[algorithm], tmp_path, monkeypatch)


KINDS = {  # by words in what is wrong
    "waits": "no wait|event recorded before",
    "Python": "in Python",
    "rebound": "rebound|rebinding",
    "random numbers": "drawn",
    "host reads": "host read|read by the host|branch on|a wait in|copy that waits|batch of the host",
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
