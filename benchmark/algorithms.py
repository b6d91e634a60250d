"""The algorithms, by the names of their plain scripts: what each is called, and what it is measured on."""

from typing import NamedTuple


class Algorithm(NamedTuple):
    """Steps are those of all environments together."""

    name: str
    env_id: str
    steps: int  # warm-up and two minutes or so of steady training by the plain script on 2 cores
    quick_steps: int  # the same with 40 seconds
    budget: int  # of a learning run, as published
    speed: int  # steps per second of the plain script on 2 cores, only to tell how long a matrix takes
    flags: str = ""  # of the speed rounds, so that they soon reach steady state
    atari: bool = False
    has_peers: bool = True  # Stable-Baselines3 and SBX have no SAC for discrete actions

    @property
    def title(self):
        """What tells it from the others, without its environment."""
        return f"{self.name}, Atari" if self.atari else self.name


FULL_SOON = "--learning-starts 1000 --buffer-size 100000"
ALGORITHMS = {
    "sac_continuous_action": Algorithm("SAC", "HalfCheetah-v5", 15_000, 9_000, 1_000_000, 100),
    "td3_continuous_action": Algorithm("TD3", "HalfCheetah-v5", 45_000, 32_000, 1_000_000, 170),
    "ppo_continuous_action": Algorithm("PPO", "HalfCheetah-v5", 150_000, 60_000, 1_000_000, 1300),
    "ppo_atari_envpool": Algorithm("PPO", "Breakout-v5", 40_000, 16_000, 10_000_000, 350, atari=True),
    "dqn": Algorithm("DQN", "CartPole-v1", 400_000, 150_000, 500_000, 3700),
    "dqn_atari": Algorithm("DQN", "Breakout-v5", 14_000, 6_000, 10_000_000, 120, FULL_SOON, atari=True),
    "sac_atari": Algorithm(
        "SAC-discrete", "BeamRider-v5", 4_000, 2_000, 5_000_000, 25, FULL_SOON, atari=True, has_peers=False
    ),
}


def named(algo, env_id=None):
    """What tables and figures call an algorithm in an environment, by default its own."""
    algorithm = ALGORITHMS[algo]
    return f"{algorithm.name}, {env_id or algorithm.env_id}"
