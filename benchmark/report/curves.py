"""Collect learning curves from run folders into a CSV file, add a random policy's returns, and draw a CSV file.

python -m benchmark.report.curves collect runs/pong pong.csv --steps 10000
python -m benchmark.report.curves random pong.csv --env-id Pong-v5  # once, after `collect`, which writes the file anew
python -m benchmark.report.curves draw pong.csv pong.png
python -m benchmark.report.curves collect runs/pong entropy.csv --tag losses/entropy  # to draw another scalar

`python -m benchmark.report` puts a table of what each curve of doc/artifacts/*.csv ends at into the page that shows it.
"""

import csv
import json
from collections import defaultdict
from itertools import islice
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro

from benchmark import editions
from benchmark.arguments import refuse
from benchmark.report.tables import Table
from benchmark.results import store
from instruments.instrument import one_line
from instruments.playing import make_env, play

RETURN = "charts/episodic_return"
KEY = ("exp_name", "env_id", "seed", "step")
COLUMNS = (*KEY, "episodic_return")
POINTS = 200  # of a learning curve
LAST = 40  # episodes of a run that `collect` prints the mean of
RANDOM = "random"  # exp_name of the rows of `measure_random`


def mean_and_error(returns):
    """The mean of `returns`, a sequence, and its standard error, as text."""
    error = np.std(returns, ddof=1) / len(returns) ** 0.5 if len(returns) > 1 else np.nan
    return f"{np.mean(returns):.2f} ± {error:.2f}"


def collect(run_dir: tyro.conf.Positional[Path], output: tyro.conf.Positional[Path], steps: int = 1, tag: str = RETURN):
    """Write the returns of all runs under `run_dir`, or another scalar of theirs: exp_name, env_id, seed, step, value.

    A row is the mean over the values that are logged within `steps` steps: short episodes would make a long file.
    A JSON file beside it has the date and the editions of the scripts.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    name = tag.split("/")[-1]
    logged = defaultdict(list)
    scripts = set()
    for path in sorted(run_dir.rglob("summary.json")):
        config = json.loads(path.with_name("config.json").read_text())
        events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0}).Reload()
        events = events.Scalars(tag)
        last = mean_and_error([event.value for event in events[-LAST:]])
        print(f"{path.parent.name}: {name} {last} in the last {LAST} logs, up to step {events[-1].step}")
        scripts |= {copy for copy in path.parent.glob("*.py") if editions.script(copy.stem)}
        for event in events:
            step = -(-event.step // steps) * steps
            logged[config["exp_name"], config["env_id"], config["seed"], step].append(event.value)
    rows = [[*key, f"{sum(values) / len(values):.4g}"] for key, values in sorted(logged.items())]
    with open(output, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([(*KEY, name), *rows])
    store(output.with_suffix(".json"), editions.today(*sorted(scripts)))


def random_returns(env_id, seed, games):
    """Returns of a uniform random policy in the first `games` games of an environment."""
    env = make_env(env_id, seed)
    env.action_space.seed(seed)
    episodes = islice(play(env, lambda obs, begins: env.action_space.sample(), seed), games)
    returns = [episode.total for episode in episodes]
    env.close()
    return returns


def measure_random(output: tyro.conf.Positional[Path], env_id: str, seed: int = 1, num_envs: int = 8, games: int = 16):
    """Append the returns of a uniform random policy to a CSV file: "random", a row of step 0 each.

    Each of `num_envs` environments plays `games` games, of Atari whole ones.
    """
    for name, value in (("games", games), ("num-envs", num_envs)):
        if value < 1:
            refuse(name, value, "give at least 1")
    try:
        returns = {seed + i: random_returns(env_id, seed + i, games) for i in range(num_envs)}
    except gym.error.Error as error:
        refuse("env-id", env_id, f"correct the name ({one_line(error)})")
    with open(output, "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        for own_seed, row in returns.items():
            writer.writerows([RANDOM, env_id, own_seed, 0, f"{value:.2f}"] for value in row)
    flat = [value for row in returns.values() for value in row]
    print(f"{len(flat)} games: mean return {mean_and_error(flat)}, standard deviation {np.std(flat):.2f}")


def read(data):
    """The runs of a CSV file, as {(exp_name, seed): (steps, values)}, the random policy's returns, env_id and name."""
    runs = defaultdict(lambda: ([], []))
    random = []
    with open(data) as file:
        for row in csv.DictReader(file):
            env_id = row["env_id"]
            *_, name = row
            value = float(row[name])
            if row["exp_name"] == RANDOM:
                random.append(value)
                continue
            steps, values = runs[row["exp_name"], row["seed"]]
            steps.append(int(row["step"]))
            values.append(value)
    return runs, random, env_id, name.replace("_", " ")


def learning_curve(folders):
    """Episodic returns of a run, as [step, seconds of training, mean return] of at most POINTS equal parts.

    A run that was interrupted has several folders, in this order. Of a killed part, the
    episodes from the step on at which the first one of the next part has ended do not count.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    episodes = []
    before = 0.0
    for folder in folders:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        scalars = events.Scalars(RETURN) if RETURN in events.Tags()["scalars"] else []
        if scalars:
            begin = events.FirstEventTimestamp()
            episodes = [episode for episode in episodes if episode[0] < scalars[0].step]
            episodes += [(scalar.step, before + scalar.wall_time - begin, scalar.value) for scalar in scalars]
        summary = folder / "summary.json"
        if summary.exists():
            before += json.loads(summary.read_text())["wall_seconds"]
        elif scalars:
            before = episodes[-1][1]
    if not episodes:
        return []
    width = max(episodes[-1][0] / POINTS, 1)
    parts = defaultdict(list)
    for episode in episodes:
        parts[int((episode[0] - 1) / width)].append(episode)
    rows = []
    for part in parts.values():
        step, seconds, _ = part[-1]
        rows.append([step, round(seconds, 2), round(float(np.mean([value for _, _, value in part])), 3)])
    return rows


def measured(data):
    """The date and the editions of the scripts of a CSV file, as far as they are known."""
    about = data.with_suffix(".json")
    return json.loads(about.read_text()) if about.exists() else {}


def last_tenth(steps, values):
    """The mean of `values` over the last tenth of the steps."""
    return np.mean(np.array(values)[np.array(steps) > 0.9 * steps[-1]])


def end_of(curve):
    """The mean return of a learning curve over the last tenth of its steps."""
    steps, _, returns = zip(*curve, strict=True)
    return last_tenth(steps, returns)


def table(data):
    """A table of the mean of each run over the last tenth of its steps, and of the random policy's returns."""
    runs, random, env_id, name = read(data)
    rows = []
    for exp_name in dict.fromkeys(exp_name for exp_name, _ in runs):
        own = {seed: run for (other, seed), run in runs.items() if other == exp_name}
        lasts = [steps[-1] for steps, _ in own.values()]
        ends = [last_tenth(*run) for run in own.values()]
        ends = ", ".join(f"{end:.0f}" if abs(end) >= 100 else f"{end:.2f}" for end in ends)
        lasts = lasts if len(set(lasts)) > 1 else lasts[:1]
        rows.append([exp_name, ", ".join(own), ", ".join(map(str, lasts)), ends])
    if random:
        rows.append([f"random policy, {len(random)} games", "", "", mean_and_error(random)])
    header = (editions.marked(env_id, [measured(data)]), "seeds", "steps", f"{name} in the last tenth of them")
    return Table("", header, rows)


def draw(
    data: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    window: int = 5,
    level: float | None = None,
    level_name: str = "level",
):
    """Draw each experiment's seeds, as moving means over `window` rows, and its mean over seeds as far as all go.

    The mean of a random policy's returns is a dashed line, and so is `level`, such as a target.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs, random, env_id, name = read(data)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    grid = np.linspace(0, max(max(steps) for steps, _ in runs.values()), 200)
    for i, exp_name in enumerate(sorted({exp_name for exp_name, _ in runs})):
        curves = []
        for (run_name, _), (steps, values) in runs.items():
            if run_name == exp_name:
                width = min(window, len(values))
                smooth = np.convolve(values, np.ones(width) / width, "valid")
                axes.plot(steps[width - 1 :], smooth, color=f"C{i}", alpha=0.35, linewidth=1)
                curves.append(np.interp(grid, steps[width - 1 :], smooth, left=np.nan, right=np.nan))
        seeds = "one seed" if len(curves) == 1 else f"{len(curves)} seeds and their mean"
        axes.plot(grid, np.mean(curves, 0), color=f"C{i}", linewidth=2.5, label=f"{exp_name}, {seeds}")
    if random:
        mean = np.mean(random)
        axes.axhline(mean, color="black", linestyle="--", label=f"random policy, {len(random)} games: {mean:.3g}")
    if level is not None:
        axes.axhline(level, color="black", linestyle="--", label=f"{level_name}: {level}")
    apart = np.median(np.concatenate([np.diff(steps) for steps, _ in runs.values()]))
    mean_of = f"\nmoving mean over {window * apart:,.0f} steps" if window > 1 else ""
    axes.set(xlabel="environment steps", ylabel=f"{name}{mean_of}", title=env_id)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=9)
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"collect": collect, "random": measure_random, "draw": draw})
