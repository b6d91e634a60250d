"""turns.py with instruments: the first word has their flags.

    python benchmark/watched.py "--watch-gradients" sac_continuous_action_torchcompile --compile

overhead.py starts it.
"""

import sys
from functools import partial
from pathlib import Path

import turns
import tyro

sys.path.append(str(Path(__file__).resolve().parent.parent))
from instruments import __main__ as command

if __name__ == "__main__":
    words, *rest = sys.argv[1:]
    instruments = command.chosen(tyro.cli(command.Args, args=words.split()))
    turns.main(*rest, attach=partial(command.attach, instruments=instruments))
