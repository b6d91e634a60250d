import tyro

from benchmark.speed import matrix

matrix.main(tyro.cli(matrix.Args, prog="python -m benchmark.speed", description=matrix.__doc__))
