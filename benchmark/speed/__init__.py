"""The speed of whole runs: `python -m benchmark.speed --help`."""
