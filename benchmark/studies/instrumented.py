"""speed/interleaved.py with instruments; the first argument holds their flags.

    python -m benchmark.studies.instrumented "--watch-gradients" sac_continuous_action_torchcompile --compile

instrument_overhead.py starts this.
"""

import sys
from functools import partial

import tyro

from benchmark.speed import interleaved
from instruments import __main__ as command

if __name__ == "__main__":
    words, *rest = sys.argv[1:]
    instruments = command.chosen(tyro.cli(command.Args, args=words.split()))
    interleaved.main(*rest, train=partial(command.train, instruments=instruments))
