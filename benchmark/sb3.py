"""Train Stable-Baselines3's PPO at the settings of ppo_continuous_action.py, for its speed (requirements/peers.txt).

    python benchmark/run.py --algo ppo_continuous_action --modes plain eager compile sb3

runs it beside the modes of this repository. It writes summary.json as the scripts do.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import stable_baselines3
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from turns import Turns


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"
    """gymnasium environment"""
    num_envs: int = 1
    """environments that step together"""
    total_timesteps: int = 60_000
    """environment steps of the run"""
    seed: int = 1
    """seed of the run"""
    run_dir: Path = Path("runs")
    """folder that receives the folder of the run"""


class Clock(BaseCallback):
    """Takes turns from the second rollout on: by then the first update is over."""

    def __init__(self, total_timesteps):
        super().__init__()
        self.start, self.warmup_seconds, self.turns = time.perf_counter(), None, Turns(total_timesteps)

    def _on_step(self):
        return True

    def _on_rollout_start(self):
        if self.num_timesteps:
            self.warmup_seconds = self.warmup_seconds or time.perf_counter() - self.start
            self.turns(self.num_timesteps)


def main(args):
    envs = VecNormalize(make_vec_env(args.env_id, args.num_envs, seed=args.seed), gamma=0.99)
    settings = {"n_steps": 2048, "batch_size": 64 * args.num_envs, "n_epochs": 10, "gae_lambda": 0.95, "gamma": 0.99}
    settings |= {"learning_rate": lambda left: 3e-4 * left, "clip_range": 0.2, "clip_range_vf": 0.2, "ent_coef": 0.0}
    model = PPO("MlpPolicy", envs, **settings, vf_coef=0.5, max_grad_norm=0.5, seed=args.seed)
    clock = Clock(args.total_timesteps)
    model.learn(args.total_timesteps, callback=clock)
    report = {"script": "stable_baselines3.PPO", "env_id": args.env_id, "seed": args.seed, "num_envs": args.num_envs}
    report |= {"matmul_precision": torch.get_float32_matmul_precision()}
    report |= {"device": str(model.device), "steady_sps": clock.turns.steps_per_second}
    report |= {"warmup_seconds": clock.warmup_seconds, "global_step": model.num_timesteps, "cores": os.cpu_count()}
    report |= {"episodic_return": float(np.mean([episode["r"] for episode in model.ep_info_buffer]))}
    report |= {"versions": {"stable_baselines3": stable_baselines3.__version__, "torch": torch.__version__}}
    folder = args.run_dir / "sb3"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main(tyro.cli(Args))
