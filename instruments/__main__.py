"""Run a script, or an edited copy, with instruments that help to find out why it does or does not learn.

    python -m instruments --watch-gradients --random-baseline 10 -- leanrl/dqn_torchcompile.py --compile

Flags of instruments go before the two dashes, the script and its own flags after them. Instruments can be combined.
doc/debugging.md introduces each of them.

`python -m instruments evaluate RUN` plays episodes with a finished run (`--help` shows its flags), and
`python -m instruments probe SCRIPT` trains a script on environments with known answers.
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
    """log norms and histograms of each layer's gradients and weights; warn about layers without a gradient; stop when
    gradients explode or are not finite"""
    random_baseline: int = 0
    """number of episodes to play with random actions before training, to show their mean return"""
    dump_frames: int = 0
    """draw the input of an Atari policy every N environment steps: <run>/frames/<step>.png"""
    watch: bool = False
    """record a video of one episode whenever you run `touch <run>/watch`"""
    profile: bool = False
    """write a trace of 20 steps in steady state, <run>/trace.json, and print the most expensive operators"""


def chosen(args):
    """The requested instruments."""
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
    """Train, and call the instruments before it, after setup, at each log, and at the end."""

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
