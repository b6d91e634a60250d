"""SAC for discrete actions (Christodoulou 2019, arXiv:1910.07207) on Atari, whose update is one graph, compiled once.

The whole training script: sac_atari_breaks_full.py, fixed. `Adam` is new, `SAC` differs, and how `train` calls it.

    python doc/examples/graph_breaks/sac_atari_fixed_full.py --env-id Breakout-v5
"""

from copy import deepcopy
from dataclasses import dataclass

import envpool
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    env_id: str = "Breakout-v5"
    """Atari game, by envpool's name"""
    seed: int = 1
    """seed of the game, numpy and torch"""
    total_timesteps: int = 20_000
    """environment steps of the whole run"""
    learning_starts: int = 2_000
    """environment steps before the first update, with random actions"""
    buffer_size: int = 5_000
    """transitions in the replay buffer, 56 KB each"""
    batch_size: int = 64
    """transitions in an update"""
    update_frequency: int = 4
    """environment steps between two updates"""
    target_network_frequency: int = 8_000
    """environment steps between two copies of the critics to the target critics"""
    learning_rate: float = 3e-4
    """learning rate of all optimizers"""
    gamma: float = 0.99
    """discount factor"""
    target_entropy_scale: float = 0.89
    """target of the policy's entropy, as a share of that of random actions"""
    log_frequency: int = 100
    """updates between two logs"""
    compile: bool = True
    """compile acting and the update"""
    run_dir: str = "runs/graph_breaks"
    """folder for TensorBoard's events"""


def make_network(num_actions):
    """The convolutional network of Mnih et al. 2015: frames, (batch, 4, 84, 84), of 0 to 1 to (batch, num_actions)."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, num_actions),
    )


class Replay:
    """The newest `size` transitions, in the host's memory."""

    def __init__(self, size, obs_shape):
        self.columns = {
            "obs": np.zeros((size, *obs_shape), np.uint8),
            "actions": np.zeros(size, np.int64),
            "rewards": np.zeros(size, np.float32),
            "terminated": np.zeros(size, np.float32),
            "next_obs": np.zeros((size, *obs_shape), np.uint8),
        }
        self.size = size
        self.stored = 0

    def add(self, *transition):
        """Write one transition, in the order of the columns."""
        for column, value in zip(self.columns.values(), transition, strict=True):
            column[self.stored % self.size] = value
        self.stored += 1

    def sample(self, batch_size, generator, device):
        """Columns by name, each (batch_size, ...)."""
        rows = generator.integers(min(self.stored, self.size), size=batch_size)
        return {name: torch.as_tensor(column[rows], device=device) for name, column in self.columns.items()}


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


class SAC:
    """The learner."""

    def __init__(self, args, num_actions, device):
        self.args = args
        self.actor = make_network(num_actions).to(device)
        self.critics = nn.ModuleList([make_network(num_actions), make_network(num_actions)]).to(device)
        self.target_critics = deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, device=device, requires_grad=True)
        self.target_entropy = args.target_entropy_scale * np.log(num_actions)
        self.actor_optimizer = Adam(self.actor.parameters(), args.learning_rate)
        self.critic_optimizer = Adam(self.critics.parameters(), args.learning_rate)
        self.alpha_optimizer = Adam([self.log_alpha], args.learning_rate)
        if args.compile:
            torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
            self.act = torch.compile(self.act, fullgraph=True)
            self.update = torch.compile(self.update, fullgraph=True)

    @torch.no_grad()
    def act(self, obs):
        """Actions, (1,), for `obs`, (1, 4, 84, 84), in bytes."""
        probs = self.actor(obs / 255).softmax(-1)
        return torch.multinomial(probs, 1)[:, 0]

    def update(self, batch):
        """One step of critics, actor and temperature; returns the critics' loss, the actor's and alpha, (3,)."""
        obs = batch["obs"] / 255
        next_obs = batch["next_obs"] / 255
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            log_probs = self.actor(next_obs).log_softmax(-1)
            target_values = torch.min(*[critic(next_obs) for critic in self.target_critics])
            next_values = (log_probs.exp() * (target_values - alpha * log_probs)).sum(-1)
            targets = batch["rewards"] + self.args.gamma * (1 - batch["terminated"]) * next_values
        values = [critic(obs).gather(1, batch["actions"][:, None])[:, 0] for critic in self.critics]
        critic_loss = sum((value - targets).square().mean() for value in values)
        self.critic_optimizer.minimize(critic_loss)

        log_probs = self.actor(obs).log_softmax(-1)
        with torch.no_grad():
            smaller_values = torch.min(*[critic(obs) for critic in self.critics])
        actor_loss = (log_probs.exp() * (alpha * log_probs - smaller_values)).sum(-1).mean()
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean().detach()
        self.actor_optimizer.minimize(actor_loss)

        alpha_loss = self.log_alpha.exp() * (entropy - self.target_entropy)
        self.alpha_optimizer.minimize(alpha_loss)
        return torch.stack((critic_loss, actor_loss, self.log_alpha.exp()[0])).detach()


def make_pool(args):
    """envpool's game, a vector environment of one; a life is an episode, rewards are -1, 0 or 1."""
    settings = {"episodic_life": True, "reward_clip": True}
    return envpool.make(args.env_id, env_type="gymnasium", num_envs=1, seed=args.seed, **settings)


def log(writer, losses, step):
    for name, value in zip(("critics", "actor", "alpha"), losses, strict=True):
        writer.add_scalar(f"losses/{name}", value, step)
    if not np.isfinite(losses).all():
        raise FloatingPointError(f"a loss of {losses} is not finite")


def train(args):
    """Run the whole training; returns the learner."""
    generator = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    env = make_pool(args)
    num_actions = int(env.action_space.n)
    writer = SummaryWriter(args.run_dir)
    learner = SAC(args, num_actions, device)
    replay = Replay(args.buffer_size, env.observation_space.shape)
    episodic_return = 0
    ended = False
    obs, _ = env.reset()
    for step in range(1, args.total_timesteps + 1):
        if step <= args.learning_starts:
            actions = generator.integers(num_actions, size=1)
        else:
            actions = learner.act(torch.as_tensor(obs, device=device)).cpu().numpy()
        next_obs, rewards, terminated, truncated, infos = env.step(actions.astype(np.int32))
        terminated = terminated | infos["terminated"].astype(bool)
        if not ended:  # else this step has ignored its action and has begun the next episode
            replay.add(obs[0], actions[0], rewards[0], terminated[0], next_obs[0])
        ended = terminated[0] or truncated[0]
        obs = next_obs
        episodic_return += infos["reward"][0]
        if infos["terminated"][0] or truncated[0]:
            writer.add_scalar("charts/episodic_return", episodic_return, step)
            episodic_return = 0
        if step > args.learning_starts and step % args.update_frequency == 0:
            losses = learner.update(replay.sample(args.batch_size, generator, device))
            if step % (args.log_frequency * args.update_frequency) == 0:
                log(writer, losses.tolist(), step)
        if step % args.target_network_frequency == 0:
            learner.target_critics.load_state_dict(learner.critics.state_dict())
    writer.close()
    return learner


if __name__ == "__main__":
    train(tyro.cli(Args))
