"""The algorithms, under the name that programs outside of this repository import."""

from common.algorithms import ALGORITHMS

__all__ = ["ALGORITHMS"]
