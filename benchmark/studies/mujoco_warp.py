"""The tasks of environments/mujoco_warp.py beside gymnasium's: differences from the same states, and speed.

    python -m benchmark.studies.mujoco_warp                        # all tasks; kernels compile at the first start
    python -m benchmark.studies.mujoco_warp --tasks HalfCheetah-v5
    python -m benchmark.studies.mujoco_warp --speed --worlds 256   # steps per second instead

Worlds start in states of episodes with random actions, each after another number of steps, and take ten more random
actions. A difference is that of two numbers, divided by the size of gymnasium's where it exceeds 1. Worlds are compared
until their episode ends in one of the two.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import torch
from gymnasium.envs.mujoco import mujoco_env

from common.arguments import check, distinct, from_low, parse
from common.tables import Table
from environments.mujoco_warp import TASKS

STEPS = 10
HEADER = ("", "numbers", "first step", "its reward", "tenth step", "median", "its reward", "ends that differ")
SPEED_HEADER = ("", "seconds to make it", "steps per second", "per second of CPU time")


@dataclass
class Args:
    tasks: tuple[str, ...] = tuple(TASKS)
    """gymnasium's names of the tasks"""
    worlds: int = 64
    """number of worlds"""
    speed: bool = False
    """measure steps per second"""


def episodes(reference, worlds, seed=0):
    """A state (qpos, qvel) from each of `worlds` episodes, float32, and actions (STEPS, worlds, act_dim) from there."""
    space = reference.action_space
    space.seed(seed)
    states = []
    for world in range(worlds):
        reference.reset(seed=seed + world)
        for _ in range(world):
            terminated = reference.step(space.sample())[2]
            if terminated:
                reference.reset()
        states.append((np.float32(reference.data.qpos), np.float32(reference.data.qvel)))
    qpos, qvel = map(np.stack, zip(*states, strict=True))
    actions = np.stack([[space.sample() for _ in range(worlds)] for _ in range(STEPS)])
    return qpos, qvel, actions


def begin(reference, qpos, qvel):
    """Begin an episode of gymnasium's environment in this state."""
    mujoco.mj_resetData(reference.model, reference.data)
    reference.set_state(qpos, qvel)


def place(envs, qpos, qvel):
    """The same for all worlds of MuJoCo Warp."""
    envs.reset()
    envs.qpos.copy_(torch.as_tensor(qpos))
    envs.qvel.copy_(torch.as_tensor(qvel))
    envs.launch(envs.place)
    envs.x = envs.task.position(envs)


def steps_of_gymnasium(reference, qpos, qvel, actions):
    """Observations, rewards and terminated, (STEPS, worlds, ...), from there; NaN after an end."""
    steps, worlds = actions.shape[:2]
    obs = np.full((steps, worlds, reference.observation_space.shape[0]), np.nan)
    rewards, terminated = np.full((steps, worlds), np.nan), np.zeros((steps, worlds), bool)
    for world in range(worlds):
        begin(reference, qpos[world], qvel[world])
        for step in range(steps):
            obs[step, world], rewards[step, world], terminated[step, world], _, _ = reference.step(actions[step, world])
            if terminated[step, world]:
                break
    return obs, rewards, terminated


def steps_of_warp(envs, qpos, qvel, actions):
    """The same of MuJoCo Warp, float64."""
    place(envs, qpos, qvel)
    found = []
    over = torch.zeros(envs.num_envs, dtype=torch.bool)
    for action in torch.as_tensor(actions, device=envs.device):
        _, rewards, terminated, _, infos = envs.step(action)
        obs = infos["final_obs"].cpu().double().masked_fill(over[:, None], torch.nan)
        rewards, terminated = rewards.cpu().double().masked_fill(over, torch.nan), terminated.cpu() & ~over
        found.append((obs, rewards, terminated))
        over |= terminated
    return [torch.stack(parts).numpy() for parts in zip(*found, strict=True)]


def relative(got, wanted):
    """Differences in units of max(1, |wanted|); NaN where an episode was over in one of the two."""
    return np.abs(got - wanted) / np.maximum(1, np.abs(wanted))


def elliptic(xml_file, folder):
    """A copy of a model of gymnasium's in `folder`, with elliptic friction cones."""
    model = (Path(mujoco_env.__file__).parent / "assets" / xml_file).read_text(encoding="utf-8")
    path = Path(folder) / xml_file
    path.write_text(model.replace("<option ", '<option cone="elliptic" ', 1), encoding="utf-8")
    return {"xml_file": str(path)}


def differences(name, worlds, newton=False, **kwargs):
    """Of observations (STEPS, worlds, obs_dim), of rewards and terminated (STEPS, worlds); and the number of ends.

    With `newton`, gymnasium's environment also uses this solver. Other keyword arguments go to both.
    """
    reference = gym.make(name, **kwargs).unwrapped
    envs = gym.make_vec(f"warp/{name}", num_envs=worlds, **kwargs)
    if newton:
        reference.model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    start = episodes(reference, worlds)
    wanted, got = steps_of_gymnasium(reference, *start), steps_of_warp(envs, *start)
    return {
        "obs": relative(got[0], wanted[0]),
        "rewards": relative(got[1], wanted[1]),
        "terminated": got[2] != wanted[2],
        "ends": wanted[2].sum(),
    }


def row(name, worlds, title="", **kwargs):
    found = differences(name, worlds, **kwargs)
    first, last = found["obs"][0].max(-1), found["obs"][-1].max(-1)
    rewards = found["rewards"]
    numbers = [np.nanmax(first), np.nanmax(rewards[0]), np.nanmax(last), np.nanmedian(last), np.nanmax(rewards[-1])]
    different = found["terminated"].any(0).sum()
    title, width = name.removesuffix("-v5") + title, str(found["obs"].shape[-1])
    return [title, width, *(f"{number:.0e}" for number in numbers), f"{different} of {found['ends']}"]


def speed(name, worlds, steps=50):
    """Seconds until the environment is made, and its steps per second with random actions, of time and of CPU time."""
    begin = time.perf_counter()
    envs = gym.make_vec(f"warp/{name}", num_envs=worlds)
    made = time.perf_counter() - begin
    envs.reset(seed=1)
    actions = torch.as_tensor(np.stack([envs.action_space.sample() for _ in range(steps)]), device=envs.device)
    envs.step(actions[0])
    begin, cpu = time.perf_counter(), time.process_time()
    for action in actions:
        envs.step(action)
    rates = [steps * worlds / spent for spent in (time.perf_counter() - begin, time.process_time() - cpu)]
    return [name.removesuffix("-v5"), f"{made:.1f}", *(f"{rate:,.0f}" for rate in rates)]


def main(args):
    check("tasks", args.tasks, TASKS)
    distinct(args, "tasks")
    from_low(1, args, "worlds")
    torch.set_num_threads(1)
    if args.speed:
        print(Table("", SPEED_HEADER, [speed(name, args.worlds) for name in args.tasks]).markdown())
        return
    rows = [row(name, args.worlds) for name in args.tasks]
    if "Humanoid-v5" in args.tasks:
        rows.append(row("Humanoid-v5", args.worlds, ", both with Newton", newton=True))
    if "Ant-v5" in args.tasks:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row("Ant-v5", args.worlds, ", both with elliptic cones", **elliptic("ant.xml", folder)))
    print(Table("", HEADER, rows).markdown())


if __name__ == "__main__":
    main(parse(Args, __doc__))
