"""Search for hyper-parameters: Optuna proposes trials, Ray trains them, and the best third continues.

    python -m launch tune leanrl/dqn.py --env-id Acrobot-v1 --seeds 1 2 --trials 30 \\
        --range learning-rate 1e-4 1e-2 log --choice batch-size 64 128 256 -- --total-timesteps 50000

Arguments after the two dashes go to the script. A trial is a setting of the flags, trained with every seed. Its value
is the mean return of the last 20 episodes, averaged over seeds. Trials are grouped in brackets of successive halving
(Jamieson and Talwalkar 2016, arXiv:1502.07943): all trials train to the first rung, the best third continues from its
checkpoints to the next rung, and so on. With 3 rungs, these are at a ninth, a third and all of --total-timesteps.
Schedules are those of the whole run, and no step is trained twice.

Run the same command again to continue or extend a search. The search space can also be a file:

    [learning-rate]
    low = 1e-4
    high = 1e-2
    log = true

    [batch-size]
    choices = [64, 128, 256]
"""

import math
import os
import shlex
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Annotated

import optuna
import tyro
from matplotlib.figure import Figure
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from common import curves
from common.arguments import check_seeds, from_low, refuse, stop
from common.tables import Table
from launch import orders, report
from launch.board import Board
from launch.cluster import folder_of
from launch.orders import refuse_ours
from launch.run import Resources, begin, end, interrupted, parse
from launch.worker import done_step, has_diverged, summaries

KEEP = 3  # one in KEEP trials continues to the next rung
KEYS = {"low", "high", "log"}  # of a range in a TOML file
OURS = orders.OURS | {"env-id": "--env-id sets it"}
NEVER_SEARCHED = OURS | {"total-timesteps": "give it after the two dashes, for all trials"}
WORST = -math.inf  # the value of a trial that has diverged or ended no episode
SHOWN = 10  # trials in the table


@dataclass
class Args(Resources):
    script: tyro.conf.Positional[Path] = tyro.MISSING
    """script of leanrl/, or an edited copy of one"""
    env_id: str | None = None
    """environment (default: the script's)"""
    seeds: tuple[int, ...] = (1, 2)
    """seeds of each trial"""
    trials: int = 30
    """settings to try"""
    rungs: int = 3
    """comparisons of trials, each after three times as many steps as the one before (1: all train to the end)"""
    range: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """a flag of the script, its smallest and largest value, and "log" for a logarithmic scale"""
    choice: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """a flag of the script and the values to choose from"""
    space: Path | None = None
    """TOML file with more flags, as above"""
    search_seed: int = 1
    """seed of the proposals"""
    out: Path = Path("runs/tune")
    """folder for the search, shared by all machines"""


def search_space(script, args):
    """The requested distributions, by flag."""
    space = {}
    for given, name, entry in entries(args):
        name = script.check(name, given)
        refuse_ours(name, given, NEVER_SEARCHED)
        if name in space:
            stop(f"{given}: {name} is given twice; leave one of them out")
        if "choices" in entry:
            space[name] = one_of(script, name, entry["choices"], given)
        else:
            space[name] = between(script, name, entry["low"], entry["high"], entry.get("log", False), given)
    if not space:
        stop("python -m launch tune: give what to search for by --range, --choice or --space")
    return space


def entries(args):
    """For each flag of the search: the user's argument, the flag's name, and its entry in the form of the TOML file."""
    for words in args.range:
        name, *limits = words or [""]
        given = f"--range {' '.join(words)}"
        log = limits[2:] == ["log"]
        try:
            low, high = map(float, limits[:2] if log else limits)
        except ValueError:
            stop(f"{given}: give a flag, its smallest and largest value, and optionally log")
        yield given, name, {"low": low, "high": high, "log": log}
    for words in args.choice:
        name, *values = words or [""]
        yield f"--choice {name}", name, {"choices": values}
    if args.space:
        yield from entries_in(args.space)


def entries_in(path):
    """The entries of a TOML file, in the same form."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse("space", path, f"give a TOML file ({error})")
    for name, entry in found.items():
        given = f"--space {path}: {name}"
        if not is_entry(entry):
            stop(f"{given}: give low and high, both numbers, and optionally log = true, or a list of choices")
        yield given, name, entry


def is_entry(entry):
    """Whether a value is a range or a list of choices."""
    if not isinstance(entry, dict):
        return False
    if set(entry) == {"choices"}:
        return isinstance(entry["choices"], list)
    numbers = [type(entry.get(name)) in (int, float) for name in ("low", "high")]
    return all(numbers) and set(entry) <= KEYS and type(entry.get("log", False)) is bool


def one_of(script, name, values, given):
    """A choice among values of a flag."""
    values = [str(value) for value in values]
    if not values:
        stop(f"{given}: give its values")
    if len(set(values)) < len(values):
        stop(f"{given}: give each value once")
    for value in values:
        script.ask([script.flag(name, value)])
    return CategoricalDistribution(values)


def between(script, name, low, high, log, given):
    """A range of a flag, of whole numbers if the flag takes these."""
    whole = script.fields[name].type is int
    if not math.isfinite(low) or not math.isfinite(high):
        stop(f"{given}: give finite numbers")
    if whole and (low % 1 or high % 1):
        stop(f"{given}: give whole numbers")
    if whole:
        low, high = int(low), int(high)
    for limit in (low, high):
        script.ask([script.flag(name, limit)])
    try:
        return (IntDistribution if whole else FloatDistribution)(low, high, log=log)
    except ValueError as error:
        stop(f"{given}: {error}")


def defaults(script, space, flags):
    """The script's default values if the search space contains all of them, else None."""
    args = script.parse(flags)
    values = {}
    for name, distribution in space.items():
        value = script.value(args, name)
        if isinstance(distribution, CategoricalDistribution):
            for choice in distribution.choices:
                if script.value(script.parse([script.flag(name, choice)]), name) == value:
                    values[name] = choice
        elif value is not None and distribution.low <= value <= distribution.high:
            values[name] = value
    return values if len(values) == len(space) else None


def drop_unfinished_line(journal):
    """Remove an incomplete last line, left by a crash: Optuna would append to it."""
    if journal.exists():
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)


class Search:
    """A study and its trials, which share `flags`. All state is in `folder`, so that resuming retrains nothing."""

    def __init__(self, args, script, space, flags, folder):
        self.args = args
        self.script = script
        self.space = space
        self.flags = flags
        self.total = script.parse(flags).total_timesteps
        self.rungs = [self.total // KEEP**i for i in reversed(range(args.rungs))]
        self.folder = folder
        if self.rungs[0] < 1:
            refuse("rungs", args.rungs, f"give fewer, or more than {self.total} steps")
        journal = self.folder / "journal.log"
        drop_unfinished_line(journal)
        # The folder is locked already, and Optuna's own lock would outlive a kill.
        no_lock = SimpleNamespace(acquire=lambda: True, release=lambda: None)
        storage = JournalStorage(JournalFileBackend(str(journal), no_lock))
        names = {"study_name": "tune", "load_if_exists": True, "direction": "maximize"}
        self.study = optuna.create_study(storage=storage, **names)
        seed = (args.search_seed + len(self.study.trials)) % 2**32  # a continued search proposes other settings
        self.study.sampler = optuna.samplers.TPESampler(seed=seed)
        identity = {"space": {name: repr(kind) for name, kind in space.items()}, "flags": flags, "rungs": self.rungs}
        identity |= {"seeds": list(args.seeds), "env_id": args.env_id}
        if self.study.user_attrs.get("search", identity) != identity:
            refuse("out", args.out, f"{self.folder} has another search; give another folder, or delete this one")
        self.study.set_user_attr("search", identity)
        if not self.study.trials and (own := defaults(script, space, flags)):
            self.study.enqueue_trial(own)

    def brackets(self):
        """Unfinished brackets: first those already started, then new ones until there are enough trials."""
        begun = {}
        for trial in self.study.trials:
            if "bracket" in trial.user_attrs:
                begun.setdefault(trial.user_attrs["bracket"], []).append(trial.number)
        yield from (Bracket(self, numbers) for numbers in begun.values() if not self.finished(numbers))
        size = KEEP ** (self.args.rungs - 1)
        number = sum(map(len, begun.values()))
        while number < self.args.trials:
            trials = [self.study.ask(self.space) for _ in range(min(size, self.args.trials - number))]
            for trial in trials:
                trial.set_user_attr("bracket", trials[0].number)
            number += len(trials)
            yield Bracket(self, [trial.number for trial in trials])

    def finished(self, numbers):
        return all(self.study.trials[number].state.is_finished() for number in numbers)

    def order(self, number, seed, rung):
        """The run of a trial with one seed, up to a rung."""
        setting = self.study.trials[number].params
        args, label = self.args, f"trial {number}"
        own = (self.script, args.env_id, setting, seed, self.flags, args.out, args.threads)
        return orders.order(*own, label=label, until=self.rungs[rung])

    def value(self, number, rung):
        """The value of a trial at a rung; None if it has not reached the rung.

        WORST if a seed has ended no episode or has diverged: the same command would meet the same NaN.
        """
        if self.diverged(number, rung):
            return WORST
        returns = []
        for seed in self.args.seeds:
            order = self.order(number, seed, rung)
            if done_step(order.folder) < order.steps:
                return None
            at_rung = next(part for part in summaries(order.folder) if part["global_step"] >= order.steps)
            returns.append(at_rung["episodic_return"])
        return WORST if None in returns else mean(returns)

    def diverged(self, number, rung):
        """The seeds whose runs of a trial diverged before a rung."""
        runs = [self.order(number, seed, rung) for seed in self.args.seeds]
        return [run.seed for run in runs if done_step(run.folder) < run.steps and has_diverged(run.folder)]


class Bracket:
    """Trials that are compared at each rung."""

    def __init__(self, search, numbers):
        self.search = search
        self.numbers = numbers
        self.rung = 0

    def orders(self):
        """The runs up to the next rung."""
        seeds = self.search.args.seeds
        return [self.search.order(number, seed, self.rung) for number in self.numbers for seed in seeds]

    def compare(self):
        """Report the values of the trials at this rung to the study, and keep those that continue to the next rung.

        Nothing is compared if runs have failed: the same command tries them again. Runs that have diverged would fail
        again, so their trials get the worst value and never continue.
        """
        study = self.search.study
        values = {number: self.search.value(number, self.rung) for number in self.numbers}
        if None in values.values():
            self.numbers = []
            return
        diverged = {number: self.search.diverged(number, self.rung) for number in self.numbers}
        for number, seeds in diverged.items():
            if seeds:
                print(f"trial {number} counts as the worst: seed {seeds[0]} has diverged", file=sys.stderr)
        last = self.rung + 1 == len(self.search.rungs)
        ranked = sorted((number for number in values if not diverged[number]), key=values.get, reverse=True)
        going_on = [] if last else ranked[: math.ceil(len(values) / KEEP)]
        for number, value in values.items():
            trial = study.trials[number]
            if trial.state.is_finished():  # an earlier command was interrupted here
                continue
            if value > WORST and self.rung not in trial.intermediate_values:
                optuna.trial.Trial(study, trial._trial_id).report(value, self.rung)
            if number in going_on:
                continue
            if not last:
                study.tell(number, state=TrialState.PRUNED)
            elif value > WORST:
                study.tell(number, value)
            else:
                study.tell(number, state=TrialState.FAIL)
        self.numbers = going_on
        self.rung += 1


def main(words):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    args, flags = parse(words, Args, "tune", __doc__)
    orders.refuse_empty("env-id", [args.env_id])
    script = orders.Script(args.script)
    from_low(1, args, "trials", "rungs")
    check_seeds(args, "search_seed")
    space = search_space(script, args)
    orders.check_flags(script, flags, space, OURS)
    orders.ask(script, (), args.seeds, flags)
    with folder_of(args.out, script) as folder:
        search = Search(args, script, space, flags, folder)
        outcomes = run_all(args.cluster(folder), search)
        write(search, shlex.join(["python", "-m", "launch", "tune", *words]))
    if not search.finished(range(len(search.study.trials))):
        end(outcomes)


def run_all(cluster, search):
    """Train all trials; returns the outcome of each run. A new bracket starts when started ones leave cores idle."""
    with Board(cluster.session) as board:
        coming = search.brackets()
        waiting = {}  # names of orders by bracket

        def start(bracket):
            own = bracket.orders()
            for order in own:
                order.place()
            waiting[bracket] = {order.name for order in own if not begin(order, cluster, board)}

        try:
            while True:
                for bracket, names in list(waiting.items()):
                    if not names:
                        del waiting[bracket]
                        bracket.compare()
                        if bracket.numbers:
                            start(bracket)
                if len(cluster.tasks) < cluster.slots and all(waiting.values()) and (new := next(coming, None)):
                    start(new)
                elif cluster.tasks:
                    for order, outcome in cluster.finished():
                        board.end(order, outcome)
                        for names in waiting.values():
                            names.discard(order.name)
                    board.refresh()
                elif not waiting:
                    return board.outcomes
        except KeyboardInterrupt:
            interrupted(cluster, board)


def trial_rows(search):
    """The best trials: number, value at each rung, and flags."""
    trials = [trial for trial in search.study.trials if trial.intermediate_values]
    trials.sort(key=lambda trial: max(trial.intermediate_values.items()), reverse=True)
    for trial in trials[:SHOWN]:
        values = [trial.intermediate_values.get(rung) for rung in range(len(search.rungs))]
        flags = ", ".join(f"{name}={shortened(value)}" for name, value in trial.params.items())
        yield [str(trial.number), *("" if value is None else f"{value:.1f}" for value in values), flags], trial


def shortened(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def first_rung(search):
    """A study of all trials at the first rung, the only rung that all have reached."""
    study = optuna.create_study(direction="maximize")
    for trial in search.study.trials:
        if 0 in trial.intermediate_values:
            settings = {"params": trial.params, "distributions": trial.distributions}
            study.add_trial(optuna.trial.create_trial(value=trial.intermediate_values[0], **settings))
    return study


def write(search, command):
    """Print and write the best trials; draw the history of the search and the importance of the flags."""
    ranked = list(trial_rows(search))
    if not ranked:
        stop(f"{search.folder}: every trial has diverged or has not ended an episode; see the logs of the runs there")
    best = ranked[0][1]
    header = ("trial", *(f"return at {steps} steps" for steps in search.rungs), "flags")
    table = Table("", header, [row for row, _ in ranked])
    env_id = search.order(best.number, search.args.seeds[0], 0).env_id
    flags = [search.script.flag(name, value) for name, value in best.params.items()]
    winner = shlex.join(["python", str(search.script.path), f"--env-id={env_id}", *flags, *search.flags])
    report.write_page(
        search.folder / "results.html",
        f"{search.script.path.stem}, {env_id}",
        f"{command}\n\nbest: {winner}",
        [f'<div class="wide">{table.html()}</div>', *pictures(search)],
    )
    (search.folder / "results.md").write_text(f"{table.markdown()}\n\n    {winner}\n", encoding="utf-8")
    print(f"{table.markdown()}\n\n{winner}\n\n{search.folder / 'results.html'}")


def pictures(search):
    """Plots of value against trial and rung and of the flags' importance, as parts of a page."""
    trials = [trial for trial in search.study.trials if trial.intermediate_values]
    with curves.settings():
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for rung, steps in enumerate(search.rungs):
            numbers = [trial.number for trial in trials if rung in trial.intermediate_values]
            values = [trial.intermediate_values[rung] for trial in trials if rung in trial.intermediate_values]
            left.plot(numbers, values, "o^s*Dv"[rung % 6], label=f"at {steps} steps")
        left.set(xlabel="trial", ylabel="mean return of the seeds")
        left.legend(fontsize=9)
        study = first_rung(search)
        if len(study.trials) > len(search.space):
            importances = optuna.importance.get_param_importances(study)
            right.barh(list(importances)[::-1], list(importances.values())[::-1], color=curves.COLORS[0])
        right.set(xlabel="importance at the first rung (PED-ANOVA)", xlim=(0, 1))
        picture = curves.svg(figure)
    (search.folder / "search.svg").write_bytes(picture)
    return [report.inline(picture)]
