"""SAC for discrete actions (Christodoulou 2019, arXiv:1910.07207) on Atari, with habits that break the graph.

The whole training script. sac_atari_fixed_full.py is the same, fixed: `SAC` differs, and how `train` calls it.
Hyper-parameters are those of CleanRL's sac_atari.py, save for a short run with a small replay buffer.

    python doc/examples/graph_breaks/sac_atari_breaks_full.py --env-id Breakout-v5
"""

from copy import deepcopy
from dataclasses import dataclass

import envpool
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Categorical
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


class SAC:
    """The learner."""

    def __init__(self, args, num_actions, writer, device):
        self.args = args
        self.writer = writer
        self.actor = make_network(num_actions).to(device)
        self.critics = nn.ModuleList([make_network(num_actions), make_network(num_actions)]).to(device)
        self.target_critics = deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, device=device, requires_grad=True)
        self.alpha = 1.0
        self.target_entropy = args.target_entropy_scale * np.log(num_actions)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.learning_rate, eps=1e-4)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=args.learning_rate, eps=1e-4)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=args.learning_rate, eps=1e-4)
        self.updates = 0
        if args.compile:
            self.act = torch.compile(self.act)
            self.update = torch.compile(self.update)

    @torch.no_grad()
    def act(self, obs):
        """Actions, numpy, (num_envs,), for `obs`, (num_envs, 4, 84, 84), in bytes."""
        policy = Categorical(logits=self.actor(obs / 255), validate_args=True)
        return policy.sample().cpu().numpy()

    def update(self, batch):
        """One step of critics, actor and temperature."""
        obs = batch["obs"] / 255
        next_obs = batch["next_obs"] / 255
        with torch.no_grad():
            policy = Categorical(logits=self.actor(next_obs))
            target_values = torch.min(*[critic(next_obs) for critic in self.target_critics])
            next_values = (policy.probs * (target_values - self.alpha * policy.logits)).sum(-1)
            targets = batch["rewards"] + self.args.gamma * (1 - batch["terminated"]) * next_values
        values = [critic(obs).gather(1, batch["actions"][:, None])[:, 0] for critic in self.critics]
        critic_loss = sum((value - targets).square().mean() for value in values)
        if torch.isnan(critic_loss):
            raise FloatingPointError("the critics' loss is NaN")
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        policy = Categorical(logits=self.actor(obs))
        with torch.no_grad():
            smaller_values = torch.min(*[critic(obs) for critic in self.critics])
        actor_loss = (policy.probs * (self.alpha * policy.logits - smaller_values)).sum(-1).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()

        surplus = policy.entropy().mean().item() - self.target_entropy
        alpha_loss = self.log_alpha.exp() * surplus
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()
        self.alpha = self.log_alpha.exp().item()

        self.updates += 1
        if self.updates % self.args.log_frequency == 0:
            self.writer.add_scalar("losses/critics", critic_loss.item(), self.updates)
            self.writer.add_scalar("losses/actor", actor_loss.item(), self.updates)
            self.writer.add_scalar("losses/alpha", self.alpha, self.updates)


def make_pool(args):
    """envpool's game, a vector environment of one; a life is an episode, rewards are -1, 0 or 1."""
    settings = {"episodic_life": True, "reward_clip": True}
    return envpool.make(args.env_id, env_type="gymnasium", num_envs=1, seed=args.seed, **settings)


def train(args):
    """Run the whole training; returns the learner."""
    generator = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    env = make_pool(args)
    num_actions = int(env.action_space.n)
    writer = SummaryWriter(args.run_dir)
    learner = SAC(args, num_actions, writer, device)
    replay = Replay(args.buffer_size, env.observation_space.shape)
    episodic_return = 0
    ended = False
    obs, _ = env.reset()
    for step in range(1, args.total_timesteps + 1):
        if step <= args.learning_starts:
            actions = generator.integers(num_actions, size=1)
        else:
            actions = learner.act(torch.as_tensor(obs, device=device))
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
            learner.update(replay.sample(args.batch_size, generator, device))
        if step % args.target_network_frequency == 0:
            learner.target_critics.load_state_dict(learner.critics.state_dict())
    writer.close()
    return learner


if __name__ == "__main__":
    train(tyro.cli(Args))
