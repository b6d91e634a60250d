"""Scripts of leanrl/ and edited copies of them: load them as modules and train them under a tool."""

import contextlib
import dataclasses
import importlib.util
import io
import sys
import tempfile
from pathlib import Path
from unittest import mock

from common import ROOT
from common.arguments import at_home, one_line, stop


def load(script):
    """Load a script as a module: one of leanrl/ by name, any other by path. It can import files beside it."""
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
    """Load the script at the path `name`, which the user gave as `argument`."""
    path = at_home(Path(name))
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


def learner_class(script):
    """The class of a script's learner: that with the losses."""
    return next(value for value in vars(script).values() if isinstance(value, type) and hasattr(value, "losses"))


def takes_discrete_actions_alone(script):
    """Whether a script refuses continuous actions."""
    return hasattr(script, "require_discrete_actions") or hasattr(script, "require_categorical_actions")


def refuse_population(given, script):
    """Exit if `script` trains a population; `given` is the user's argument."""
    if "seeds" in {field.name for field in dataclasses.fields(script.Args)}:
        stop(f"{given}: this script trains a population; give the script that trains one agent")


def train(script, args, on_start=lambda run: None):
    """Call `script.train(args)`, and `on_start` with its Run after setup, before the first step."""
    name = next(name for name in ("Population", "JointRun", "Run") if hasattr(script, name))

    class Watched(getattr(script, name)):
        def __enter__(self):
            with contextlib.ExitStack() as ending:
                ending.push(super().__enter__())  # ends the run if `on_start` fails
                on_start(self)
                ending.pop_all()
            return self

    with mock.patch.object(script, name, Watched):
        script.train(args)


def optimizers_of(learner):
    """The optimizers of a learner, by the name of the optimized part."""
    return learner.optimizers if hasattr(learner, "optimizers") else {"agent": learner.optimizer}


def before_each_log(run, function):
    """Call `function` with the losses before each log of a run."""
    log = run.log

    def call_and_log(losses):
        function(losses)
        log(losses)

    run.log = call_and_log


class Enough(BaseException):
    """Ends a run from within, without the checkpoint that other errors leave."""


def train_until_enough(script, flags, on_start, total_timesteps=10**9):
    """Train without traces: to the end, or until code installed by `on_start` raises Enough."""
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        args = script.Args(total_timesteps=total_timesteps, run_dir=folder, **flags)
        try:
            with contextlib.redirect_stderr(log), contextlib.suppress(Enough):
                train(script, args, on_start)
        except SystemExit:
            print(log.getvalue().splitlines()[-1], file=sys.stderr)
            raise
