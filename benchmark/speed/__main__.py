from benchmark.speed import matrix
from common.arguments import parse

matrix.main(parse(matrix.Args, matrix.__doc__))
