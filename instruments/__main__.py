"""Run a script, or an edited copy of one, with instruments that show why it does or does not learn.

    python -m instruments --watch-gradients --random-baseline 10 -- leanrl/dqn_torchcompile.py --compile

Flags before the two dashes are the instruments', what follows them is the script with its own flags. Several
instruments work together. doc/debugging.md uses them one after the other.

A finished run is played by `python -m instruments evaluate RUN` (`--help` shows its flags), and a script is trained on
environments with known answers by `python -m instruments probe SCRIPT`.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from instruments import evaluate, probe
from instruments.baseline import RandomBaseline
from instruments.frames import FrameDump
from instruments.gradients import GradientWatch
from instruments.instrument import load, refuse
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


def attach(script, instruments):
    """Let `script.train` call the instruments: before it, once all is made, at each log, and in the end."""
    train = script.train

    def watched(args, on_start=lambda run: None):
        def start(run):
            on_start(run)
            for instrument in instruments:
                instrument.start(run)
            run.log = partial(log, run.log)

        def log(inner, losses):
            for instrument in instruments:
                instrument.log(losses)
            inner(losses)

        for instrument in instruments:
            instrument.prepare(script, args)
        try:
            train(args, on_start=start)
        finally:
            for instrument in instruments:
                if instrument.run:
                    instrument.end()

    script.train = watched


def load_script(argument, name):
    """The module of the script at the path `name`, which was given as `argument`."""
    path = Path(name)
    if not path.is_file() or path.suffix != ".py":
        refuse(f"{argument} {name}: this is no Python file; give the path of a script")
    script = load(path)
    if not hasattr(script, "train") or not hasattr(script, "parse_args"):
        remedy = "give a script of leanrl/ or an edited copy of one"
        refuse(f"{argument} {name}: it has no `train` and `parse_args`; {remedy}")
    return script


def main(words):
    if words[:1] == ["evaluate"]:
        evaluate.main(words[1:])
        return
    if words[:1] == ["probe"]:
        if len(words) == 1:
            refuse("probe: give a script: probe leanrl/dqn.py")
        if words[1] in ("-h", "--help"):
            print(probe.__doc__)
            return
        probe.main(words[1], load_script("probe", words[1]), words[2:])
    at = words.index("--") if "--" in words else len(words)
    own = words[:at]
    others = words[at + 1 :]
    args = tyro.cli(Args, args=own, prog="python -m instruments", description=__doc__)
    if not others:
        refuse("--: give a script behind two dashes: -- leanrl/dqn_torchcompile.py --compile")
    for flag in ("random_baseline", "dump_frames"):
        if getattr(args, flag) < 0:
            refuse(f"--{flag.replace('_', '-')} {getattr(args, flag)}: give a number from 0")
    script = load_script("--", others[0])
    sys.argv = others
    attach(script, chosen(args))
    script.train(script.parse_args())


if __name__ == "__main__":
    main(sys.argv[1:])
