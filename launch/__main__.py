"""Many runs of a script, on this machine or on a Ray cluster.

    python -m launch run SCRIPT --seeds 1 2 3 -- FLAGS     # seeds, environments and grids
    python -m launch tune SCRIPT --space SPACE.toml        # search for hyper-parameters

Each has --help. They need requirements/launch.txt.
"""

import importlib
import sys

from common.arguments import stop
from common.processes import end_as_at_ctrl_c

COMMANDS = ("run", "tune")


def main(words):
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return
    if words[0] not in COMMANDS:
        stop(f"python -m launch {words[0]}: choose from {', '.join(COMMANDS)}")
    try:
        command = importlib.import_module(f"launch.{words[0]}")
    except ImportError as error:
        stop(f"python -m launch: pip install -r requirements/launch.txt ({error})")
    command.main(words[1:])


if __name__ == "__main__":
    end_as_at_ctrl_c()
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        raise SystemExit(130) from None
