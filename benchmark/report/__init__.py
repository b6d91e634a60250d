"""Tables and figures of what was measured: `python -m benchmark.report --help`."""
