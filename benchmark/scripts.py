"""The scripts of leanrl/, and copies of them, as modules."""

import importlib
import importlib.util
from pathlib import Path


def load(name):
    """The module of the script of this name in leanrl/, or of a copy of one, by its path."""
    if not name.endswith(".py"):
        return importlib.import_module(f"leanrl.{name}")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Enough(BaseException):
    """Ends a run from inside of it, without the checkpoint that it leaves after other errors."""


def before_each_log(run, function):
    """Have `function` called before each log of a run."""
    log = run.log

    def call_and_log(losses):
        function()
        log(losses)

    run.log = call_and_log
