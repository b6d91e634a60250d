"""Returns published by CleanRL, by algorithm and environment (without its version), quoted verbatim.

From docs.cleanrl.dev/rl-algorithms (ppo, td3, sac, dqn, pqn): means over three seeds at the end of the same number of
steps, with environments v4 (MuJoCo), v5 (Atari), v1 and v0, measured in 2022 and 2023 (PQN: 2025).
"""

CLEANRL = {
    "ppo_continuous_action": {
        "HalfCheetah": "1442.64 ± 46.03",
        "Walker2d": "2287.95 ± 571.78",
        "Hopper": "2382.86 ± 271.74",
        "InvertedPendulum": "963.09 ± 22.20",
        "Humanoid": "716.11 ± 49.08",
        "Pusher": "-40.38 ± 7.15",
    },
    "td3_continuous_action": {
        "HalfCheetah": "9583.22 ± 126.09",
        "Walker2d": "4057.59 ± 658.78",
        "Hopper": "3134.61 ± 360.18",
    },
    "sac_continuous_action": {
        "HalfCheetah": "9634.89 ± 1423.73",
        "Walker2d": "3591.45 ± 911.33",
        "Hopper": "2310.46 ± 342.82",
    },
    "dqn": {
        "CartPole": "488.69 ± 16.11",
        "Acrobot": "-91.54 ± 7.20",
        "MountainCar": "-194.95 ± 8.48",
    },
    "pqn": {
        "CartPole": "495.13 ± 6.89",
        "Acrobot": "-95.63 ± 5.73",
        "MountainCar": "-200.00 ± 0.00",
    },
    "pqn_atari_envpool": {
        "Breakout": "384.85 ± 12.39",
        "Pong": "20.49 ± 0.11",
        "BeamRider": "5753.03 ± 2394.70",
    },
}


def cleanrl(algo, env_id):
    """CleanRL's mean ± spread as text, or "" if there is none."""
    return CLEANRL.get(algo, {}).get(env_id.split("-")[0], "")
