"""Measures the scripts: speed/ whole runs, studies/ single questions, report/ the tables and figures of both."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
