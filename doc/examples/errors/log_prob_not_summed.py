"""The log-probabilities of the dimensions of a Gaussian action are not summed."""

import torch
from torch.distributions import Normal

ACT_DIM = 6


def setting():
    """A standard Gaussian policy for 1000 observations, and its actions."""
    torch.manual_seed(0)
    policy = Normal(torch.zeros(1000, ACT_DIM), 1.0)
    return policy, policy.sample()


def broken():
    """The policy's entropy, which is 8.5."""
    policy, actions = setting()
    log_prob = policy.log_prob(actions)
    return -log_prob.mean().item()


def fixed():
    policy, actions = setting()
    log_prob = policy.log_prob(actions).sum(-1)
    return -log_prob.mean().item()


def is_right(entropy):
    return abs(entropy - ACT_DIM * Normal(0.0, 1.0).entropy().item()) < 0.2
