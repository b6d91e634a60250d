"""Code that instruments/, launch/ and benchmark/ share. It imports none of them."""

import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a locale without ± prints a table all the same
