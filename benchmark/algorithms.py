"""The algorithms, by the names of their plain scripts, with their titles and the settings of measurements."""

from typing import NamedTuple


class Algorithm(NamedTuple):
    """An algorithm and its measurements. Steps are summed over all environments."""

    name: str
    env_id: str
    steps: int  # warm-up and about two minutes of steady training by the plain script on 2 cores
    quick_steps: int  # the same with 40 seconds of training
    budget: int  # steps of a learning run, as published
    speed: int  # steps per second of the plain script on 2 cores, to estimate the time of a matrix
    compiled: int  # the same for the turbo script with --compile
    env_ids: tuple[str, ...]  # of learning runs
    flags: str = ""  # flags of the speed rounds, to reach steady state early
    atari: bool = False
    peers: tuple[str, ...] = ("sb3", "sbx", "cleanrl", "leanrl-2024")  # of rounds.PEERS, those that have it

    @property
    def title(self):
        """The title of the algorithm, without its environment."""
        return f"{self.name}, Atari" if self.atari else self.name

    @property
    def learner(self):
        """The name of the learner's class in our scripts."""
        return self.name.split()[0]


FULL_SOON = "--learning-starts 1000 --buffer-size 100000"
CHEETAH, CARTPOLE, BREAKOUT, BEAM_RIDER = "HalfCheetah-v5", "CartPole-v1", "Breakout-v5", "BeamRider-v5"
WALKERS = (CHEETAH, "Hopper-v5", "Walker2d-v5")
SIX = (*WALKERS, "InvertedPendulum-v5", "Humanoid-v5", "Pusher-v5")
CLASSIC = (CARTPOLE, "Acrobot-v1", "MountainCar-v0")
GAMES = (BREAKOUT, "Pong-v5", BEAM_RIDER)
MILLION = 1_000_000
ALGORITHMS = {
    "sac_continuous_action": Algorithm("SAC", CHEETAH, 15_000, 9_000, MILLION, 100, 200, WALKERS),
    "td3_continuous_action": Algorithm("TD3", CHEETAH, 45_000, 32_000, MILLION, 170, 280, WALKERS),
    "ppo_continuous_action": Algorithm("PPO", CHEETAH, 150_000, 60_000, MILLION, 1300, 7000, SIX),
    "ppo_lstm": Algorithm(
        "PPO with memory", CARTPOLE, 150_000, 60_000, MILLION // 2, 3000, 9000, (CARTPOLE,), peers=("sb3",)
    ),
    "ppo_atari_envpool": Algorithm("PPO", BREAKOUT, 40_000, 16_000, 10 * MILLION, 350, 500, GAMES, atari=True),
    "dqn": Algorithm("DQN", CARTPOLE, 400_000, 150_000, MILLION // 2, 3700, 11_000, CLASSIC),
    "dqn_atari": Algorithm(
        "DQN", BREAKOUT, 14_000, 6_000, 10 * MILLION, 120, 150, GAMES, FULL_SOON, True, peers=("sb3", "sbx")
    ),
    "pqn": Algorithm("PQN", CARTPOLE, 350_000, 120_000, MILLION // 2, 3000, 9000, CLASSIC, peers=("cleanrl",)),
    "pqn_atari_envpool": Algorithm(
        "PQN", BREAKOUT, 40_000, 16_000, 10 * MILLION, 350, 500, GAMES, atari=True, peers=("cleanrl",)
    ),
    "sac_atari": Algorithm(
        "SAC-discrete", BEAM_RIDER, 4_000, 2_000, 5 * MILLION, 25, 30, (BEAM_RIDER,), FULL_SOON, True, peers=()
    ),
}


def named(algo, env_id=None):
    """The name of an algorithm in an environment (default: its own), for tables and figures."""
    algorithm = ALGORITHMS[algo]
    return f"{algorithm.name}, {env_id or algorithm.env_id}"
