"""Code that instruments/, launch/ and benchmark/ share. It imports none of them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
