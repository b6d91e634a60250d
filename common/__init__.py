"""What instruments/, launch/ and benchmark/ share. Nothing here imports them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
