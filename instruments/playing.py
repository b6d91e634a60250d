"""Whole episodes in one environment, for evaluation, videos and the random baseline."""

import contextlib
import importlib
import warnings
from dataclasses import dataclass
from itertools import islice

import gymnasium as gym
import numpy as np
import torch

MAX_STEPS = 100_000  # of an episode; envpool ends a game after 27,000
VIDEO_BYTES = 2e9  # of an episode's frames, kept in memory until it ends


@dataclass
class Episode:
    total: float
    """sum of rewards"""
    ended: bool
    """False if cut after the maximum number of steps"""


@contextlib.contextmanager
def without_exit():
    """Turn an environment's sys.exit into an error: the program would end as if it were done."""
    try:
        yield
    except SystemExit as end:
        raise RuntimeError(f"the environment ended the program with sys.exit({end.code})") from end


def play(env, act, seed, max_steps=MAX_STEPS):
    """Play episodes one after another, endlessly; yields each as an Episode.

    `act` maps an observation of `env`, whether it begins an episode, and the action mask in its info, or None, to an
    action. `seed` seeds the first episode.
    """
    with without_exit():
        obs, info = env.reset(seed=seed)
    while True:
        total = 0.0
        for t in range(max_steps):
            action = act(obs, t == 0, info.get("action_mask"))
            with without_exit():
                obs, reward, terminated, truncated, info = env.step(action)
            total += float(reward)
            ended = bool(terminated or truncated)
            if ended:
                break
        yield Episode(total, ended)
        with without_exit():
            obs, info = env.reset()


def random_returns(env_id, seed, episodes):
    """Returns of a uniform random policy, over allowed actions, in the first `episodes` episodes of an environment."""
    env = make_env(env_id, seed)
    space = env.action_space
    space.seed(seed)

    def act(obs, begins, mask):
        if mask is None:
            return space.sample()
        mask = flat_mask(mask).astype(np.int8)
        if isinstance(space, gym.spaces.MultiDiscrete):
            mask = tuple(np.split(mask, np.cumsum(space.nvec)[:-1]))
        return space.sample(mask=mask)

    played = islice(play(env, act, seed), episodes)
    returns = [episode.total for episode in played]
    env.close()
    return returns


def flat_mask(mask):
    """An action mask as one array of bool; that of a MultiDiscrete action may be a tuple of arrays."""
    return np.concatenate(mask).astype(bool) if isinstance(mask, tuple) else np.asarray(mask, bool)


def acting(policy, space, inputs):
    """The function `act` for `play`, from a policy module that maps (batch, ...) to actions in the space `space`.

    `inputs` are example inputs of the module: observations, and action masks (bool) or, if it has memory, a state. A
    policy with memory returns actions and the next state. An episode begins with a state of 0.
    """
    example, *others = inputs
    masked = any(other.dtype == torch.bool for other in others)
    first_state = [] if masked else [torch.zeros_like(state[:1]) for state in others]
    state = first_state

    def act(obs, begins, mask=None):
        nonlocal state
        if begins:
            state = first_state
        batch = [torch.from_numpy(np.array([obs], example.numpy().dtype))]  # of lists and any strides and byte order
        if masked:
            if mask is None:
                raise ValueError("the policy needs an action mask, and the environment's info has none")
            batch.append(torch.from_numpy(flat_mask(mask)[None]))
        with torch.no_grad():
            outputs = policy(*batch, *state)
        actions, *state = outputs if isinstance(outputs, tuple) else (outputs,)
        action = actions.numpy()[0]
        if isinstance(space, gym.spaces.Box):
            action = action.clip(space.low, space.high)
        return action.astype(space.dtype)

    return act


def is_atari(env_id):
    """Whether this is an Atari game of envpool and not an environment of gymnasium."""
    try:
        from envpool.registration import registry
    except ImportError:
        return False
    module, *_ = registry.specs.get(env_id, (None,))
    return module == "envpool.atari" and env_id not in gym.registry


def make_env(env_id, seed, render_mode=None):
    """Make one environment for whole episodes. Composite observations are flattened to vectors."""
    if is_atari(env_id):
        return AtariGame(env_id, seed, render_mode)
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    if name in gym.registry and gym.registry[name].entry_point is None:
        return OneWorld(env_id)
    settings = {"render_mode": render_mode} if render_mode else {}
    if render_mode and "gymnasium.envs.mujoco" in str(gym.spec(env_id).entry_point):
        settings["camera_name"] = "track"  # follows the body, where the model has such a camera
    env = gym.make(env_id, **settings)
    if not isinstance(env.observation_space, gym.spaces.Box):
        with contextlib.suppress(NotImplementedError):  # of a user's own space
            env = gym.wrappers.FlattenObservation(env)
    if not isinstance(env.observation_space, gym.spaces.Box):
        raise ValueError(f"its observations cannot be flattened to a vector: {env.observation_space}")
    return env


class OneWorld(gym.Env):
    """One world of a vector environment, whose arrays may be tensors. The observations are those of the policy."""

    def __init__(self, env_id):
        self.envs = gym.make_vec(env_id, num_envs=1)
        space = self.envs.single_observation_space
        self.observation_space = space["policy"] if isinstance(space, gym.spaces.Dict) else space
        self.action_space = self.envs.single_action_space

    def world(self, obs):
        """The world's observation, in NumPy."""
        self.obs = obs["policy"] if isinstance(obs, dict) else obs
        return np.asarray(self.obs.cpu() if torch.is_tensor(self.obs) else self.obs)[0]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, infos = self.envs.reset(seed=seed)
        return self.world(obs), infos

    def step(self, action):
        """The observation after the end of an episode may be that of the next one."""
        actions = action[None]
        if torch.is_tensor(self.obs):
            actions = torch.from_numpy(actions).to(self.obs.device)
        obs, rewards, terminated, truncated, infos = self.envs.step(actions)
        return self.world(obs), float(rewards[0]), bool(terminated[0]), bool(truncated[0]), infos


class AtariGame(gym.Env):
    """One Atari game in envpool. An episode is a whole game with its raw rewards."""

    def __init__(self, env_id, seed, render_mode=None):
        import envpool

        settings = {"episodic_life": False, "reward_clip": False, "render_mode": render_mode}
        seed %= 2**31  # envpool's limit
        self.pool = envpool.make(env_id, env_type="gymnasium", num_envs=1, seed=seed, **settings)
        self.observation_space = self.pool.observation_space
        self.action_space = self.pool.action_space
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def reset(self, *, seed=None, options=None):
        """`seed` is ignored: envpool takes it in `__init__`."""
        super().reset(seed=seed)
        obs, _ = self.pool.reset()
        return obs[0], {}

    def step(self, action):
        obs, rewards, terminated, truncated, _ = self.pool.step(np.array([action], np.int32))
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self):
        """The screen in color, (height, width, 3)."""
        return self.pool.render(env_ids=np.zeros(1, np.int32))[0]


def record(env, folder, name):
    """Wrap `env` (render_mode="rgb_array") to record each episode as <folder>/<name>-episode-<n>.mp4."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missing window system raises as well; older videos may be replaced
        env.reset()
        frame = env.render()
        if not isinstance(frame, np.ndarray):
            raise ValueError(f"its render() returns {type(frame).__name__}, not an image")
        length = int(VIDEO_BYTES // frame.nbytes)
        return gym.wrappers.RecordVideo(env, str(folder), lambda episode: True, video_length=length, name_prefix=name)
