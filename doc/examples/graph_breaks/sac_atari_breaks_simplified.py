"""SAC for discrete actions (Christodoulou 2019, arXiv:1910.07207) with the habits that break torch.compile's graph.

First the three updates as people write them, then each habit by itself. sac_atari_fixed_simplified.py has a function
of the same name for each. Hyper-parameters are those of CleanRL's sac_atari.py; networks are small and read vectors, so
that what a break costs is not lost among convolutions.

    python doc/examples/graph_breaks/sac_atari_breaks_simplified.py
"""

from copy import deepcopy
from typing import NamedTuple

import measure
import torch
from torch import nn
from torch.distributions import Categorical

FEATURES, ACTIONS, BATCH_SIZE, GAMMA = 64, 6, 64, 0.99
TARGET_ENTROPY = 0.89 * torch.log(torch.tensor(ACTIONS)).item()


class Batch(NamedTuple):
    """Transitions: obs and next_obs are (batch, FEATURES), all else is (batch,)."""

    obs: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    terminated: torch.Tensor
    next_obs: torch.Tensor


def make_batch(device="cpu"):
    """Random transitions."""
    obs, next_obs = torch.randn(2, BATCH_SIZE, FEATURES).to(device)
    actions = torch.randint(ACTIONS, (BATCH_SIZE,)).to(device)
    rewards = torch.randn(BATCH_SIZE).to(device)
    terminated = (torch.rand(BATCH_SIZE) < 0.2).float().to(device)
    return Batch(obs, actions, rewards, terminated, next_obs)


def make_network():
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, ACTIONS))


class Agent:
    """The networks, the temperature alpha and their optimizers."""

    def __init__(self, device="cpu"):
        self.actor = make_network().to(device)
        self.critics = nn.ModuleList([make_network(), make_network()]).to(device)
        self.target_critics = deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, device=device, requires_grad=True)
        self.alpha = 1.0
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4, eps=1e-4)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=3e-4, eps=1e-4)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=3e-4, eps=1e-4)
        self.actor.updates = 0


def decide(agent, obs):
    """An action, (batch,), probabilities of all actions and their logarithms, (batch, ACTIONS)."""
    logits = agent.actor(obs)
    policy = Categorical(logits=logits)
    return policy.sample(), policy.probs, logits.log_softmax(-1)


def smaller(critics, obs):
    """The smaller of both critics' values of each action, (batch, ACTIONS)."""
    return torch.min(critics[0](obs), critics[1](obs))


# ---------------------------------------------------------------------------------------------------------------------
# The updates
# ---------------------------------------------------------------------------------------------------------------------


def update_critics(agent, batch):
    with torch.no_grad():
        _, probs, log_probs = decide(agent, batch.next_obs)
        next_values = (probs * (smaller(agent.target_critics, batch.next_obs) - agent.alpha * log_probs)).sum(-1)
        targets = batch.rewards + GAMMA * (1 - batch.terminated) * next_values
    values = [critic(batch.obs).gather(1, batch.actions[:, None])[:, 0] for critic in agent.critics]
    loss = (values[0] - targets).square().mean() + (values[1] - targets).square().mean()
    agent.critic_optimizer.zero_grad()
    loss.backward()
    agent.critic_optimizer.step()
    return loss


def update_actor(agent, batch):
    _, probs, log_probs = decide(agent, batch.obs)
    with torch.no_grad():
        values = smaller(agent.critics, batch.obs)
    loss = (probs * (agent.alpha * log_probs - values)).sum(-1).mean()
    agent.actor_optimizer.zero_grad()
    loss.backward()
    agent.actor_optimizer.step()
    return loss


def update_temperature(agent, batch):
    with torch.no_grad():
        log_probs = agent.actor(batch.obs).log_softmax(-1)
        probs = log_probs.exp()
    loss = (probs * (-agent.log_alpha.exp() * (log_probs + TARGET_ENTROPY))).sum(-1).mean()
    agent.alpha_optimizer.zero_grad()
    loss.backward()
    agent.alpha_optimizer.step()
    return agent.log_alpha.exp()


# ---------------------------------------------------------------------------------------------------------------------
# One habit each
# ---------------------------------------------------------------------------------------------------------------------


def critic_loss(agent, batch):
    """The error of predicting rewards alone, (batch,): enough of a loss to show what goes wrong around it."""
    values = agent.critics[0](batch.obs).gather(1, batch.actions[:, None])[:, 0]
    return (values - batch.rewards).square()


def sample(agent, batch):
    policy = Categorical(logits=agent.actor(batch.obs))
    actions = policy.sample()
    return actions, policy.probs


def zero_grad(agent, batch):
    loss = critic_loss(agent, batch).mean()
    agent.critic_optimizer.zero_grad()
    return loss.detach()


def return_alpha(agent, batch):
    loss = critic_loss(agent, batch).mean()
    return agent.log_alpha.exp(), loss.detach()


def backward(agent, batch):
    loss = critic_loss(agent, batch).mean()
    loss.backward()
    return agent.critics[0][0].weight.grad


def optimizer_step(agent, batch):
    loss = critic_loss(agent, batch).mean()
    agent.critic_optimizer.step()
    return loss.detach()


def validate(agent, batch):
    policy = Categorical(logits=agent.actor(batch.obs), validate_args=True)
    return policy.entropy().mean().detach()


def item(agent, batch):
    alpha = agent.log_alpha.exp().item()
    return (alpha * agent.actor(batch.obs).log_softmax(-1)).mean().detach()


def branch(agent, batch):
    loss = critic_loss(agent, batch).mean()
    if loss > 10:
        loss = 10 * loss / loss.detach()
    return loss.detach()


def log(agent, batch):
    loss = critic_loss(agent, batch).mean()
    print(f"critic loss {loss:.3f}")
    return loss.detach()


def mask(agent, batch):
    losses = critic_loss(agent, batch)
    return losses[batch.terminated == 0].mean().detach()


def learning_rate(agent, batch):
    """After each change of the learning rate, see BEFORE_CALLS."""
    return optimizer_step(agent, batch)


def temperature(agent, batch):
    """After each change of alpha, see BEFORE_CALLS."""
    return (agent.alpha * agent.actor(batch.obs).log_softmax(-1)).mean().detach()


def count(agent, batch):
    agent.actor.updates += 1
    epsilon = 1 / agent.actor.updates
    return (epsilon * agent.actor(batch.obs).log_softmax(-1)).mean().detach()


def give_gradients(agent, call):
    for parameter in agent.critics.parameters():
        parameter.grad = torch.ones_like(parameter)


def anneal_learning_rate(agent, call):
    give_gradients(agent, call)
    agent.critic_optimizer.param_groups[0]["lr"] = 3e-4 * (1 - call / 100)


def read_alpha(agent, call):
    agent.alpha = 1 - call / 100  # in a run agent.log_alpha.exp().item(), another number after each update


UPDATES = (update_critics, update_actor, update_temperature)
OF_2023 = (sample, zero_grad, return_alpha)
OF_TODAY = (backward, optimizer_step, validate, item, branch, log, mask, learning_rate, temperature, count)
BEFORE_CALLS = {optimizer_step: give_gradients, learning_rate: anneal_learning_rate, temperature: read_alpha}


if __name__ == "__main__":
    torch.manual_seed(0)
    for function in (*UPDATES, *OF_2023, *OF_TODAY):
        measure.report(function, Agent, make_batch(), BEFORE_CALLS.get(function, measure.nothing))
