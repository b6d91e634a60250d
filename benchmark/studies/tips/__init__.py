"""Tips for eager code, each timed before and after: `python -m benchmark.studies.tips --help`."""
