"""Run a script, or an edited copy of one, with instruments that show why it does or does not learn.

    python -m instruments --watch-gradients --random-baseline 10 -- leanrl/dqn_torchcompile.py --compile

What stands before the two dashes is for the instruments, what follows them is the script with its own flags. Several
instruments work together. doc/debugging.md uses them one after the other.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from instruments.baseline import RandomBaseline
from instruments.frames import FrameDump
from instruments.gradients import GradientWatch
from instruments.profiler import Profile
from instruments.videos import VideoOnDemand


@dataclass
class Args:
    watch_gradients: bool = False
    """log norms and histograms of each layer's gradients and weights; warn of layers that get no gradient; stop where
    gradients explode or are no longer finite"""
    random_baseline: int = 0
    """play so many episodes with uniformly random actions before training, and show their mean return"""
    dump_frames: int = 0
    """every so many environment steps, draw what an Atari policy sees: <run>/frames/<step>.png"""
    watch: bool = False
    """record a video of one episode whenever somebody does `touch <run>/watch`"""
    profile: bool = False
    """write a trace of 20 steady steps, <run>/trace.json, and print what took the time"""


def chosen(args):
    """The instruments that the arguments ask for."""
    instruments = []
    if args.dump_frames:
        instruments.append(FrameDump(args.dump_frames))
    if args.random_baseline:
        instruments.append(RandomBaseline(args.random_baseline))
    if args.watch_gradients:
        instruments.append(GradientWatch())
    if args.watch:
        instruments.append(VideoOnDemand())
    if args.profile:
        instruments.append(Profile())
    return instruments


def load(path):
    """The module of the script at `path`, which finds what lies beside it, as a program does."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def attach(script, instruments):
    """Let `script.train` call the instruments: when it begins, once all is made, at each log, and in the end."""
    train = script.train

    def on_start(run):
        for instrument in instruments:
            instrument.start(run)

    def watched(args, on_log=lambda learner, losses, step: None):
        def log(learner, losses, step):
            for instrument in instruments:
                instrument.log(losses)
            on_log(learner, losses, step)

        script.check_args(args)
        for instrument in instruments:
            instrument.prepare(script, args)
        try:
            train(args, log, on_start)
        finally:
            for instrument in instruments:
                if instrument.run:
                    instrument.end()

    script.train = watched


def refuse(text):
    """End the program with exit code 2 and one line."""
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def main(words):
    at = words.index("--") if "--" in words else len(words)
    own = words[:at]
    others = words[at + 1 :]
    args = tyro.cli(Args, args=own, prog="python -m instruments", description=__doc__)
    if not others:
        refuse("--: give a script behind two dashes: -- leanrl/dqn_torchcompile.py --compile")
    for flag in ("random_baseline", "dump_frames"):
        if getattr(args, flag) < 0:
            refuse(f"--{flag.replace('_', '-')} {getattr(args, flag)}: give a number from 0")
    name = others[0]
    path = Path(name)
    if not path.is_file() or path.suffix != ".py":
        refuse(f"-- {name}: this is no Python file; give the path of a script")
    script = load(path)
    if not hasattr(script, "train") or not hasattr(script, "main"):
        refuse(f"-- {name}: it has no `train` and `main`; give a script of leanrl/ or an edited copy of one")
    for flag in ("--evaluate", "--export"):
        if any(word.split("=")[0] == flag for word in others):
            refuse(f"{flag}: instruments watch training; leave them or this out")
    attach(script, chosen(args))
    sys.argv = others
    script.main()


if __name__ == "__main__":
    main(sys.argv[1:])
