"""Instruments that watch a run of a script from outside: `python -m instruments --help`."""
