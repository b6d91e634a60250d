"""Studies of one question each, such as `python -m benchmark.studies.scaling --help`."""
