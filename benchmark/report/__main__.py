from benchmark.report import pages
from common.arguments import parse

pages.main(parse(pages.Args, pages.__doc__))
