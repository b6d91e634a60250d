from benchmark.arguments import parse
from benchmark.report import pages

pages.main(parse(pages.Args, pages.__doc__))
