"""Run a script, or an edited copy of one, with instruments that show why it does or does not learn.

    python -m instruments --watch-gradients --random-baseline 10 -- leanrl/dqn_torchcompile.py --compile

Flags before the two dashes are the instruments', what follows them is the script with its own flags. Several
instruments work together. doc/debugging.md uses them one after the other.

A finished run is played by `python -m instruments evaluate RUN` (`--help` shows its flags), and a script is trained on
environments with known answers by `python -m instruments probe SCRIPT`.
"""

import sys
from dataclasses import dataclass

import tyro

from common import scripts
from common.arguments import refuse, stop
from instruments import evaluate, probe
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


def train(script, args, instruments, on_start=lambda run: None):
    """Train, and call the instruments: before it, when everything is made, at each log, and in the end."""

    def start(run):
        on_start(run)
        for instrument in instruments:
            instrument.start(run)
        scripts.before_each_log(run, log)

    def log(losses):
        for instrument in instruments:
            instrument.log(losses)

    for instrument in instruments:
        instrument.prepare(script, args)
    try:
        scripts.train(script, args, start)
    finally:
        for instrument in instruments:
            if instrument.run:
                instrument.end()


def main(words):
    if words[:1] == ["evaluate"]:
        evaluate.main(words[1:])
        return
    if words[:1] == ["probe"]:
        if len(words) == 1:
            stop("probe: give a script: probe leanrl/dqn.py")
        if words[1] in ("-h", "--help"):
            print(probe.__doc__)
            return
        probe.main(words[1], scripts.load_given("probe", words[1]), words[2:])
    at = words.index("--") if "--" in words else len(words)
    own = words[:at]
    others = words[at + 1 :]
    args = tyro.cli(Args, args=own, prog="python -m instruments", description=__doc__)
    if not others:
        stop("--: give a script behind two dashes: -- leanrl/dqn_torchcompile.py --compile")
    for flag in ("random_baseline", "dump_frames"):
        if getattr(args, flag) < 0:
            refuse(flag.replace("_", "-"), getattr(args, flag), "give a number from 0")
    script = scripts.load_given("--", others[0])
    sys.argv = others
    train(script, script.parse_args(), chosen(args))


if __name__ == "__main__":
    main(sys.argv[1:])
