import tyro

from benchmark.studies.tips import before_after

before_after.main(
    tyro.cli(before_after.Args, prog="python -m benchmark.studies.tips", description=before_after.__doc__)
)
