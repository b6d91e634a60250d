"""gymnasium's MuJoCo tasks (v5) on MuJoCo Warp: N worlds in one simulation, stepped as tensors on one device.

    pip install -r requirements/warp.txt -c requirements/constraints.txt
    export PYTHONPATH=.
    python leanrl/ppo_gpu_envs_torchcompile.py --env-id environments.mujoco_warp:warp/HalfCheetah-v5 --num-envs 4096

`warp/HalfCheetah-v5`, and likewise Hopper, Walker2d, Ant, Humanoid, InvertedPendulum and InvertedDoublePendulum, are
vector environments. Observations, rewards, terminations, resets and the time limit are those of the task without
`warp/`, and so are the keyword arguments. These are the differences:

- Everything is a tensor on the device (the GPU if there is one), float32 or bool. A step does not wait for the device.
- Humanoid's solver is Newton, since MuJoCo Warp does not have PGS.
- A world whose state becomes NaN or exceeds 1e10 ends its episode. MuJoCo would put it back to its initial state.
- The reward for an action that is NaN or infinite is NaN in all tasks.
- Infos hold `final_obs`, the last observations of the episodes that ended. They do not hold the parts of the reward.

A step replays a graph of `frame_skip` steps of the simulator, recorded by Warp, on a CPU as on CUDA. All of this ran on
a CPU. It has not run on a GPU.

`gym.make("warp/HalfCheetah-v5")` makes gymnasium's own environment, so that a policy is evaluated in MuJoCo itself.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

wp.config.log_level = wp.LOG_WARNING  # otherwise a line for each of 40 kernels
LARGEST = 1e10  # MuJoCo's mjMAXVAL
STATE = ("qpos", "qvel", "ctrl", "xpos", "xipos", "site_xpos", "cinert", "cvel")
FORCES = ("qacc_warmstart", "qfrc_actuator", "qfrc_constraint", "cfrc_ext")  # zero at the beginning of an episode


class MujocoWarp(gym.vector.VectorEnv):
    """`num_envs` worlds of a task, with SAME_STEP autoreset. `kwargs` are those of gymnasium's class."""

    def __init__(self, name, num_envs, max_episode_steps, device=None, **kwargs):
        if kwargs.get("frame_skip", 1) < 1:
            raise ValueError(f"frame_skip={kwargs['frame_skip']}: give a number from 1")
        self.task, self.num_envs, self.max_episode_steps = TASKS[name], num_envs, max_episode_steps
        self.device = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        environment = load_env_creator(gym.spec(name).entry_point)
        self.reference = environment(**kwargs)  # gymnasium's: it has the model, the spaces, and the renderer
        self.v5 = SimpleNamespace(**defaults(environment) | kwargs)
        self.render_mode = self.reference.render_mode
        self.metadata = self.reference.metadata | {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, self.reference.observation_space.shape)
        self.single_action_space = self.reference.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        with wp.ScopedDevice(str(self.device)):
            self.make_worlds()

        model = self.reference.model
        self.init_qpos, self.init_qvel, self.masses = (
            torch.tensor(array, dtype=torch.float32, device=self.device)
            for array in (self.reference.init_qpos, self.reference.init_qvel, model.body_mass)
        )
        self.main_body = model.body(getattr(self.v5, "main_body", 1)).id
        self.x = torch.zeros(num_envs, device=self.device)  # the task's `position` after the last step
        self.obs = torch.zeros(self.observation_space.shape, device=self.device)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.generator = torch.Generator(self.device)
        self.generator.seed()

    def make_worlds(self):
        """Put the worlds on the device, as torch tensors that share memory with Warp, and record the two graphs."""
        model = self.reference.model
        if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        contacts, constraints = self.task.room
        m = mjw.put_model(model)
        d = mjw.make_data(model, self.num_envs, nconmax=contacts, njmax=constraints)
        for name in STATE + FORCES:
            setattr(self, name, wp.to_torch(getattr(d, name)))

        def simulate():
            for _ in range(self.reference.frame_skip):
                mjw.step(m, d)
            mjw.rne_postconstraint(m, d)  # cfrc_ext

        def place():
            mjw.kinematics(m, d)
            mjw.com_pos(m, d)  # cinert
            mjw.com_vel(m, d)  # cvel

        self.simulate, self.place = record(simulate), record(place)
        self.worlds = m, d  # the graphs read and write their arrays
        wp.synchronize()  # torch's stream is another one

    def launch(self, graph):
        """Replay a graph on torch's current stream."""
        stream = wp.stream_from_torch(self.device) if self.device.type == "cuda" else None
        wp.capture_launch(graph, stream)

    def reset(self, *, seed=None, options=None):
        """Begin an episode in the worlds of `options["reset_mask"]`, by default in all."""
        if seed is not None:
            self.generator.manual_seed(seed)
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.begin((options or {}).get("reset_mask", everywhere))
        return self.obs, {}

    def step(self, actions):
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions of shape {tuple(actions.shape)}: give {self.action_space.shape}")
        self.ctrl.copy_(actions)
        self.launch(self.simulate)
        self.steps += 1
        x = self.task.position(self)
        velocity = (x - self.x) / self.reference.dt
        self.x = x

        final_obs = self.task.observe(self)
        rewards, terminated = self.task.outcome(self, actions, velocity)
        diverged = ~(torch.cat((self.qpos, self.qvel), 1).abs() < LARGEST).all(1)  # also if NaN
        final_obs = final_obs.masked_fill(diverged[:, None], 0.0)
        rewards = rewards.masked_fill(diverged, 0.0) + 0 * actions.sum(1)  # NaN after an action that is not finite
        terminated = terminated | diverged
        truncated = self.steps >= self.max_episode_steps

        ended = terminated | truncated
        self.obs = final_obs
        self.begin(ended)
        return self.obs, rewards, terminated, truncated, {"final_obs": final_obs, "_final_obs": ended}

    def begin(self, where):
        """Begin an episode in the worlds for which `where` (num_envs,) is true."""
        scale, rows = self.v5.reset_noise_scale, where[:, None]
        positions = torch.empty_like(self.qpos).uniform_(-1, 1, generator=self.generator)
        velocities = torch.empty_like(self.qvel)
        if self.task.normal_velocities:
            velocities.normal_(generator=self.generator)
        else:
            velocities.uniform_(-1, 1, generator=self.generator)
        self.qpos.copy_(torch.where(rows, self.init_qpos + scale * positions, self.qpos))
        self.qvel.copy_(torch.where(rows, self.init_qvel + scale * velocities, self.qvel))
        for name in FORCES:
            forces = getattr(self, name)
            forces.copy_(forces.masked_fill(where.view(-1, *[1] * (forces.ndim - 1)), 0.0))
        self.steps.masked_fill_(where, 0)
        self.launch(self.place)
        self.x = torch.where(where, self.task.position(self), self.x)
        self.obs = torch.where(rows, self.task.observe(self), self.obs)

    def render(self):
        """A picture of the first world, by gymnasium's renderer."""
        self.reference.set_state(self.qpos[0].cpu().numpy(), self.qvel[0].cpu().numpy())
        return (self.reference.render(),)


def record(function):
    """A graph of the kernels that `function` launches."""
    function()  # compiles them
    with wp.ScopedCapture() as capture:
        function()
    return capture.graph


def defaults(environment):
    """The keyword arguments of gymnasium's class with their default values."""
    parameters = inspect.signature(environment.__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


# Positions, of which the velocity in the reward is the difference


def root(env):
    return env.qpos[:, 0].clone()


def main_body(env):
    return env.xpos[:, env.main_body, 0].clone()


def mass_center(env):
    return (env.xipos[:, :, 0] * env.masses).sum(1) / env.masses.sum()


# Observations


def positions(env, coordinates):
    """The positions of the joints, without the first `coordinates`, as v5 does by default."""
    return env.qpos[:, coordinates * env.v5.exclude_current_positions_from_observation :]


def observe_cheetah(env):
    return torch.cat((positions(env, 1), env.qvel), 1)


def observe_walker(env):
    return torch.cat((positions(env, 1), env.qvel.clamp(-10, 10)), 1)


def observe_ant(env):
    parts = [positions(env, 2), env.qvel]
    if env.v5.include_cfrc_ext_in_observation:
        parts.append(env.cfrc_ext[:, 1:].clamp(*env.v5.contact_force_range).flatten(1))
    return torch.cat(parts, 1)


def observe_humanoid(env):
    parts = [positions(env, 2), env.qvel]
    if env.v5.include_cinert_in_observation:
        parts.append(env.cinert[:, 1:].flatten(1))
    if env.v5.include_cvel_in_observation:
        parts.append(env.cvel[:, 1:].flatten(1))
    if env.v5.include_qfrc_actuator_in_observation:
        parts.append(env.qfrc_actuator[:, 6:])
    if env.v5.include_cfrc_ext_in_observation:
        parts.append(env.cfrc_ext[:, 1:].flatten(1))
    return torch.cat(parts, 1)


def observe_pendulum(env):
    return torch.cat((env.qpos, env.qvel), 1)


def observe_double_pendulum(env):
    angles = env.qpos[:, 1:]
    limit = env.qfrc_constraint[:, :1]
    parts = (env.qpos[:, :1], angles.sin(), angles.cos(), env.qvel.clamp(-10, 10), limit.clamp(-10, 10))
    return torch.cat(parts, 1)


# Outcomes: rewards and terminated


def inside(x, limits):
    return (limits[0] < x) & (x < limits[1])


def control_cost(env, actions):
    return env.v5.ctrl_cost_weight * actions.square().sum(1)


def cheetah(env, actions, velocity):
    rewards = env.v5.forward_reward_weight * velocity - control_cost(env, actions)
    return rewards, torch.zeros_like(rewards, dtype=torch.bool)


def while_healthy(env, actions, velocity, healthy):
    """Forward and healthy rewards minus the cost of control. Unhealthy worlds terminate."""
    forward = env.v5.forward_reward_weight * velocity
    rewards = forward + env.v5.healthy_reward * healthy - control_cost(env, actions)
    return rewards, ~healthy & env.v5.terminate_when_unhealthy


def walker(env, actions, velocity):
    healthy = inside(env.qpos[:, 1], env.v5.healthy_z_range) & inside(env.qpos[:, 2], env.v5.healthy_angle_range)
    return while_healthy(env, actions, velocity, healthy)


def hopper(env, actions, velocity):
    healthy = inside(env.qpos[:, 1], env.v5.healthy_z_range) & inside(env.qpos[:, 2], env.v5.healthy_angle_range)
    state = torch.cat((env.qpos[:, 2:], env.qvel), 1)
    healthy = healthy & inside(state, env.v5.healthy_state_range).all(1)
    return while_healthy(env, actions, velocity, healthy)


def ant(env, actions, velocity):
    low, high = env.v5.healthy_z_range
    healthy = (low <= env.qpos[:, 2]) & (env.qpos[:, 2] <= high)
    rewards, terminated = while_healthy(env, actions, velocity, healthy)
    forces = env.cfrc_ext.clamp(*env.v5.contact_force_range)
    return rewards - env.v5.contact_cost_weight * forces.square().sum((1, 2)), terminated


def humanoid(env, actions, velocity):
    healthy = inside(env.qpos[:, 2], env.v5.healthy_z_range)
    rewards, terminated = while_healthy(env, actions, velocity, healthy)
    cost = env.v5.contact_cost_weight * env.cfrc_ext.square().sum((1, 2))
    return rewards - cost.clamp(*env.v5.contact_cost_range), terminated


def pendulum(env, actions, velocity):
    upright = env.qpos[:, 1].abs() <= 0.2
    return upright.float(), ~upright


def double_pendulum(env, actions, velocity):
    x, y = env.site_xpos[:, 0, 0], env.site_xpos[:, 0, 2]
    upright = y > 1
    distance = 0.01 * x.square() + (y - 2).square()
    speed = 1e-3 * env.qvel[:, 1].square() + 5e-3 * env.qvel[:, 2].square()
    return env.v5.healthy_reward * upright - distance - speed, ~upright


@dataclass(frozen=True)
class Task:
    observe: Callable
    outcome: Callable
    position: Callable = root
    normal_velocities: bool = False  # at the beginning of an episode; otherwise uniform
    room: tuple[int, int] = (1, 8)  # for contacts and for rows of constraints, per world


TASKS = {
    "HalfCheetah-v5": Task(observe_cheetah, cheetah, normal_velocities=True, room=(16, 72)),
    "Hopper-v5": Task(observe_walker, hopper, room=(12, 64)),
    "Walker2d-v5": Task(observe_walker, walker, room=(16, 64)),
    "Ant-v5": Task(observe_ant, ant, main_body, normal_velocities=True, room=(32, 112)),
    "Humanoid-v5": Task(observe_humanoid, humanoid, mass_center, room=(48, 128)),
    "InvertedPendulum-v5": Task(observe_pendulum, pendulum),
    "InvertedDoublePendulum-v5": Task(observe_double_pendulum, double_pendulum, normal_velocities=True),
}
for name in TASKS:
    spec = gym.spec(name)
    gym.register(
        f"warp/{name}",
        entry_point=spec.entry_point,
        vector_entry_point=partial(MujocoWarp, name),
        max_episode_steps=spec.max_episode_steps,
        reward_threshold=spec.reward_threshold,
    )
