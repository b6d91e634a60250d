"""Collect learning curves from run folders into a CSV file, add a random policy's returns, and draw a CSV file.

python -m benchmark.report.curves collect runs/pong pong.csv --steps 10000
python -m benchmark.report.curves random pong.csv --env-id Pong-v5  # once, after `collect`, which writes the file anew
python -m benchmark.report.curves draw pong.csv pong.png
python -m benchmark.report.curves collect runs/pong entropy.csv --tag losses/entropy  # to draw another scalar
python -m benchmark.report.curves collect runs/pong pong.csv --minutes  # for `draw --minutes`

`python -m benchmark.report` puts a table of what each curve of doc/artifacts/*.csv ends at into the page that shows it.
"""

import csv
import io
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmark import editions
from benchmark.results import read as read_json
from benchmark.results import replace, store
from common.arguments import at_home, note, one_line, refuse, stop
from common.curves import COLORS, RETURN, last_tenth, moving_mean, plot, read_events, require_picture, scalars, seeds
from common.folders import writable
from common.tables import Table
from instruments.playing import random_returns

KEY = ("exp_name", "env_id", "seed", "step")
COLUMNS = (*KEY, "episodic_return")
MINUTES = "minutes"
LAST = 40  # episodes of a run that `collect` prints the mean of
RANDOM = "random"  # exp_name of the rows of `measure_random`
NOT_LEARNED = {"exp_name", "seed", "run_dir", "resume", "checkpoint_interval", "capture_video", "threads", "cuda"}
NOT_LEARNED |= {"track", "wandb_project_name", "wandb_entity", "torch_deterministic", "versions", "machine"}
MAY_CHANGE = {"total_timesteps", "device"}  # where a run is resumed


def mean_and_error(returns):
    """The mean of `returns`, a sequence, and its standard error, as text."""
    error = np.std(returns, ddof=1) / len(returns) ** 0.5 if len(returns) > 1 else np.nan
    return f"{np.mean(returns):.2f} ± {error:.2f}"


def collect(
    run_dir: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    steps: int = 1,
    tag: str = RETURN,
    minutes: bool = False,
):
    """Write the returns of all runs under `run_dir`, or another scalar of theirs: exp_name, env_id, seed, step, value.

    A row is the mean over the values that are logged within `steps` steps: short episodes would make a long file.
    With `minutes` it ends with the minutes since the run's start. Runs of one exp_name must have the same flags.
    A JSON file beside it has the date, the devices and the editions of the scripts.
    """
    run_dir, output = at_home(run_dir), at_home(output)
    if steps < 1:
        refuse("steps", steps, "give at least 1")
    writable("output", output.parent)
    name = tag.split("/")[-1]
    logged = defaultdict(list)
    scripts = set()
    devices = set()
    known = {}
    for path in sorted(run_dir.rglob("summary.json")):
        config = read_json(path.with_name("config.json"))
        run = read_events(path.parent)
        events = scalars(run, tag)
        if not events:
            note(f"{path.parent}: it has no {tag}, or its events are damaged; left out")
            continue
        require_same_flags(run_dir, config, known)
        devices.add(config["device"])
        last = mean_and_error([event.value for event in events[-LAST:]])
        print(f"{path.parent.name}: {name} {last} in the last {LAST} logs, up to step {events[-1].step}")
        scripts |= {copy for copy in path.parent.glob("*.py") if editions.script(copy.stem)}
        for event in events:
            step = -(-event.step // steps) * steps
            time = (event.wall_time - run.FirstEventTimestamp()) / 60
            logged[config["exp_name"], config["env_id"], config["seed"], step].append((time, event.value))
    rows = []
    for key, values in sorted(logged.items()):
        time, value = np.mean(values, axis=0)
        rows.append([*key, f"{value:.4g}"] + [f"{time:.2f}"] * minutes)
    if not rows:
        stop(f"{run_dir}: no run that is finished has {tag}; give a folder of such runs ({output} is as it was)")
    here, there = (", ".join(sorted(names)) for names in (devices, measured(output).get("devices", devices)))
    if output.exists() and here != there:
        refuse("output", output, f"its runs are those of {there}, not {here}; give another file, or delete this one")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[*KEY, name] + [MINUTES] * minutes, *rows])
    replace(output, text.getvalue())
    store(output.with_suffix(".json"), editions.today(*sorted(scripts)) | {"devices": sorted(devices)})


def require_same_flags(run_dir, config, known):
    """Exit if a run's flags differ from those `known` of its exp_name, and so the two would not be one curve."""
    for name, value in config.items():
        if name in NOT_LEARNED or (config.get("resume") and name in MAY_CHANGE):
            continue
        other = known.setdefault((config["exp_name"], name), value)
        if value != other:
            remedy = "collect them from separate folders into separate files"
            stop(f"{run_dir}: runs of {config['exp_name']} have {name} {other} and {value}; {remedy}")


def measure_random(output: tyro.conf.Positional[Path], env_id: str, seed: int = 1, num_envs: int = 8, games: int = 16):
    """Append the returns of a uniform random policy to a CSV file: "random", a row of step 0 each.

    Each of `num_envs` environments plays `games` games, of Atari whole ones.
    """
    output = at_home(output)
    for name, value in (("games", games), ("num-envs", num_envs)):
        if value < 1:
            refuse(name, value, "give at least 1")
    if not 0 <= seed <= 2**32 - num_envs:
        refuse("seed", seed, f"give a number from 0 to {2**32 - num_envs}")
    writable("output", output.parent)
    try:
        returns = {seed + i: random_returns(env_id, seed + i, games) for i in range(num_envs)}
    except Exception as error:  # environments may raise anything
        refuse("env-id", env_id, f"cannot be played ({one_line(error)}); correct the name or the environment")
    with open(output, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        for own_seed, row in returns.items():
            writer.writerows([RANDOM, env_id, own_seed, 0, f"{value:.2f}"] for value in row)
    flat = [value for row in returns.values() for value in row]
    print(f"{len(flat)} games: mean return {mean_and_error(flat)}, standard deviation {np.std(flat):.2f}")


class Curve(NamedTuple):
    """A run: lists of equal length, but for `minutes`, which is empty if they were not collected."""

    steps: list[int]
    values: list[float]
    minutes: list[float]


def read(data):
    """The curves of a CSV file by (exp_name, seed), the random policy's returns, env_id and name."""
    runs = defaultdict(lambda: Curve([], [], []))
    random = []
    env_id = None
    try:
        with open(data, encoding="utf-8") as file:
            for row in csv.DictReader(file):
                env_id = row["env_id"]
                name = list(row)[len(KEY)]
                value = float(row[name])
                if row["exp_name"] == RANDOM:
                    random.append(value)
                    continue
                curve = runs[row["exp_name"], row["seed"]]
                curve.steps.append(int(row["step"]))
                curve.values.append(value)
                if MINUTES in row:
                    curve.minutes.append(float(row[MINUTES]))
    except (OSError, KeyError, IndexError, TypeError, ValueError, csv.Error) as error:
        stop(f"{data}: it cannot be read ({one_line(error)}); give a CSV file that `collect` has written")
    if env_id is None:
        stop(f"{data}: it has no rows; give a CSV file that `collect` has written")
    return runs, random, env_id, name.replace("_", " ")


def measured(data):
    """The date and the editions of the scripts of a CSV file, as far as they are known."""
    about = data.with_suffix(".json")
    return read_json(about) if about.exists() else {}


def table(data):
    """A table of the mean of each run over the last tenth of its steps, and of the random policy's returns."""
    runs, random, env_id, name = read(data)
    timed = any(run.minutes for run in runs.values())
    rows = []
    for exp_name in dict.fromkeys(exp_name for exp_name, _ in runs):
        own = {seed: run for (other, seed), run in runs.items() if other == exp_name}
        lasts = [run.steps[-1] for run in own.values()]
        ends = [last_tenth(run.steps, run.values) for run in own.values()]
        ends = ", ".join(f"{end:.0f}" if abs(end) >= 100 else f"{end:.2f}" for end in ends)
        lasts = lasts if len(set(lasts)) > 1 else lasts[:1]
        rows.append([exp_name, ", ".join(own), ", ".join(map(str, lasts)), ends])
        if timed:
            rows[-1].append(", ".join(f"{run.minutes[-1]:.0f}" for run in own.values()))
    if random:
        rows.append([f"random policy, {len(random)} games", "", "", mean_and_error(random)] + [""] * bool(timed))
    header = [editions.marked(env_id, [measured(data)]), "seeds", "steps", f"{name} in the last tenth of them"]
    return Table("", header + [MINUTES] * bool(timed), rows)


def draw(
    data: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    window: int = 5,
    level: float | None = None,
    level_name: str = "level",
    minutes: bool = False,
):
    """Draw each experiment's moving means over `window` rows: each seed, and the mean over seeds.

    With `minutes` the horizontal axis has the minutes of `collect --minutes`. The mean of a random policy's returns is
    a dashed line, and so is `level`, such as a target.
    """
    data, output = at_home(data), at_home(output)
    if window < 1:
        refuse("window", window, "give at least 1")
    require_picture(output)
    runs, random, env_id, name = read(data)
    if not runs:
        stop(f"{data}: it has rows of a random policy alone; collect runs again, which writes the file anew")
    if minutes and not all(run.minutes for run in runs.values()):
        refuse("minutes", minutes, f"{data} has none; collect runs with --minutes")
    unit = "minutes" if minutes else "steps"
    groups = defaultdict(list)
    for (exp_name, _), run in sorted(runs.items()):
        groups[exp_name].append((getattr(run, unit), moving_mean(run.values, window)))
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for (exp_name, own), color in zip(groups.items(), COLORS, strict=False):
        plot(axes, own, f"{exp_name}, {seeds(len(own))}", color)
    if random:
        mean = np.mean(random)
        axes.axhline(mean, color="black", linestyle="--", label=f"random policy, {len(random)} games: {mean:.3g}")
    if level is not None:
        axes.axhline(level, color="black", linestyle="--", label=f"{level_name}: {level}")
    apart = np.median(np.concatenate([np.diff(getattr(run, unit)) for run in runs.values()]))
    mean_of = f"\nmoving mean over {window * apart:,.{int(minutes)}f} {unit}" if window > 1 else ""
    explained = "; thin lines are seeds, thick ones their means" if any(len(own) > 1 for own in groups.values()) else ""
    xlabel = "minutes" if minutes else "environment steps"
    axes.set(xlabel=f"{xlabel}{explained}", ylabel=f"{name}{mean_of}", title=env_id)
    if not minutes:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1M
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=9)
    figure.savefig(output, dpi=150)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"collect": collect, "random": measure_random, "draw": draw})
