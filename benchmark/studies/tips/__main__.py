from benchmark.arguments import parse
from benchmark.studies.tips import before_after

before_after.main(parse(before_after.Args, before_after.__doc__))
