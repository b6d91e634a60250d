"""Play whole episodes with the deterministic policy of a run; print mean and standard deviation of the return.

    python -m instruments evaluate runs/RUN --episodes 10

This needs policy.pt2 and config.json in the run's folder, but neither the script nor its flags. Loading a policy.pt2
and importing an environment can execute code: evaluate only runs that you trust.
"""

import json
import logging
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from tqdm import tqdm

from common.arguments import check_seeds, from_low, note, one_line, parse, stop
from common.scripts import load
from instruments.playing import MAX_STEPS, acting, make_env, play, record


@dataclass
class Args:
    run: tyro.conf.Positional[Path]
    """folder of a run, or a file in it"""
    episodes: int = 10
    """episodes to play"""
    seed: int = 1
    """seed of the environment"""
    max_steps: int = MAX_STEPS
    """maximum steps of an episode, which is cut there"""
    video: bool = False
    """record each episode: <run>/videos/evaluation-episode-<n>.mp4"""


def check(args):
    """Refuse numbers that are out of range."""
    from_low(1, args, "episodes", "max_steps")
    check_seeds(args, "seed")


def read_env_id(run, folder):
    """The name of the environment in the run's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        stop(f"RUN {run}: there is no {path}; give the folder of a run")
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["env_id"])
    except (ValueError, KeyError, TypeError) as error:
        stop(f"RUN {run}: {path} is damaged ({one_line(error)}); give the folder of another run")


def load_policy(run, path):
    """Load the module in a policy.pt2 and its example inputs."""
    if not path.is_file():
        stop(f"RUN {run}: there is no {path}; a run writes it with every checkpoint")
    logging.getLogger("torch.export").setLevel(logging.CRITICAL)  # it logs a traceback as well
    try:
        program = torch.export.load(path)
        inputs, _ = program.example_inputs
        return program.module(), inputs
    except Exception as error:
        stop(f"RUN {run}: {path} cannot be read ({one_line(error)}); give a run whose policy.pt2 is intact")


def find_env(run, folder, env_id, seed, render_mode):
    """Make the run's environment. If gymnasium and envpool lack it, the run's copy of the script may register it.

    Errors raised by a user's environment become one line.
    """
    module, _, _ = env_id.rpartition(":")
    if module:
        note(f"imports the module {module}, as {env_id} says, the environment of the run")
    try:
        try:
            return make_env(env_id, seed, render_mode)
        except gym.error.UnregisteredEnv:
            for script in sorted(folder.glob("*.py")):
                note(f"imports {script}, which may register {env_id}")
                load(script)
            return make_env(env_id, seed, render_mode)
    except gym.error.UnregisteredEnv:
        remedy = f"pip install envpool if it is an Atari game, or name it MODULE:{env_id} in config.json"
        stop(f"RUN {run}: neither gymnasium nor envpool has its environment {env_id}; {remedy}")
    except (Exception, SystemExit) as error:
        if render_mode:
            stop(f"--video: {env_id} cannot be made to render ({one_line(error)}); leave it out")
        stop(f"RUN {run}: {env_id} cannot be made ({one_line(error)}); install or correct what it needs")


def try_policy(run, act, env, env_id):
    """Refuse a policy whose observations or actions do not fit the environment."""
    space = env.observation_space
    remedy = "register the environment with all of its wrappers under an id of its own"
    try:
        mask = np.ones(gym.spaces.flatdim(env.action_space), bool)  # allows all; most policies take none
        action = act(np.zeros(space.shape, space.dtype), begins=True, mask=mask)
    except Exception as error:
        given = f"{space.dtype} {space.shape}"
        stop(f"RUN {run}: its policy does not fit {env_id}'s observations, {given} ({one_line(error)}); {remedy}")
    if not env.action_space.contains(action):
        stop(f"RUN {run}: its policy gives {action}, which is not in {env_id}'s {env.action_space}; {remedy}")


def evaluate(env, act, args, played):
    """Play episodes, and append each to `played`."""
    with tqdm(unit=" steps", dynamic_ncols=True) as bar:

        def act_and_count(obs, begins, mask):
            if np.isnan(obs).any():
                raise SystemExit(f"error: episode {len(played) + 1}: an observation is NaN; correct the environment")
            bar.update()
            return act(obs, begins, mask)

        episodes = islice(play(env, act_and_count, args.seed, args.max_steps), args.episodes)
        bar.set_description_str(f"episode 1 of {args.episodes}")
        for episode in episodes:
            played.append(episode)
            bar.set_postfix({"return": f"{episode.total:.2f}"}, refresh=False)
            bar.set_description_str(f"episode {min(len(played) + 1, args.episodes)} of {args.episodes}")


def report(played, args):
    """Print the returns of the episodes, all or those before an early end."""
    cut = sum(not episode.ended for episode in played)
    if cut:
        note(f"{cut} of {len(played)} episodes did not end and were cut after {args.max_steps} steps (--max-steps)")
    if played:
        returns = [episode.total for episode in played]
        mean, deviation = np.mean(returns), np.std(returns)
        print(f"{len(played)} episodes: mean return {mean:.2f}, standard deviation {deviation:.2f}")
    if len(played) < args.episodes:
        note(f"stopped after {len(played)} of {args.episodes} episodes")


def close(env, env_id):
    """Close an environment; an error in that does not change what it has earned."""
    try:
        env.close()
    except (Exception, SystemExit) as error:
        note(f"{env_id} cannot be closed ({one_line(error)})")


def main(words):
    args = parse(Args, __doc__, words, "instruments evaluate")
    check(args)
    if not args.run.exists():
        stop(f"RUN {args.run}: there is no such folder; give the folder of a run")
    folder = args.run if args.run.is_dir() else args.run.parent
    env_id = read_env_id(args.run, folder)
    policy, inputs = load_policy(args.run, args.run if args.run.suffix == ".pt2" else folder / "policy.pt2")
    env = find_env(args.run, folder, env_id, args.seed, "rgb_array" if args.video else None)
    act = acting(policy, env.action_space, inputs)
    try_policy(args.run, act, env, env_id)
    if args.video:
        try:
            env = record(env, folder / "videos", "evaluation")
        except Exception as error:  # renderers may raise anything
            remedy = "leave it out, or try MUJOCO_GL=egl where there is no display"
            stop(f"--video: {env_id} cannot be recorded ({one_line(error)}); {remedy}")
    played = []
    try:
        evaluate(env, act, args, played)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        report(played, args)
        close(env, env_id)
