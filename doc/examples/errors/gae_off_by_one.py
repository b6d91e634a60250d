"""GAE looks for the end of an episode one step too early."""

import torch

GAMMA, LAMBDA = 0.9, 0.95


def setting():
    """Rewards, exact values and episode starts of two episodes of three steps, which pay 1 each."""
    rewards = torch.ones(6)
    values = torch.tensor([2.71, 1.9, 1.0, 2.71, 1.9, 1.0, 2.71])  # the last one is that of the next episode
    starts = torch.tensor([1.0, 0, 0, 1, 0, 0, 1])  # 1 where an episode starts
    return rewards, values, starts


def broken():
    """The advantages, which are 0, since values are exact."""
    rewards, values, starts = setting()
    advantages = torch.zeros_like(rewards)
    advantage = 0.0
    for t in reversed(range(len(rewards))):
        nonterminal = 1 - starts[t]
        delta = rewards[t] + GAMMA * nonterminal * values[t + 1] - values[t]
        advantage = delta + GAMMA * LAMBDA * nonterminal * advantage
        advantages[t] = advantage
    return advantages.tolist()


def fixed():
    rewards, values, starts = setting()
    advantages = torch.zeros_like(rewards)
    advantage = 0.0
    for t in reversed(range(len(rewards))):
        nonterminal = 1 - starts[t + 1]
        delta = rewards[t] + GAMMA * nonterminal * values[t + 1] - values[t]
        advantage = delta + GAMMA * LAMBDA * nonterminal * advantage
        advantages[t] = advantage
    return advantages.tolist()


def is_right(advantages):
    return max(abs(advantage) for advantage in advantages) < 1e-6
