"""Packs of `python -m launch`: a population script trains several runs at once, and each is what it is alone."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import wait_for

pytest.importorskip("ray", reason="pip install -r requirements/launch.txt")

from test_launch import assert_equal, tune, words_of

from launch import orders, packs, run, worker

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("ray_lock")
POPULATION = """
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
import tyro


@dataclass
class Args:
    env_id: str = "Walk-v0"
    seeds: tuple[int, ...] = (1, 2, 3, 4)
    total_timesteps: int = 20
    learning_rate: tuple[float, ...] = (1.0,)
    width: int = 8
    threads: int = 0
    checkpoint_interval: int = 0
    run_dir: str = "runs"
    resume: str | None = None
    seconds: float = 0.0
    freeze: bool = False


class Population:
    def __init__(self, args):
        count = max(len(args.seeds), len(args.learning_rate))
        self.seeds = [args.seeds[i % len(args.seeds)] for i in range(count)]
        self.rates = [args.learning_rate[i % len(args.learning_rate)] for i in range(count)]
        self.args, self.step, self.values, self.over = args, 0, list(self.seeds), False
        self.folder = Path(args.run_dir) / f"population__{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
        self.agents = [self.folder / f"agent_{i}" for i in range(count)]
        for agent in self.agents:
            agent.mkdir(parents=True)
        signal.signal(signal.SIGTERM, self.stop)
        self.frozen = set()
        if args.resume:
            torch.load(Path(args.resume) / "checkpoint.pt")
            saved = [torch.load(Path(args.resume) / agent.name / "checkpoint.pt") for agent in self.agents]
            self.step = saved[0]["global_step"]
            assert all(one["global_step"] == self.step for one in saved)
            self.values = [one["value"] for one in saved]
        for agent in self.agents:
            (agent / "begun.json").write_text(str(self.step))

    def stop(self, *_):
        self.over = True

    def unfinished(self):
        interval = self.args.checkpoint_interval
        if interval and self.step and self.step % interval == 0:
            self.save()
        return self.step < self.args.total_timesteps and not self.over

    def save(self):
        for i, agent in enumerate(self.agents):
            if i not in self.frozen:
                torch.save({"global_step": self.step, "value": self.values[i]}, agent / "tmp")
                os.replace(agent / "tmp", agent / "checkpoint.pt")


def train(args, on_start=lambda population: None):
    population = Population(args)
    on_start(population)
    while population.unfinished():
        population.step += 1
        for i, rate in enumerate(population.rates):
            population.values[i] = (population.values[i] * 7 + population.step * rate) % 1000
            if args.freeze and population.step == 7 and population.seeds[i] == 2:
                population.frozen.add(i)
        time.sleep(args.seconds)
    population.save()
    for i, agent in enumerate(population.agents):
        summary = {"global_step": population.step, "episodic_return": population.values[i], "seed": population.seeds[i]}
        summary |= {"steady_sps": 10.0, "wall_seconds": 1.0, "learning_rate": population.rates[i]}
        summary |= {"failed": "NaN"} if i in population.frozen else {}
        (agent / "summary.json").write_text(json.dumps(summary))
    if population.over:
        sys.exit(128 + signal.SIGTERM)
    if population.frozen:
        sys.exit(f"error: {len(population.frozen)} of {len(population.agents)} agents are frozen")


def parse_args():
    return tyro.cli(Args)


if __name__ == "__main__":
    train(parse_args())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "walk.py"
    path.write_text(POPULATION)
    return path


def launch(script, *words, **settings):
    return subprocess.run(words_of(script, *words, **settings), cwd=ROOT, capture_output=True, text=True, timeout=300)


def runs(script, name):
    """What the attempts of each run have left in files of this name, by setting and seed, in the order of steps."""
    found = {}
    for path in (script.parent / "runs" / "walk").glob(f"Walk-v0/*/*/*/{name}"):
        found.setdefault("/".join(path.parts[-4:-2]), []).append(json.loads(path.read_text()))
    return {
        run: sorted(own, key=lambda one: one["global_step"] if name == "summary.json" else one)
        for run, own in found.items()
    }


def ends(script):
    """Step and value that each run ended with."""
    return {
        run: (own[-1]["global_step"], own[-1]["episodic_return"]) for run, own in runs(script, "summary.json").items()
    }


def value(seed, rate=1.0, steps=20):
    """What the script computes."""
    number = seed
    for step in range(1, steps + 1):
        number = (number * 7 + step * rate) % 1000
    return number


def processes(script):
    """How many processes have trained."""
    return len(list((script.parent / "runs" / "walk" / "packs").glob("*/population__*")))


@pytest.mark.thorough
def test_seeds_and_settings_are_packed_and_each_run_is_as_alone(script):
    grid = ("--grid", "learning-rate", "1", "2", "--grid", "width", "8", "16")
    done = launch(script, *grid, "--agents-per-run", "4", seeds=(1, 2, 3))
    assert done.returncode == 0, done.stderr
    wanted = {
        f"learning-rate={rate},width={width}/{seed}": (20, value(seed, rate))
        for rate in (1, 2)
        for width in (8, 16)
        for seed in (1, 2, 3)
    }
    assert ends(script) == wanted
    assert processes(script) == 4  # six runs of each width, which all agents have in common
    assert "| learning-rate=2, width=8 |" in done.stdout
    again = launch(script, *grid, "--agents-per-run", "2", seeds=(1, 2, 3, 4))
    assert again.returncode == 0, again.stderr
    assert processes(script) == 6 and set(map(len, runs(script, "begun.json").values())) == {1}


@pytest.mark.thorough
def test_a_frozen_agent_is_tried_again_alone(script):
    flags = ("--freeze", "--checkpoint-interval=5")
    frozen = launch(script, "--agents-per-run", "3", flags=flags)
    assert frozen.returncode == 1
    said = "failed: Walk-v0 base seed 1 and 2 more: error: 1 of 3 agents are frozen"
    assert said in frozen.stderr.splitlines(), frozen.stderr
    assert launch(script, "--agents-per-run", "3", flags=flags).returncode == 1
    assert runs(script, "begun.json") == {"base/1": [0], "base/2": [0, 5], "base/3": [0]}


@pytest.mark.thorough
def test_an_interrupted_pack_goes_on_in_packs_of_another_size(script):
    flags = ("--seconds=0.2", "--checkpoint-interval=1")
    command = words_of(script, "--agents-per-run", "3", flags=flags)
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: len(list(script.parent.rglob("checkpoint.pt"))) == 3)
    process.send_signal(signal.SIGKILL)  # so that nothing is linked
    process.wait()
    wait_for(lambda: not worker_processes(script))
    done = launch(script, "--agents-per-run", "2", flags=flags)
    assert done.returncode == 0, done.stderr
    assert ends(script) == {f"base/{seed}": (20, value(seed)) for seed in (1, 2, 3)}
    begun = runs(script, "begun.json")
    assert all(len(steps) == 2 and steps[1] > 0 for steps in begun.values()), begun


def worker_processes(script):
    """Whether processes of the script run."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text())
        except OSError:
            continue
    return [line for line in lines if f"--run-dir={script.parent}" in line]


@pytest.mark.thorough
def test_tuning_packs_trials_and_trains_no_step_twice(script):
    script.write_text(POPULATION.replace('"episodic_return": population.values[i]', f'"episodic_return": {SCORE}'))
    words = ["--range", "learning-rate", "0.5", "8", "log", "--trials", "9", "--seeds", "1", "2"]
    done = tune(script, *words, "--agents-per-run", "6")
    assert done.returncode == 0, done.stderr
    begun = runs(script, "begun.json").values()
    assert sorted(map(tuple, begun)) == 12 * [(0,)] + 4 * [(0, 2)] + 2 * [(0, 2, 6)]
    assert processes(script) == 3 + 1 + 1
    rates = {own[-1]["learning_rate"]: own[-1]["global_step"] for own in runs(script, "summary.json").values()}
    best = sorted(rates, key=lambda rate: abs(rate - 3))
    assert [rates[rate] for rate in best] == [18, 6, 6] + 6 * [2] and 1.0 in rates


@pytest.mark.thorough
def test_a_trial_that_diverges_counts_as_the_worst(script):
    """Its bracket is over all the same; the return of trial 0, the script's default, is the best."""
    frozen = POPULATION.replace("population.seeds[i] == 2", "rate != 1").replace("step == 7", "step == 2")
    script.write_text(frozen.replace('"episodic_return": population.values[i]', f'"episodic_return": {SCORE}'))
    words = ["--range", "learning-rate", "0.5", "8", "log", "--trials", "3", "--rungs", "2", "--seeds", "1"]
    done = tune(script, *words, "--agents-per-run", "3", flags=("--total-timesteps=18", "--freeze"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("counts as the worst: seed 1 has diverged") == 2
    assert "--learning-rate=1.0" in done.stdout
    again = tune(script, *words, "--agents-per-run", "3", flags=("--total-timesteps=18", "--freeze"))
    assert again.returncode == 0 and len(runs(script, "begun.json")) == 3


SCORE = "population.step - abs(population.rates[i] - 3)"


@pytest.mark.thorough
def test_packed_runs_of_dqn_are_those_of_the_single_script(tmp_path):
    """Learner, episodes and returns, bit by bit, of agents with other seeds and learning rates; in two parts."""
    flags = ["--total-timesteps=600", "--learning-starts=100", "--threads=1", "--no-cuda", "--no-compile"]
    population, single = (orders.Script(ROOT / "leanrl" / f"dqn{kind}_torchcompile.py") for kind in ("_population", ""))
    todo = [
        orders.order(population, None, {"learning-rate": rate}, seed, flags, tmp_path / "packed", 1)
        for rate in ("1e-3", "1e-4")
        for seed in (1, 2)
    ]
    parts = []
    for until in (300, None):
        for order in todo:
            order.until = until
            order.place()
        (pack,) = packs.packed(todo, 4)
        assert worker.train(pack.message("", {}, os.devnull)) == {"status": "done"}
        parts.append([torch.load(worker.newest_checkpoint(order.folder), weights_only=True) for order in todo])
        assert all(run.done_step(order.folder) == order.steps for order in todo)
    for i, order in enumerate(todo):
        alone = orders.order(
            single, None, {"learning-rate": order.flags[2].split("=")[1]}, order.seed, flags, tmp_path / "single", 1
        )
        for until, packed in zip((300, None), parts, strict=True):
            alone.until = until
            alone.place()
            assert worker.train(alone.message("", {}, os.devnull)) == {"status": "done"}
            checkpoint = torch.load(worker.newest_checkpoint(alone.folder), weights_only=True)
            for name in ("global_step", "episodes", "returns", "learner"):
                assert_equal(packed[i][name], checkpoint[name])


def test_a_flag_with_several_values_is_left_to_the_grid(script, capsys):
    with pytest.raises(SystemExit) as error:
        run.main([str(script), "--out", str(script.parent), "--", "--learning-rate", "1", "2"])
    assert error.value.code == 2
    remedy = "give one value; --grid and python -m launch tune take several"
    assert capsys.readouterr().err == f"error: --learning-rate 1.0 2.0: {remedy}\n"


@pytest.mark.parametrize(
    ("name", "agents", "said"),
    [
        ("dqn_population_torchcompile", "0", "--agents-per-run 0: give at least 1"),
        ("dqn", "2", "--agents-per-run 2: give a population script; dqn.py trains one agent"),
    ],
)
def test_a_number_of_agents_that_cannot_be_is_refused(name, agents, said, capsys):
    with pytest.raises(SystemExit) as error:
        run.main([f"leanrl/{name}.py", "--agents-per-run", agents])
    assert error.value.code == 2 and capsys.readouterr().err == f"error: {said}\n"
