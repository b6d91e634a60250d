"""The functions of sac_atari_breaks_simplified.py, fixed: each is one graph, and is compiled once.

What changes between calls is a tensor, what the host wants to know is returned, and what follows from the action
probabilities is summed over them, not sampled.

    python doc/examples/graph_breaks/sac_atari_fixed_simplified.py
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


class Adam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) as tensors alone, so that it can be part of a graph.

    `torch.optim.Adam.step` breaks the graph by itself, whatever its settings.
    """

    def __init__(self, parameters, lr=3e-4, betas=(0.9, 0.999), eps=1e-4):
        self.parameters = list(parameters)
        self.betas = betas
        self.eps = eps
        device = self.parameters[0].device
        self.lr = torch.tensor(lr, device=device)
        self.steps = torch.zeros((), device=device)
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, gradients):
        """Move the parameters; `gradients` are in their order."""
        self.steps += 1
        mean_decay, square_decay = self.betas
        mean_share = 1 - mean_decay**self.steps
        square_share = 1 - square_decay**self.steps
        for parameter, gradient, mean, square in zip(self.parameters, gradients, self.means, self.squares, strict=True):
            mean.lerp_(gradient, 1 - mean_decay)
            square.lerp_(gradient.square(), 1 - square_decay)
            parameter -= self.lr * (mean / mean_share) / ((square / square_share).sqrt() + self.eps)

    def minimize(self, loss):
        """Take a step. No gradient is kept in the parameters, so that there is none to zero."""
        self.step(torch.autograd.grad(loss, self.parameters))


class Agent:
    """The networks, the temperature alpha and their optimizers."""

    def __init__(self, device="cpu"):
        self.actor = make_network().to(device)
        self.critics = nn.ModuleList([make_network(), make_network()]).to(device)
        self.target_critics = deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, device=device, requires_grad=True)
        self.alpha = torch.ones((), device=device)
        self.actor_optimizer = Adam(self.actor.parameters())
        self.critic_optimizer = Adam(self.critics.parameters())
        self.alpha_optimizer = Adam([self.log_alpha])
        self.actor.register_buffer("updates", torch.zeros((), device=device), persistent=False)


def decide(agent, obs):
    """Probabilities of all actions and their logarithms, (batch, ACTIONS)."""
    log_probs = agent.actor(obs).log_softmax(-1)
    return log_probs.exp(), log_probs


def smaller(critics, obs):
    """The smaller of both critics' values of each action, (batch, ACTIONS)."""
    return torch.min(critics[0](obs), critics[1](obs))


# ---------------------------------------------------------------------------------------------------------------------
# The updates
# ---------------------------------------------------------------------------------------------------------------------


def update_critics(agent, batch):
    with torch.no_grad():
        probs, log_probs = decide(agent, batch.next_obs)
        next_values = (probs * (smaller(agent.target_critics, batch.next_obs) - agent.alpha * log_probs)).sum(-1)
        targets = batch.rewards + GAMMA * (1 - batch.terminated) * next_values
    values = [critic(batch.obs).gather(1, batch.actions[:, None])[:, 0] for critic in agent.critics]
    loss = (values[0] - targets).square().mean() + (values[1] - targets).square().mean()
    agent.critic_optimizer.minimize(loss)
    return loss.detach()


def update_actor(agent, batch):
    probs, log_probs = decide(agent, batch.obs)
    with torch.no_grad():
        values = smaller(agent.critics, batch.obs)
    loss = (probs * (agent.alpha * log_probs - values)).sum(-1).mean()
    agent.actor_optimizer.minimize(loss)
    return loss.detach()


def update_temperature(agent, batch):
    with torch.no_grad():
        log_probs = agent.actor(batch.obs).log_softmax(-1)
        probs = log_probs.exp()
    loss = (probs * (-agent.log_alpha.exp() * (log_probs + TARGET_ENTROPY))).sum(-1).mean()
    agent.alpha_optimizer.minimize(loss)
    return agent.log_alpha.exp().detach()


# ---------------------------------------------------------------------------------------------------------------------
# One habit each
# ---------------------------------------------------------------------------------------------------------------------


def critic_loss(agent, batch):
    """The error of predicting rewards alone, (batch,): enough of a loss to show what goes wrong around it."""
    values = agent.critics[0](batch.obs).gather(1, batch.actions[:, None])[:, 0]
    return (values - batch.rewards).square()


def sample(agent, batch):
    log_probs = agent.actor(batch.obs).log_softmax(-1)
    actions = (log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(-1)
    return actions, log_probs.exp()


def zero_grad(agent, batch):
    loss = critic_loss(agent, batch).mean()
    for parameter in agent.critics.parameters():
        parameter.grad = None
    return loss.detach()


def return_alpha(agent, batch):
    loss = critic_loss(agent, batch).mean()
    return agent.log_alpha.exp().detach(), loss.detach()


def backward(agent, batch):
    loss = critic_loss(agent, batch).mean()
    gradients = torch.autograd.grad(loss, list(agent.critics[0].parameters()))
    return gradients[0]


def optimizer_step(agent, batch):
    loss = critic_loss(agent, batch).mean()
    agent.critic_optimizer.step(agent.gradients)
    return loss.detach()


def validate(agent, batch):
    policy = Categorical(logits=agent.actor(batch.obs), validate_args=False)
    return policy.entropy().mean().detach()


def item(agent, batch):
    alpha = agent.log_alpha.exp().detach()
    return (alpha * agent.actor(batch.obs).log_softmax(-1)).mean().detach()


def branch(agent, batch):
    loss = critic_loss(agent, batch).mean()
    loss = loss * (10 / loss.detach()).clamp(max=1)
    return loss.detach()


def log(agent, batch):
    loss = critic_loss(agent, batch).mean()
    return loss.detach()  # the caller prints it, once in a hundred updates


def mask(agent, batch):
    losses = critic_loss(agent, batch)
    goes_on = 1 - batch.terminated
    return ((losses * goes_on).sum() / goes_on.sum()).detach()


def learning_rate(agent, batch):
    """After each change of the learning rate, see BEFORE_CALLS."""
    return optimizer_step(agent, batch)


def temperature(agent, batch):
    """After each change of alpha, see BEFORE_CALLS."""
    return (agent.alpha * agent.actor(batch.obs).log_softmax(-1)).mean().detach()


def count(agent, batch):
    agent.actor.updates.add_(1)
    epsilon = 1 / agent.actor.updates
    return (epsilon * agent.actor(batch.obs).log_softmax(-1)).mean().detach()


def give_gradients(agent, call):
    agent.gradients = [torch.ones_like(parameter) for parameter in agent.critics.parameters()]


def anneal_learning_rate(agent, call):
    give_gradients(agent, call)
    agent.critic_optimizer.lr.fill_(3e-4 * (1 - call / 100))


def read_alpha(agent, call):
    agent.alpha.fill_(1 - call / 100)


UPDATES = (update_critics, update_actor, update_temperature)
OF_2023 = (sample, zero_grad, return_alpha)
OF_TODAY = (backward, optimizer_step, validate, item, branch, log, mask, learning_rate, temperature, count)
BEFORE_CALLS = {optimizer_step: give_gradients, learning_rate: anneal_learning_rate, temperature: read_alpha}


if __name__ == "__main__":
    torch.manual_seed(0)
    torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
    for function in (*UPDATES, *OF_2023, *OF_TODAY):
        measure.report(function, Agent, make_batch(), BEFORE_CALLS.get(function, measure.nothing), fullgraph=True)
