"""The scripts of leanrl/ and edited copies of them: loaded as modules, and trained with a tool that watches."""

import contextlib
import dataclasses
import importlib.util
import sys
from pathlib import Path
from unittest import mock

from common import ROOT
from common.arguments import one_line, stop


def load(script):
    """The module of a script: of leanrl/ by its name, any other one by its path. It finds what is beside it."""
    path = Path(script)
    if path.suffix != ".py":
        return importlib.import_module(f"leanrl.{script}")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def load_given(argument, name):
    """The module of the script at the path `name`, which a user gave as `argument`."""
    path = Path(name)
    if not path.is_file() or path.suffix != ".py":
        stop(f"{argument} {name}: this is no Python file; give the path of a script")
    try:
        script = load(path)
    except (Exception, SystemExit) as error:
        stop(f"{argument} {name}: it cannot be imported ({one_line(error)}); correct it")
    for part in ("train", "parse_args", "Args"):
        if not hasattr(script, part):
            stop(f"{argument} {name}: it has no `{part}`; give a script of leanrl/ or an edited copy of one")
    return script


def path_of(name):
    """The path of a script of leanrl/."""
    return ROOT / "leanrl" / f"{name}.py"


def refuse_population(given, script):
    """End the program where `script` trains several agents at once; `given` is the argument that asked for it."""
    if "seeds" in {field.name for field in dataclasses.fields(script.Args)}:
        stop(f"{given}: this script trains a population; give the script that trains one agent")


def train(script, args, on_start=lambda run: None):
    """`script.train(args)`; `on_start` is called with its Run when everything is made, before the first step."""
    name = next(name for name in ("Population", "JointRun", "Run") if hasattr(script, name))

    class Watched(getattr(script, name)):
        def __enter__(self):
            with contextlib.ExitStack() as ending:
                ending.push(super().__enter__())  # which ends the run if `on_start` fails
                on_start(self)
                ending.pop_all()
            return self

    with mock.patch.object(script, name, Watched):
        script.train(args)


def optimizers_of(learner):
    """The optimizers of a learner, by the name of what they optimize."""
    return learner.optimizers if hasattr(learner, "optimizers") else {"agent": learner.optimizer}


def before_each_log(run, function):
    """Have `function` called before each log of a run, with the losses."""
    log = run.log

    def call_and_log(losses):
        function(losses)
        log(losses)

    run.log = call_and_log


class Enough(BaseException):
    """Ends a run from inside of it, without the checkpoint that it leaves after other errors."""
