"""A plugin of pytest that appends the outcome of each test to the file $NINE_OUTCOMES at once, as JSON."""

import functools
import json
import os
import subprocess

import pytest

from common.processes import end_with_parent

FILE = "NINE_OUTCOMES"


class Outcomes:
    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        outcome = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
        if report.failed:
            outcome["says"] = report.longreprtext[-1500:]
        with open(os.environ[FILE], "a", encoding="utf-8") as file:
            print(json.dumps(outcome), file=file)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # not in a worker of pytest-xdist, whose reports reach us
        config.pluginmanager.register(Outcomes())
        # workers end with us from their first moment: one that stands still could not end by itself
        subprocess.Popen.__init__ = functools.partialmethod(subprocess.Popen.__init__, preexec_fn=end_with_parent)
