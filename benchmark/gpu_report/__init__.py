"""First numbers from a GPU, in minutes. See __main__.py."""

from benchmark.gpu_report.measure import card
from benchmark.gpu_report.tables import cell

__all__ = ["card", "cell"]  # programs outside of this repository read them
