"""Initial state of the learners: the scale of each layer's weights, zero biases, target networks, Adam's settings."""

import math

import pytest
import torch
from conftest import MULTI, PLAIN, TURBO, algorithm, leaves, stem
from formulas import assert_orthogonal, is_population, make_learner, noticing, pair
from test_ppo_formulas import PPO_CASES, each_ppo
from test_q_formulas import OFF_POLICY, networks_of

VECTORS = {"actor.4": 0.01, "critic.4": 1.0} | dict.fromkeys(("actor.0", "actor.2", "critic.0", "critic.2"), 2**0.5)
GAINS = {  # of PPO's layers: sqrt(2), but for the policy's outputs, 0.01, and the value, 1
    "ppo": VECTORS,
    "ppo_discrete": VECTORS,
    "ppo_atari": {"actor": 0.01, "critic": 1.0} | {f"features.{i}": 2**0.5 for i in (0, 2, 4, 7)},
    "ppo_lstm": {"actor": 0.01, "critic": 1.0, "encoder.0": 2**0.5, "cell": 1.0},
}
SMALL = {"num_envs": 2, "num_steps": 2, "num_minibatches": 1}
PPOS = list(dict(PPO_CASES))


def check_orthogonal(script, actions=None, **kwargs):
    """A layer's weights are orthogonal, with its gain as their singular values; biases and log_std are 0."""
    actions = actions or dict(reversed(PPO_CASES)).get(script)
    gains = GAINS[algorithm(script)]
    layers = set()
    for name, parameter in make_learner(script, actions, **SMALL | kwargs).agent.named_parameters():
        layer, _, kind = name.rpartition(".")
        if kind.startswith("weight"):
            assert_orthogonal(parameter, gains[layer])
            layers.add(layer)
        else:
            assert kind.startswith("bias") or name == "log_std"
            assert (parameter == 0).all()
    assert layers == gains.keys()


@each_ppo
def test_ppos_layers_start_orthogonal(script, actions):
    check_orthogonal(script, actions)


@pytest.mark.parametrize("script", pair("ppo_lstm"), ids=stem)
def test_a_gru_starts_orthogonal(script):
    check_orthogonal(script, cell="gru")


@pytest.mark.parametrize("script", pair("sac_atari"), ids=stem)
def test_sac_for_atari_starts_with_kaimings_weights(script):
    """Weights have the variance 2 / inputs (arXiv:1502.01852), and biases are 0."""
    for path, tensor in leaves(networks_of(make_learner(script, buffer_size=100))):
        if path.endswith("bias"):
            assert (tensor == 0).all()
        else:
            wanted = math.sqrt(2 / tensor[0].numel())
            assert tensor.std().item() == pytest.approx(wanted, rel=4 / math.sqrt(2 * tensor.numel()))


@pytest.mark.parametrize("script", OFF_POLICY, ids=stem)
def test_target_networks_start_as_copies(script):
    """Target networks have the weights of the networks, and no two critics have the same ones."""
    tensors = dict(leaves(networks_of(make_learner(script, buffer_size=100))))
    targets = [path for path in tensors if path.startswith(".target_")]
    assert targets
    for path in targets:
        assert torch.equal(tensors[path], tensors[path.replace(".target_", ".", 1)])
    critics = [path for path in tensors if path.startswith(".critics.0.") and path.endswith("weight")]
    assert bool(critics) == (not algorithm(script).startswith("dqn"))
    for path in critics:
        assert not torch.equal(tensors[path], tensors[path.replace(".0.", ".1.", 1)])


@pytest.mark.parametrize("script", [*PPOS, *OFF_POLICY], ids=stem)
def test_adam_has_the_networks_settings(script):
    """Each network's learning rate is its flag, and epsilon is CleanRL's."""
    name = algorithm(script)
    rates = {"policy_lr": 1e-3, "q_lr": 2e-3} if name.startswith("sac") else {"learning_rate": 3e-3}
    given = {flag: (rate,) for flag, rate in rates.items()} | {"seeds": (1,)} if is_population(script) else rates
    sizes = SMALL if name.startswith("ppo") else {"buffer_size": 100}
    actions = dict(reversed(PPO_CASES)).get(script)
    learner = make_learner(script, actions, **sizes | given)
    eps = 1e-5 if name.startswith("ppo") else 1e-4 if name == "sac_atari" else 1e-8
    for network, optimizer in learner.optimizers.items():
        rate = rates.get("learning_rate") or rates["policy_lr" if network == "actor" else "q_lr"]
        if isinstance(optimizer, torch.optim.Adam):
            (group,) = optimizer.param_groups
            got = (group["lr"], group["eps"], *group["betas"])
        else:
            got = (optimizer.lr.item(), optimizer.eps, optimizer.beta1, optimizer.beta2)
        assert got == pytest.approx((rate, eps, 0.9, 0.999))


GAIN = ("(layer.weight, gain)", "(layer.weight)")
ONES = ("nn.init.zeros_(layer.bias)", "nn.init.ones_(layer.bias)")
TORCHS = ("recurrent(CELLS[cell](64, HIDDEN))", "CELLS[cell](64, HIDDEN)")
SMALLER = ("torch.zeros(1, act_dim))", "-torch.ones(1, act_dim))")
UNIFORM = ("kaiming_normal_(layer.weight)", "kaiming_uniform_(layer.weight, 5**0.5)")
OWN = ("copy.deepcopy(self.q)\n        self.net", "QNetwork(self.obs_dim, self.num_actions)\n        self.net")
ONE = ("[Critic(obs_dim, act_dim) for _ in range(NUM_CRITICS)]", "[Critic(obs_dim, act_dim)] * NUM_CRITICS")
EPS = ("lr=args.learning_rate, eps=1e-5)", "lr=args.learning_rate)")
ACTORS_RATE = ("self.critics.parameters(), lr=args.q_lr", "self.critics.parameters(), lr=args.policy_lr")
BUGS = [  # script, what is wrong, what is replaced by what, who notices
    (PLAIN["ppo"], "gains not passed on", *GAIN, check_orthogonal),
    (TURBO["ppo_atari"], "gains not passed on", *GAIN, check_orthogonal),
    (MULTI, "gains not passed on", *GAIN, check_orthogonal),
    (PLAIN["ppo_lstm"], "biases that are not 0", *ONES, check_orthogonal),
    (TURBO["ppo_lstm"], "cell as torch starts it", *TORCHS, check_orthogonal),
    (PLAIN["ppo"], "deviation of another size", *SMALLER, check_orthogonal),
    (PLAIN["sac_atari"], "Kaiming's uniform weights", *UNIFORM, test_sac_for_atari_starts_with_kaimings_weights),
    (PLAIN["dqn"], "target networks of their own", *OWN, test_target_networks_start_as_copies),
    (TURBO["td3"], "critics that are one", *ONE, test_target_networks_start_as_copies),
    (PLAIN["ppo_atari"], "epsilon of torch", *EPS, test_adam_has_the_networks_settings),
    (PLAIN["sac"], "the actor's rate for critics", *ACTORS_RATE, test_adam_has_the_networks_settings),
]
test_a_planted_bug_is_noticed = noticing(BUGS)
