"""Collect learning curves from run folders into a CSV file, and draw a CSV file.

python benchmark/curves.py collect runs/ doc/artifacts/sac_halfcheetah.csv
python benchmark/curves.py draw doc/artifacts/sac_halfcheetah.csv doc/artifacts/sac_halfcheetah.png
"""

import csv
import json
from collections import defaultdict
from pathlib import Path

import tyro


def collect(run_dir: tyro.conf.Positional[Path], output: tyro.conf.Positional[Path], steps: int = 1):
    """Write the returns of all runs under `run_dir`: exp_name, env_id, seed, step, episodic_return.

    A row is the mean over the episodes that end within `steps` steps: short episodes would make a long file.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    returns = defaultdict(list)
    for path in sorted(run_dir.rglob("summary.json")):
        config = json.loads(path.with_name("config.json").read_text())
        events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0}).Reload()
        for event in events.Scalars("charts/episodic_return"):
            step = -(-event.step // steps) * steps
            returns[config["exp_name"], config["env_id"], config["seed"], step].append(event.value)
    rows = [[*key, f"{sum(values) / len(values):.2f}"] for key, values in sorted(returns.items())]
    with open(output, "w", newline="") as file:
        columns = ["exp_name", "env_id", "seed", "step", "episodic_return"]
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def draw(data: tyro.conf.Positional[Path], output: tyro.conf.Positional[Path], window: int = 5):
    """Draw each experiment's seeds, as moving means over `window` rows, and its mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    runs = defaultdict(lambda: ([], []))
    with open(data) as file:
        for row in csv.DictReader(file):
            steps, returns = runs[row["exp_name"], row["seed"]]
            steps.append(int(row["step"]))
            returns.append(float(row["episodic_return"]))
            env_id = row["env_id"]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    grid = np.linspace(0, max(max(steps) for steps, _ in runs.values()), 200)
    for i, exp_name in enumerate(sorted({exp_name for exp_name, _ in runs})):
        curves = []
        for (name, _), (steps, returns) in runs.items():
            if name == exp_name:
                smooth = np.convolve(returns, np.ones(window) / window, "valid")
                axes.plot(steps[window - 1 :], smooth, color=f"C{i}", alpha=0.35, linewidth=1)
                curves.append(np.interp(grid, steps[window - 1 :], smooth, left=np.nan))
        axes.plot(grid, np.mean(curves, 0), color=f"C{i}", linewidth=2.5, label=f"{exp_name}, {len(curves)} seeds")
    axes.set(xlabel="environment steps", ylabel="episodic return (moving mean)", title=env_id)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"collect": collect, "draw": draw})
