"""A plugin of pytest that appends the outcome of each test to the file $NINE_OUTCOMES at once, as JSON."""

import json
import os

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
        with open(os.environ[FILE], "a") as file:
            print(json.dumps(outcome), file=file)


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist, whose reports reach the process that started it
        end_with_parent()
    else:
        config.pluginmanager.register(Outcomes())
