"""environments/mujoco_warp.py beside gymnasium's environments, and the rules for vector environments."""

import functools
import re
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("mujoco_warp", reason="pip install -r requirements/warp.txt")

from formulas import assert_noticed
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode
from scipy.stats import ks_2samp

from benchmark.studies import mujoco_warp as study
from environments import mujoco_warp
from environments.mujoco_warp import TASKS

WORLDS = 32
TOLERANCES = {  # observations and rewards of the first step; both, of half of the worlds in ten steps
    "HalfCheetah-v5": (5e-4, 5e-5, 1e-3),
    "Hopper-v5": (2e-5, 5e-6, 5e-5),
    "Walker2d-v5": (5e-4, 5e-5, 5e-4),
    "Ant-v5": (5e-3, 5e-4, 5e-3),
    "Humanoid-v5": (5e-3, 5e-5, 1e-3),
    "InvertedPendulum-v5": (5e-6, 0, 5e-6),
    "InvertedDoublePendulum-v5": (5e-6, 5e-6, 5e-6),
}
tasks = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name != "Hopper-v5")) for name in TASKS]
)


@functools.cache
def make(name, worlds=WORLDS):
    """Environments that tests share, since the simulator takes a while to load: reset them first."""
    return gym.make_vec(f"warp/{name}", num_envs=worlds)


def actions(envs, steps, seed=0):
    """Random actions (steps, num_envs, act_dim)."""
    generator = torch.Generator().manual_seed(seed)
    low, high = map(torch.tensor, (envs.single_action_space.low, envs.single_action_space.high))
    return low + (high - low) * torch.rand(steps, *envs.action_space.shape, generator=generator)


def rollout(envs, steps=40, seed=1, change=lambda envs: None):
    """What `steps` random actions after a reset return, each stacked over steps; `change` comes after the reset."""
    obs, _ = envs.reset(seed=seed)
    change(envs)
    found = [envs.step(action) for action in actions(envs, steps)]
    names = ("obs", "rewards", "terminated", "truncated")
    parts = {name: torch.stack([step[i] for step in found]) for i, name in enumerate(names)}
    return parts | {"first": obs, "final_obs": torch.stack([step[4]["final_obs"] for step in found])}


def check_first_step(name, folder, **kwargs):
    """Both simulators agree in the first step, after which no episode ends; returns the differences in all steps.

    With arguments with which they compute the same: MuJoCo Warp does not have Humanoid's solver. Where a steep capsule
    touches the ground, it turns the pyramid that approximates the friction cone.
    """
    comparable = {"newton": True} | (study.elliptic("ant.xml", folder) if name == "Ant-v5" else {})
    found = study.differences(name, WORLDS, **comparable, **kwargs)
    first, rewards, _ = TOLERANCES[name]
    assert np.nanmax(found["obs"][0]) <= first
    assert np.nanmax(found["rewards"][0]) <= rewards
    assert not found["terminated"].any()
    return found


@tasks
def test_steps_are_gymnasiums(name, tmp_path):
    found = check_first_step(name, tmp_path)
    _, _, ten = TOLERANCES[name]
    assert np.median(np.nanmax(found["obs"], (0, 2))) <= ten
    assert np.median(np.nanmax(found["rewards"], 0)) <= ten


@tasks
def test_resets_are_gymnasiums(name):
    """The observations for the same state; and states of the same distribution."""
    envs, reference = make(name), gym.make(name).unwrapped
    qpos, qvel, _ = study.episodes(reference, WORLDS)
    qvel *= 5  # beyond the bounds of observations
    study.place(envs, qpos, qvel)
    got = envs.task.observe(envs)
    for row, *state in zip(got, qpos, qvel, strict=True):
        study.begin(reference, *state)
        np.testing.assert_allclose(row, reference._get_obs(), rtol=1e-4, atol=5e-5)

    states = []
    for _ in range(30):
        envs.reset()
        states.append(torch.cat((envs.qpos, envs.qvel), 1))
    states, wanted = torch.cat(states).numpy(), []
    for _ in range(500):
        reference.reset()
        wanted.append(reference.state_vector())
    for got, column in zip(states.T, np.stack(wanted).T, strict=True):
        assert ks_2samp(got, column).pvalue > 1e-5


@tasks
def test_an_episode_after_an_autoreset_is_like_any_other(name):
    """The same state placed by hand leads to the same observations and rewards."""
    envs, other = make(name), gym.make_vec(f"warp/{name}", num_envs=WORLDS)
    envs.reset(seed=1)
    *first, last = actions(envs, 10)
    for action in first:
        envs.step(action)
    envs.steps[::2] = 999
    obs, *_, infos = envs.step(last)
    ended = infos["_final_obs"]
    assert ended.sum() >= WORLDS // 2
    study.place(other, envs.qpos, envs.qvel)
    torch.testing.assert_close(obs[ended], other.task.observe(other)[ended], rtol=1e-5, atol=1e-6)
    (action,) = actions(envs, 1, seed=1)
    (_, rewards, *_, infos), (_, wanted_rewards, *_, wanted) = envs.step(action), other.step(action)
    torch.testing.assert_close(rewards[ended], wanted_rewards[ended], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(infos["final_obs"][ended], wanted["final_obs"][ended], rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_the_force_at_the_end_of_the_rail_is_clipped():
    """InvertedDoublePendulum observes it; random episodes end before."""
    name = "InvertedDoublePendulum-v5"
    envs, reference = make(name), gym.make(name).unwrapped
    qpos, qvel = np.array([0.9, 0, 0]), np.array([3.0, 0, 0])
    study.begin(reference, qpos, qvel)
    study.place(envs, qpos, qvel)
    wanted, *_ = reference.step(np.zeros(1))
    *_, infos = envs.step(torch.zeros(WORLDS, 1))
    assert wanted[-1] == -10
    np.testing.assert_allclose(infos["final_obs"][0], wanted, rtol=1e-4, atol=1e-4)


def test_same_step_autoreset():
    envs = make("Hopper-v5")
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    envs.reset(seed=1)
    ends = 0
    for action in actions(envs, 40):
        obs, _, terminated, truncated, infos = envs.step(action)
        final_obs, ended = infos["final_obs"], infos["_final_obs"]
        assert torch.equal(ended, terminated) and not truncated.any()
        assert torch.equal(obs[~ended], final_obs[~ended])
        assert ((final_obs[ended, 0] <= 0.7) | (final_obs[ended, 1].abs() >= 0.2)).all()
        assert ((obs[ended, 0] - 1.25).abs() <= 5.1e-3).all() and (obs[ended, 1:].abs() <= 5.1e-3).all()
        assert torch.equal(obs, torch.cat((envs.qpos[:, 1:], envs.qvel.clamp(-10, 10)), 1))
        ends += ended.sum()
    assert ends >= WORLDS / 2


def test_the_time_limit_truncates():
    envs = make("Hopper-v5")
    assert envs.max_episode_steps == envs.spec.max_episode_steps == 1000
    envs.reset(seed=1)
    envs.steps[:4] = 998
    still = torch.zeros(envs.action_space.shape)
    for limit in (False, True, False):
        obs, _, terminated, truncated, infos = envs.step(still)
        assert (truncated[:4] == limit).all()
        assert not terminated.any() and not truncated[4:].any()
        assert (obs[:4] != infos["final_obs"][:4]).any() == limit
    assert envs.steps.tolist() == [1] * 4 + [3] * (WORLDS - 4)


def test_seeds():
    envs = make("Hopper-v5")
    one, same, other = rollout(envs), rollout(envs), rollout(envs, seed=2)
    assert one["terminated"].any()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.isclose(one["first"], other["first"]).all(1).any()
    assert len(one["first"].unique(dim=0)) == WORLDS
    assert not torch.equal(envs.reset()[0], envs.reset()[0])


def test_worlds_do_not_see_each_other():
    def fall(envs):
        envs.qpos[3, 2] = 0.19

    envs = make("Hopper-v5")
    wanted, got = rollout(envs), rollout(envs, change=fall)
    others = torch.arange(WORLDS) != 3
    for name in ("obs", "rewards", "terminated", "final_obs"):
        assert torch.equal(wanted[name][:, others], got[name][:, others])
    assert not torch.isclose(wanted["obs"][:, 3], got["obs"][:, 3]).all(1).any()


def test_reset_mask():
    envs = make("Hopper-v5")
    obs = rollout(envs, 3)["obs"][-1]
    mask = torch.arange(WORLDS) < 5
    got, _ = envs.reset(options={"reset_mask": mask})
    assert torch.equal(got[~mask], obs[~mask])
    assert ((got[mask, 0] - 1.25).abs() <= 5.1e-3).all()
    assert (envs.steps == 0).equal(mask)


DIVERGED = [("qvel", torch.nan), ("qvel", torch.inf), ("qvel", 1e20), ("qvel", 5e10), ("qpos", 1e12)]


@pytest.mark.parametrize(("state", "value"), DIVERGED)
def test_a_world_that_diverges_ends(state, value):
    """In a task without an end of its own; with the last two, one of velocity and position alone is too large."""
    envs = make("HalfCheetah-v5")
    envs.reset(seed=1)
    getattr(envs, state)[3, 1] = value
    still = torch.zeros(envs.action_space.shape)
    obs, rewards, terminated, _, infos = envs.step(still)
    assert terminated.nonzero().tolist() == [[3]]
    assert rewards[3] == 0 and (infos["final_obs"][3] == 0).all()
    for _ in range(3):
        assert obs.isfinite().all() and rewards.isfinite().all()
        obs, rewards, terminated, _, _ = envs.step(still)
        assert not terminated.any()


@pytest.mark.parametrize("name", ["Hopper-v5", "InvertedPendulum-v5"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_action_that_is_not_finite_shows_in_the_reward(name, value):
    """Also where actions cost nothing. Nothing of it is left in the next step."""
    envs = make(name)
    envs.reset(seed=1)
    still, spoilt = torch.zeros(2, *envs.action_space.shape)
    spoilt[3, 0] = value
    _, rewards, *_ = envs.step(spoilt)
    assert rewards.isnan().nonzero().tolist() == [[3]]
    obs, rewards, *_ = envs.step(still)
    assert obs.isfinite().all() and rewards.isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (WORLDS, 1), (3,), (WORLDS, 4)])
def test_actions_of_another_shape_are_refused(shape):
    envs = make("Hopper-v5")
    envs.reset(seed=1)
    before = envs.qpos.clone()
    with pytest.raises(ValueError, match=rf"actions of shape {re.escape(str(shape))}: give \({WORLDS}, 3\)"):
        envs.step(torch.zeros(shape))
    assert torch.equal(envs.qpos, before)


FORCES = ("qacc_warmstart", "qfrc_actuator", "qfrc_constraint", "cfrc_ext")


@tasks
def test_an_episode_begins_without_forces(name):
    """Those of the step before the autoreset are gone where an episode has ended, and stay elsewhere."""
    envs = make(name)
    envs.reset(seed=1)
    *first, last = actions(envs, 12)
    for action in first:
        envs.step(action)
    envs.steps[::2] = 999
    *_, infos = envs.step(last)
    ended = infos["_final_obs"]
    assert ended.any() and not ended.all()
    for part in FORCES:
        forces = getattr(envs, part)
        assert not forces[ended].any() and (forces[~ended].any() or name.startswith("Inverted")), part


HEIGHTS = {"HalfCheetah-v5": -0.5, "Hopper-v5": 0.1, "Walker2d-v5": 0.1, "Ant-v5": 0.15, "Humanoid-v5": 0.15}


def lie_down(envs, height):
    """Put all worlds on the ground, turned at random, their joints anywhere in their ranges."""
    generator = torch.Generator().manual_seed(0)
    envs.reset(seed=1)
    ranges = torch.tensor(envs.reference.model.jnt_range, dtype=torch.float32)
    if len(envs.qpos[0]) > len(envs.qvel[0]):  # a root that is free, with a quaternion
        envs.qpos[:, 2] = height
        turn, joints, (low, high) = envs.qpos[:, 3:7], envs.qpos[:, 7:], ranges[1:].T
        turn.copy_(torch.nn.functional.normalize(torch.randn(turn.shape, generator=generator)))
    else:
        envs.qpos[:, 1] = height
        turn, joints, (low, high) = envs.qpos[:, 2], envs.qpos[:, 3:], ranges[3:].T
        turn.copy_(2 * torch.pi * torch.rand(turn.shape, generator=generator))
    joints.copy_(low + (high - low) * torch.rand(joints.shape, generator=generator))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.thorough] * (n != "Hopper-v5")) for n in HEIGHTS])
def test_there_is_room_for_worlds_on_the_ground(name):
    """For all contacts and constraints of a step, without the resets that end a fall."""
    envs = make(name)
    lie_down(envs, HEIGHTS[name])
    _, data = envs.worlds
    constraints = 0
    for action in actions(envs, 30):
        envs.ctrl.copy_(action)
        envs.launch(envs.simulate)
        assert not data.overflow.numpy().any() and data.nacon.numpy().item() <= data.naconmax
        constraints = max(constraints, data.nefc.numpy().max())
    assert 12 < constraints < data.njmax


def test_tensors_are_the_callers():
    """Whatever has been returned stays as it is."""
    envs = make("Hopper-v5")
    obs, _ = envs.reset(seed=1)
    returned = [obs]
    copies = [obs.clone()]
    for action in actions(envs, 20):
        *tensors, infos = envs.step(action)
        returned += [*tensors, *infos.values()]
        copies += [tensor.clone() for tensor in (*tensors, *infos.values())]
    assert all(map(torch.equal, returned, copies))
    dtypes = [tensor.dtype for tensor in returned[-6:]]
    assert dtypes == [torch.float32, torch.float32, torch.bool, torch.bool, torch.float32, torch.bool]


ARGUMENTS = {
    "HalfCheetah-v5": {"forward_reward_weight": 2.0, "exclude_current_positions_from_observation": False},
    "Ant-v5": {"main_body": "aux_1", "contact_cost_weight": 0.1, "contact_force_range": (-0.5, 0.3)},
    "Humanoid-v5": {"contact_cost_weight": 1e-4, "contact_cost_range": (0.1, 0.5), "terminate_when_unhealthy": False},
    "Hopper-v5": {"healthy_state_range": (-2.0, 2.0), "healthy_z_range": (1.1, 1.3)},
    "InvertedDoublePendulum-v5": {"healthy_reward": 3.0},
}
ARGUMENTS["HalfCheetah-v5"] |= {"frame_skip": 2}
ARGUMENTS["Ant-v5"] |= {"healthy_z_range": (0.4, 0.7), "include_cfrc_ext_in_observation": False, "healthy_reward": 0.5}
ARGUMENTS["Humanoid-v5"] |= dict.fromkeys(
    ("include_cinert_in_observation", "include_qfrc_actuator_in_observation"), False
)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kwargs"), ARGUMENTS.items())
def test_keyword_arguments_are_gymnasiums(name, kwargs, tmp_path):
    check_first_step(name, tmp_path, **kwargs)


FLAGS = [
    pytest.param(name, flag, marks=[pytest.mark.thorough] * (name != "Hopper-v5"))
    for name in TASKS
    for flag, default in mujoco_warp.defaults(load_env_creator(gym.spec(name).entry_point)).items()
    if flag.startswith(("include_", "exclude_"))
]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_parts_of_observations_are_gymnasiums(name, flag):
    """With one flag at a time that is not its default; forces too, which are those of the last step."""
    other = {flag: False}
    envs, reference = gym.make_vec(f"warp/{name}", num_envs=4, **other), gym.make(name, **other).unwrapped
    qpos, qvel, _ = study.episodes(reference, 4)
    study.place(envs, qpos, qvel)
    parts = {"qfrc_actuator": 1.0, "cfrc_ext": 0.5}
    for part, number in parts.items():
        getattr(envs, part).fill_(number)
    got = envs.task.observe(envs)
    assert envs.single_observation_space.shape == got.shape[1:]
    for row, *state in zip(got, qpos, qvel, strict=True):
        study.begin(reference, *state)
        for part, number in parts.items():
            getattr(reference.data, part)[:] = number
        np.testing.assert_allclose(row, reference._get_obs(), rtol=1e-4, atol=5e-5)


def test_an_unknown_keyword_argument():
    with pytest.raises(TypeError, match="healthy_x_range"):
        gym.make_vec("warp/Hopper-v5", num_envs=1, healthy_x_range=(0, 1))


@pytest.mark.parametrize("frame_skip", [0, -1])
def test_a_step_without_a_simulation_is_refused(frame_skip):
    with pytest.raises(ValueError, match=f"frame_skip={frame_skip}: give a number from 1"):
        gym.make_vec("warp/Hopper-v5", num_envs=1, frame_skip=frame_skip)


def test_one_environment_is_gymnasiums():
    """Evaluation therefore uses MuJoCo itself."""
    env = gym.make("environments.mujoco_warp:warp/Hopper-v5")
    assert type(env.unwrapped) is HopperEnv
    assert env.spec.max_episode_steps == 1000


def test_a_picture_shows_the_first_world(monkeypatch):
    envs = make("Hopper-v5")
    envs.reset(seed=1)
    monkeypatch.setattr(envs.reference, "render", envs.reference.state_vector)
    (picture,) = envs.render()
    assert picture.tolist() == torch.cat((envs.qpos[0], envs.qvel[0])).tolist()


# planted bugs


STEPS = (test_steps_are_gymnasiums, "Hopper-v5")
RESETS = (test_resets_are_gymnasiums, "Hopper-v5")
BEGINS_AGAIN = (test_an_episode_after_an_autoreset_is_like_any_other, "Hopper-v5")
FORWARD, NOISE = "env.v5.forward_reward_weight * velocity\n    rewards", "scale * velocities"
LIMIT, RETURNED = "self.steps >= self.max_episode_steps", "return self.obs, rewards"
X = "self.x = torch.where(where, self.task.position(self), self.x)"
CONTACT = "rewards - env.v5.contact_cost_weight * forces.square().sum((1, 2)), terminated"
BEFORE = ("final_obs = self.task.observe(self)", "final_obs = self.obs")
DIVERGES, PART = test_a_world_that_diverges_ends, test_parts_of_observations_are_gymnasiums
FORCELESS, ROOM = (test_an_episode_begins_without_forces, "Humanoid-v5"), test_there_is_room_for_worlds_on_the_ground
BEGIN = "for name in FORCES:"
STATE = "torch.cat((self.qpos, self.qvel), 1).abs()"
IS_FINITE = f"~({STATE} < LARGEST).all(1)"
MASKED = "        final_obs = final_obs.masked_fill(diverged[:, None], 0.0)\n"
PARTS = [f"include_{part}_in_observation" for part in ("cinert", "cvel", "qfrc_actuator")]
SWAPPED = [(PARTS[0], PARTS[1]), (PARTS[1], PARTS[0]), (PARTS[2], PARTS[0])]
ANTS = "if env.v5.include_cfrc_ext_in_observation:\n        parts.append(env.cfrc_ext[:, 1:].clamp"
ANT = ("Ant-v5", "include_cfrc_ext_in_observation")
BUGS = [
    ("the reward has another weight", FORWARD, "2 * velocity\n    rewards", STEPS),
    ("the time limit is one step later", LIMIT, LIMIT.replace(">=", ">"), [test_the_time_limit_truncates]),
    ("a reset returns the last observation", RETURNED, "return final_obs, rewards", [test_same_step_autoreset]),
    ("velocity is from before the reset", X, "pass", BEGINS_AGAIN),
    ("seeds are ignored", "self.generator.manual_seed(seed)", "pass", [test_seeds]),
    ("noise is too large", NOISE, f"2 * {NOISE}", RESETS),
    ("observations are those before the step", *BEFORE, STEPS),
    ("velocities are not clipped", "1), env.qvel.clamp(-10, 10)), 1)", "1), env.qvel), 1)", RESETS),
    ("velocity is since the reset", "        self.x = x\n", "", STEPS),
    ("worlds that diverge go on", "terminated = terminated | diverged", "pass", (DIVERGES, "qvel", torch.nan)),
    ("NaN is no divergence", IS_FINITE, f"({STATE} >= LARGEST).any(1)", (DIVERGES, "qvel", torch.nan)),
    ("positions cannot diverge", STATE, "self.qvel.abs()", (DIVERGES, "qpos", 1e12)),
    ("velocities cannot diverge", STATE, "self.qpos.abs()", (DIVERGES, "qvel", 5e10)),
    ("the last state is observed", MASKED, "", (DIVERGES, "qvel", torch.nan)),
    *((f"{flag} is another's", f"v5.{flag}:", f"v5.{other}:", (PART, "Humanoid-v5", flag)) for flag, other in SWAPPED),
    ("bodies of Ant without forces", ANTS, "if True:\n        parts.append(env.cfrc_ext[:, 1:].clamp", (PART, *ANT)),
    *((f"{name} goes on", BEGIN, BEGIN.replace("FORCES", f"{{*FORCES}} - {{'{name}'}}"), FORCELESS) for name in FORCES),
    ("too little room for constraints", "hopper, room=(12, 64)", "hopper, room=(12, 16)", (ROOM, "Hopper-v5")),
    ("too little room for contacts", "hopper, room=(12, 64)", "hopper, room=(2, 64)", (ROOM, "Hopper-v5")),
    ("too little room for contacts of Humanoid", "room=(48, 128)", "room=(8, 128)", (ROOM, "Humanoid-v5")),
    ("contacts cost nothing", CONTACT, "rewards, terminated", (test_steps_are_gymnasiums, "Ant-v5")),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("bug", "old", "new", "check"), BUGS, ids=[bug[0] for bug in BUGS])
def test_a_planted_bug_is_noticed(bug, old, new, check, tmp_path, monkeypatch):
    """In a copy of the module, which registers its own environments."""
    for name in TASKS:
        monkeypatch.setitem(gym.registry, f"warp/{name}", gym.spec(f"warp/{name}"))
    monkeypatch.setattr(sys.modules[__name__], "make", functools.cache(make.__wrapped__))
    test, *name = check
    folder = [tmp_path] if test is test_steps_are_gymnasiums else []
    errors = (AssertionError, RuntimeError)  # of shapes
    assert_noticed(mujoco_warp, old, new, lambda edited: test(*name, *folder), tmp_path, errors)
