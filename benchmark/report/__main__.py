import tyro

from benchmark.report import pages

pages.main(tyro.cli(pages.Args, prog="python -m benchmark.report", description=pages.__doc__))
