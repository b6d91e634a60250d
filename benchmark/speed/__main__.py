from benchmark.arguments import parse
from benchmark.speed import matrix

matrix.main(parse(matrix.Args, matrix.__doc__))
