"""`python -m launch` on Ray: runs equal those by hand, run once, and survive crashes, interrupts and dead machines."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ALL, Terminal, assert_same_state, stem, wait_for
from helpers import ROOT, error_of, python, refused

pytest.importorskip("ray", reason="pip install -r requirements/launch.txt")

from common import scripts
from launch import board, orders, report, run, worker
from launch import tune as tuning

OTHER_RUN = "another edition of the script or other flags ran there; give another folder, or delete this one"
pytestmark = pytest.mark.usefixtures("ray_lock")
STAND_IN = """
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import tyro


@dataclass
class Args:
    env_id: str = "Walk-v0"
    seed: int = 1
    total_timesteps: int = 20
    learning_rate: float = 1.0
    threads: int = 0
    checkpoint_interval: int = 0
    run_dir: str = "runs"
    resume: str | None = None
    env_file: str = ""
    seconds: float = 0.0
    crash: bool = False


class Run:
    def __init__(self, args):
        self.args, self.step, self.value, self.over = args, 0, args.seed, False
        self.folder = Path(args.run_dir) / f"run__{args.seed}__{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
        self.folder.mkdir(parents=True)
        signal.signal(signal.SIGTERM, self.stop)
        if args.resume:
            self.step, self.value = json.loads((Path(args.resume) / "checkpoint.pt").read_text())
        (self.folder / "begun.json").write_text(str(self.step))

    def stop(self, *_):
        self.over = True

    def unfinished(self):
        interval = self.args.checkpoint_interval
        if interval and self.step and self.step % interval == 0:
            self.save()
        return self.step < self.args.total_timesteps and not self.over

    def save(self):
        (self.folder / "tmp").write_text(json.dumps([self.step, self.value]))
        os.replace(self.folder / "tmp", self.folder / "checkpoint.pt")


def prepare(args):
    for name in ("learning_rate", "seed"):
        if not getattr(args, name) >= 0:
            print(f"error: --{name.replace('_', '-')} {getattr(args, name)}: give a number from 0", file=sys.stderr)
            sys.exit(2)


def train(args, on_start=lambda run: None):
    prepare(args)
    run = Run(args)
    on_start(run)
    while run.unfinished():
        run.step += 1
        run.value = (run.value * 7 + run.step * args.learning_rate) % 1000
        bar = f"training: {run.step}/{args.total_timesteps} [00:01<00:02, 10.5step/s, return={run.value}]"
        print(bar, end="\\r", file=sys.stderr, flush=True)
        time.sleep(args.seconds)
        if args.crash and run.step == 7 and args.seed == 2:
            sys.exit("error: out of luck")
    run.save()
    summary = {"global_step": run.step, "episodic_return": run.value, "wall_seconds": 1.0}
    (run.folder / "summary.json").write_text(json.dumps(asdict(args) | summary))
    if run.over:
        sys.exit(128 + signal.SIGTERM)


def parse_args():
    return tyro.cli(Args)


if __name__ == "__main__":
    train(parse_args())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "walk.py"
    path.write_text(STAND_IN)
    return path


def words_of(script, *words, seeds=(1, 2, 3), flags=()):
    seeds = map(str, seeds)
    own = ["run", str(script), "--out", str(script.parent / "runs"), "--seeds", *seeds, *words]
    return [sys.executable, "-m", "launch", *own, "--", *flags]


def launch(script, *words, **settings):
    """The finished process of a `launch run`, with one core a run on two cores."""
    return python(*words_of(script, *words, **settings)[1:], timeout=300)


def values(folder):
    """What the runs under a folder ended with, by their place in it; of resumed ones the last."""
    found = {}
    for path in sorted(folder.rglob("summary.json"), key=lambda path: json.loads(path.read_text())["global_step"]):
        summary = json.loads(path.read_text())
        found[str(path.parents[1].relative_to(folder))] = (summary["global_step"], summary["episodic_return"])
    return found


def by_hand(script, seed, *flags):
    """What the script ends with when somebody starts it."""
    folder = script.parent / f"by_hand_{seed}_{'_'.join(flags)}"
    python(script, f"--seed={seed}", f"--run-dir={folder}", *flags, check=True)
    ((_, value),) = values(folder.parent / folder.name).values()
    return value


def starts(folder):
    """The steps at which the attempts of each run began."""
    found = {}
    for path in sorted(folder.rglob("begun.json")):
        found.setdefault(str(path.parents[1].relative_to(folder)), []).append(int(path.read_text()))
    return found


def processes(folder):
    """Processes of scripts that run in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"--run-dir={folder}" in command:
            found.append(command)
    return found


@pytest.mark.thorough
def test_a_grid_is_run_as_by_hand_and_only_once(script):
    done = launch(script, "--grid", "learning-rate", "1", "2", seeds=(1, 2))
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stderr.splitlines() if line.startswith("done")) == [
        f"done: Walk-v0 learning-rate={rate} seed {seed}" for rate in (1, 2) for seed in (1, 2)
    ]
    folder = script.parent / "runs" / "walk"
    found = values(folder)
    for seed in (1, 2):
        for rate in ("1", "2"):
            expected = by_hand(script, seed, f"--learning-rate={rate}")
            assert found[f"Walk-v0/learning-rate={rate}/{seed}"] == (20, expected)
    assert "| Walk-v0 | learning-rate=1 |" in done.stdout and "| 20 | |" in done.stdout  # it logs no speed
    assert "<table>" in (folder / "results.html").read_text()
    copies = sorted(folder.rglob("walk.py"))
    assert len(copies) == 4 and copies[0].read_text() == STAND_IN

    again = launch(script, "--grid", "learning-rate", "1", "2", seeds=(1, 2, 3))
    assert again.returncode == 0 and set(map(len, starts(folder).values())) == {1}  # only the third seed is new
    assert len(starts(folder)) == 6


@pytest.mark.thorough
def test_a_crash_ends_one_run_alone_and_is_tried_again(script):
    crashed = launch(script, flags=("--crash",))
    assert crashed.returncode == 1
    assert "failed: Walk-v0 base seed 2: error: out of luck" in crashed.stderr.splitlines()
    assert "error: 1 of 3 runs failed; run the same command to try them again" in crashed.stderr.splitlines()
    folder = script.parent / "runs" / "walk"
    assert set(values(folder)) == {"Walk-v0/base/1", "Walk-v0/base/3"}
    assert launch(script, flags=("--crash",)).returncode == 1
    # Six is the last checkpoint before the crash: not even a crash starts over.
    assert starts(folder)["Walk-v0/base/2"] == [0, 6] and len(starts(folder)["Walk-v0/base/1"]) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_an_interrupt_ends_runs_with_their_checkpoints_and_the_command_goes_on(script, kind, hangups):
    flags = ("--seconds", "0.3", "--checkpoint-interval", "1000")
    folder = script.parent / "runs" / "walk"
    command = words_of(script, flags=flags)
    if kind == signal.SIGHUP:
        terminal = Terminal(command, cwd=ROOT)
        terminal.wait_for(lambda: any(steps > 3 for steps in steps_now(folder)))
        terminal.close()
        assert terminal.process.wait(60) == 130
    else:
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
        wait_for(lambda: any(steps > 3 for steps in steps_now(folder)))
        os.killpg(process.pid, kind)  # as a terminal and a scheduler do: to all processes of the group
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert "run the same command again to continue" in err.splitlines() and "Traceback" not in err
    assert not processes(folder)
    interrupted = values(folder)
    assert interrupted and all(0 < step < 20 for step, _ in interrupted.values())
    assert launch(script, flags=flags).returncode == 0
    for seed in (1, 2, 3):
        name = f"Walk-v0/base/{seed}"
        assert values(folder)[name] == (20, by_hand(script, seed))
        assert starts(folder)[name] == [0] + ([interrupted[name][0]] if name in interrupted else [])


def steps_now(folder):
    """The steps that the runs under `folder` have come to."""
    shown = [board.progress(log).get("step", "0/20") for log in folder.rglob(worker.LOG)]
    return [int(step.split("/")[0]) for step in shown]


@pytest.fixture
def cluster():
    """Three machines with a core each, beside one that only runs the command."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.mark.thorough
def test_a_machine_that_dies_costs_no_run_and_no_start_over(script, cluster):
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    seeds = range(1, 13)
    flags = ("--seconds", "0.1", "--checkpoint-interval", "2")
    command = words_of(script, "--address", cluster.address, seeds=seeds, flags=flags)
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    folder = script.parent / "runs" / "walk"
    wait_for(lambda: len(list(folder.rglob("checkpoint.pt"))) >= 3)
    cluster.remove_node(nodes[0], allow_graceful=False)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    begun = starts(folder)
    resumed = {name: steps for name, steps in begun.items() if len(steps) > 1}
    assert len(resumed) == 1 and all(steps[0] == 0 < steps[1] for steps in resumed.values()), begun
    found = values(folder)
    assert len(found) == 12
    for seed in seeds:
        assert found[f"Walk-v0/base/{seed}"] == (20, by_hand(script, seed))


def placed(script):
    """The order for a run with seed 5, in its folder."""
    order = orders.order(orders.Script(script), None, {}, 5, [], script.parent / "runs", 1)
    order.place()
    return order


def test_a_run_that_starts_after_the_interrupt_ends_at_once(script, tmp_path):
    """The command sees that it has started, and so waits for it."""
    stop = tmp_path / "stop"
    stop.write_text("stop")
    order = placed(script)
    assert worker.train(order.message("this", {}, stop)) == {"status": "interrupted"}
    assert worker.started(order.folder)["session"] == "this" and not (order.folder / worker.LOG).exists()


def test_a_run_ends_at_the_step_that_it_is_to_stop_at(script, tmp_path):
    """And its schedules are those of the whole run; resumed, it equals one that was never interrupted."""
    script = orders.Script(script)
    for until in (8, None):
        order = orders.order(script, None, {}, 5, [], tmp_path / "parts", 1, until=until)
        order.place()
        assert worker.train(order.message("", {}, os.devnull)) == {"status": "done"}
        assert worker.done_step(order.folder) == (until or 20)
    assert starts(tmp_path / "parts" / "walk") == {"Walk-v0/base/5": [0, 8]}
    assert values(tmp_path / "parts" / "walk")["Walk-v0/base/5"] == (20, by_hand(script.path, 5))


def test_a_run_that_ends_before_its_steps_is_not_done(script):
    script.write_text(STAND_IN.replace("while run.unfinished():", "while run.unfinished() and run.step < 7:"))
    order = placed(script)
    outcome = worker.train(order.message("", {}, os.devnull))
    assert outcome["status"] == "failed" and outcome["line"].startswith("it ended without an error at step 7 of 20; ")
    assert worker.done_step(order.folder) == 0 and report.result(order) is None


def test_a_run_resumes_from_the_checkpoint_with_the_most_steps(tmp_path):
    """Which is not always the newest file: folders are copied."""
    for name, step in (("a", 300), ("b", 900), ("c", 600), ("d", None)):
        (tmp_path / name).mkdir()
        torch.save({"global_step": step} if step else [], tmp_path / name / "checkpoint.pt")
    assert worker.furthest_checkpoint(tmp_path) == tmp_path / "b" / "checkpoint.pt"


def test_files_that_a_crash_has_cut(script, capsys, monkeypatch):
    """The order is the old one or the new one; where a file is damaged the run is made again, or a line says so."""
    order = placed(script)
    whole = (order.folder / worker.ORDER).read_text()

    def write_half(content, file):
        file.write(json.dumps(content)[:9])
        raise OSError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(json, "dump", write_half)
        order.place()
    assert (order.folder / worker.ORDER).read_text() == whole
    for name in (worker.ORDER, worker.DONE, worker.STARTED):
        (order.folder / name).write_text('{"flag')
    assert worker.done_step(order.folder) == 0 and worker.started(order.folder) == {}
    assert refused(capsys, order.place) == f"{order.folder}: {OTHER_RUN}"


def test_minutes_are_those_of_all_attempts(script):
    order = placed(script)
    for step, seconds in ((8, 60), (20, 120)):
        add_summary(order.folder / str(step), global_step=step, episodic_return=step, wall_seconds=seconds)
    worker.write(order.folder / worker.DONE, 20)
    result = report.result(order)
    assert result["wall_seconds"] == 180 and result["episodic_return"] == 20
    (row,) = report.table(report.grouped([order])).rows
    assert row[-1] == "3.0"


def test_a_seed_that_has_ended_no_episode_is_named():
    """It has no part in the mean."""
    curves = {1: [[10, 1, 4.0], [20, 2, 8.0]], 2: [], 3: [[20, 2, 2.0]]}
    parts = {"steps_per_second": None, "wall_seconds": 60, "global_step": 20}
    runs = [{"seed": seed, "curve": curve} | parts for seed, curve in curves.items()]
    (row,) = report.table({"Env-v0": {"base": runs}}).rows
    assert row[2:4] == ["5.0 ± 4.2", "1: 8.0, 2: no episode, 3: 2.0"]
    (row,) = report.table({"Env-v0": {"base": runs[1:2]}}).rows
    assert row[2:4] == ["no episode has ended", "2: no episode"]


def add_summary(folder, **content):
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grid learning_rat 1", "--grid learning_rat: walk.py has no such flag; give learning-rate"),
        ("--grid learning-rate", "--grid learning-rate: give its values after it"),
        ("--grid seed 1", "--grid seed: leave it out; --seeds sets it"),
        ("--grid learning-rate fast", "walk.py does not accept --learning-rate=fast; see python .*--help"),
        ("-- --learning-rat 1", "--learning-rat: walk.py has no such flag; give learning-rate"),
        ("-- --seed 1", "--seed: leave it out; --seeds sets it"),
        ("-- --resume x", "--resume: leave it out; launch resumes"),
        ("--grid threads 1 --grid threads 2", "--grid threads: give it once, with all of its values"),
        ("--grid threads 1 -- --threads=2", "--threads=2: leave it out here; .*"),
        ("--env-ids Walk-v0 ''", "--env-ids '': name an environment, or leave this out"),
        ("--seeds", "--seeds : give at least one"),
        ("--seeds 1 2 1", "--seeds 1: give it once"),
        ("--seeds -1", "--seeds -1: give a number from 0 to 4294967295"),
        ("--seeds 1 4294967296", "--seeds 4294967296: give a number from 0 to 4294967295"),
        ("--cpus-per-run nan", "--cpus-per-run nan: give a finite number from 0"),
        ("--gpus-per-run inf", "--gpus-per-run inf: give a finite number from 0"),
        ("--grid learning-rate 1 nan", "--learning-rate nan: give a number from 0"),
        ("-- --learning-rate -2", "--learning-rate -2.0: give a number from 0"),
        (
            "--env-ids ALE/Pong ALE-Pong",
            r"ALE-Pong base seed 1: its folder would be that of ALE/Pong base seed 1, .*/ALE-Pong/base/1; .*",
        ),
        (
            "--grid env-file a/b a-b",
            "Walk-v0 env-file=a-b seed 1: its folder would be that of Walk-v0 env-file=a/b seed 1, .*",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(script, words, said, capsys):
    line = refused(capsys, run.main, [str(script), "--out", str(script.parent / "runs"), *shlex.split(words)])
    assert re.fullmatch(said, line), line
    assert not (script.parent / "runs").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--cpus-per-run 9999", r"--cpus-per-run 9999.0: give at most \d+, as many as the largest machine has"),
        ("--gpus-per-run 1", r"--gpus-per-run 1.0: give at most 0, as many as the largest machine has"),
        ("--address 127.0.0.1:1", r"--address 127.0.0.1:1: cannot connect to a Ray cluster there \(.*refused\)"),
    ],
)
def test_what_the_cluster_has_not_is_refused(script, words, said):
    line = error_of(launch(script, *words.split()))
    assert re.fullmatch(said, line), line
    assert [path.name for path in (script.parent / "runs" / "walk").iterdir()] == ["lock"]


def test_ray_that_does_not_start_here_says_why(script):
    line = error_of(python(*words_of(script)[1:], env=os.environ | {"RAY_TMPDIR": "/sys/none"}))
    assert re.fullmatch(r"Ray does not start on this machine \(PermissionError: .*\); doc/many_runs.md shows .*", line)


HEAD = """
from ray.cluster_utils import Cluster

made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
print(made.address, flush=True)
input()
made.shutdown()
"""


def test_a_cluster_with_a_token_lets_in_who_sends_it(script):
    """As doc/cluster.md starts it; without the variable, Ray sends no token and says so."""
    home = os.environ | {"HOME": str(script.parent)}
    token = home | {"RAY_AUTH_MODE": "token"}
    assert python("-m", "ray.scripts.scripts", "get-auth-token", "--generate", env=home).returncode == 0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HEAD], env=token, **pipes) as head:
        address = head.stdout.readline().strip()
        words = words_of(script, "--address", address, seeds=(1,))[1:]
        without = python(*words, env=home | {"RAY_AUTH_MODE": "disabled"})
        done = python(*words, env=token)
        head.communicate("\n")
    line = without.stderr.splitlines()[-1]
    assert without.returncode == 2 and line.startswith(f"error: --address {address}: cannot connect to a Ray cluster")
    assert "RAY_AUTH_MODE is currently 'disabled' (not 'token')" in line
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [("sac_population_torchcompile", "this script trains a population"), ("none", "this is no Python file")],
)
def test_what_is_no_script_of_one_agent_is_refused(name, said, tmp_path, capsys):
    path = ROOT / "leanrl" / f"{name}.py"
    assert refused(capsys, run.main, [str(path), "--out", str(tmp_path)]).startswith(f"launch {path}: {said}")


def test_a_long_setting_has_a_folder_of_its_own(script, tmp_path):
    labels = [f"env-file={'ä' * 150}{end}" for end in "ab"]
    made = [orders.order(orders.Script(script), None, {}, 1, [], tmp_path, 1, label=label) for label in labels]
    for order in made:
        order.place()
    assert made[0].folder != made[1].folder and orders.folder_name("a/b=1, c=2") == "a-b=1,c=2"


@pytest.mark.thorough
def test_another_edition_of_a_script_needs_another_folder(script):
    assert launch(script, seeds=(1,)).returncode == 0
    script.write_text(STAND_IN.replace("* 7", "* 9"))
    folder = script.parent / "runs" / "walk" / "Walk-v0" / "base" / "1"
    assert error_of(launch(script, seeds=(1,))) == f"{folder}: {OTHER_RUN}"
    assert len(values(folder.parent)) == 1


def test_without_ray_one_line_says_what_to_install(script):
    hide = "import sys; sys.modules['ray'] = None; sys.argv[0] = 'launch'\n"
    hide += "from launch.__main__ import main; main(sys.argv[1:])"
    line = error_of(python("-c", hide, *words_of(script)[3:]))
    assert line.startswith("python -m launch: pip install -r requirements/launch.txt (")


def test_a_machine_without_the_folder_says_so(tmp_path):
    outcome = worker.train({"folder": str(tmp_path / "elsewhere")})
    assert outcome["status"] == "failed" and "on a file system that all machines share" in outcome["line"]


def test_progress_is_what_the_last_bar_says(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(
        "training:   5%|x | 50/1000 [00:01<00:20, 45.0step/s]\r"
        "training:  32%|x | 316/1000 [00:53<35:17, 2.00s/step, return=-6815.2]\rwarning: hot\n"
    )
    assert board.progress(log) == {"step": "316/1000", "return": "-6815.2", "steps/s": "0.50", "time left": "35:17"}
    assert worker.last_line(log) == "warning: hot"
    assert board.progress(tmp_path / "none") == {}


TUNED = ["--range", "learning-rate", "0.5", "8", "log", "--trials", "9", "--seeds", "1", "2"]


@pytest.fixture
def hill(script):
    """A script whose return is best at a learning rate of 3, at every step."""
    script.write_text(STAND_IN.replace('"episodic_return": run.value', f'"episodic_return": {SCORE}'))
    return script


SCORE = "run.step - abs(args.learning_rate - 3)"


def tune(script, *words, flags=("--total-timesteps=18",)):
    return python("-m", "launch", "tune", script, "--out", script.parent / "runs", *words, "--", *flags, timeout=300)


@pytest.mark.thorough
def test_tuning_trains_the_best_third_on_and_no_step_twice(hill):
    done = tune(hill, *TUNED)
    assert done.returncode == 0, done.stderr
    folder = hill.parent / "runs" / "walk"
    begun = starts(folder)
    assert sorted(map(tuple, begun.values())) == 12 * [(0,)] + 4 * [(0, 2)] + 2 * [(0, 2, 6)]
    found = {}  # learning rate and last step by trial
    for path in folder.rglob("summary.json"):
        summary = json.loads(path.read_text())
        trial = path.parents[2].name
        found[trial] = (summary["learning_rate"], max(summary["global_step"], found.get(trial, (0, 0))[1]))
    ranked = sorted(found.values(), key=lambda trial: abs(trial[0] - 3))
    assert [steps for _, steps in ranked] == [18, 6, 6] + 6 * [2]
    assert len({rate for rate, _ in ranked}) == 9 and 1.0 in {rate for rate, _ in ranked}  # the script's default
    rates = re.findall(r"--learning-rate=(\S+)", done.stdout)
    assert [float(rate) for rate in rates] == [ranked[0][0]]
    assert "return at 2 steps | return at 6 steps | return at 18 steps" in done.stdout
    assert "<svg" in (folder / "results.html").read_text()

    again = tune(hill, *TUNED)
    assert again.returncode == 0 and again.stdout == done.stdout and starts(folder) == begun
    more = tune(hill, *TUNED, "--trials", "11")
    assert more.returncode == 0 and len(starts(folder)) == 22
    assert all(starts(folder)[name] == steps for name, steps in begun.items())
    still_more = tune(hill, *TUNED, "--trials", "14")
    assert still_more.returncode == 0, still_more.stderr
    rates = [json.loads(path.read_text())["learning_rate"] for path in folder.rglob("1/*/summary.json")]
    assert len(set(rates)) == 14  # none is proposed twice
    other = tune(hill, *TUNED, "--rungs", "2")
    assert other.returncode == 2 and "has another search; give another folder, or delete this one" in other.stderr


@pytest.mark.thorough
def test_tuning_goes_on_after_an_interrupt(hill, hangups):
    flags = ("--total-timesteps=18", "--seconds=0.2")
    command = ["tune", str(hill), "--out", str(hill.parent / "runs"), *TUNED, "--", *flags]
    process = subprocess.Popen([sys.executable, "-m", "launch", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    folder = hill.parent / "runs" / "walk"
    wait_for(lambda: len(list(folder.rglob("summary.json"))) >= 19)  # in the second rung
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err
    before = starts(folder)
    done = tune(hill, *TUNED, flags=flags)
    assert done.returncode == 0, done.stderr
    after = starts(folder)
    assert all(
        after[name][: len(steps)] == steps and after[name] == sorted(after[name]) for name, steps in before.items()
    )
    assert sorted(steps for steps, _ in values(folder).values()) == 12 * [2] + 4 * [6] + 2 * [18]


@pytest.mark.thorough
def test_a_trial_that_diverges_counts_as_the_worst(hill):
    """Its bracket is over all the same; the return of trial 0, the script's default, is the best."""
    diverges = "run.step == 2 and args.learning_rate != 1", NAN_LINE
    text = hill.read_text().replace("run.step == 7 and args.seed == 2", diverges[0])
    hill.write_text(text.replace("error: out of luck", diverges[1]))
    words = ["--range", "learning-rate", "0.5", "8", "log", "--trials", "3", "--rungs", "2", "--seeds", "1"]
    flags = ("--total-timesteps=18", "--crash")
    done = tune(hill, *words, flags=flags)
    assert done.returncode == 0 and "--learning-rate=1.0" in done.stdout, done.stderr
    assert done.stderr.count("counts as the worst: seed 1 has diverged") == 2
    begun = starts(hill.parent / "runs" / "walk")
    assert sorted(map(tuple, begun.values())) == [(0,), (0,), (0, 6)]
    again = tune(hill, *words, flags=flags)
    assert again.returncode == 0 and starts(hill.parent / "runs" / "walk") == begun


def bracket(script, outcomes, seeds=(1,)):
    """A bracket that has come to its first rung: a return per trial and seed, or the last line of its log."""
    args = tuning.Args(script=script, seeds=seeds, trials=len(outcomes) // len(seeds), rungs=3, out=script.parent)
    kind = orders.Script(script)
    space = {"learning-rate": tuning.FloatDistribution(0.5, 8)}
    search = tuning.Search(args, kind, space, ["--total-timesteps=18"], script.parent)
    (own,) = search.brackets()
    for order, outcome in zip(own.orders(), outcomes, strict=True):
        order.place()
        (order.folder / worker.LOG).write_text(f"{outcome}\n" if isinstance(outcome, str) else "")
        if not isinstance(outcome, str):
            add_summary(order.folder / "run", global_step=order.steps, episodic_return=outcome)
            worker.write(order.folder / worker.DONE, order.steps)
    return own


NAN_LINE = "error: step 2: qf_loss is nan; usual causes: NaN in observations"
NAN = f"training: 0/18 [00:01<00:02, 10.5step/s]\r{NAN_LINE}\nwandb: bye"
EXIT = "error: step 2: the environment ended the program with sys.exit(None)"


@pytest.mark.parametrize(
    ("outcomes", "going_on"),
    [
        ([NAN, 3.0, NAN, 5.0, 4.0, 2.0, NAN, NAN, 1.0], [3, 4, 1]),
        ([NAN, NAN, NAN, NAN, 4.0, None, NAN, NAN, NAN], [4, 5]),  # one that has not ended an episode may yet
        ([NAN] * 9, []),
        ([2.0, 5.0, 1.0, 4.0, 3.0], [1, 3]),  # a third is rounded up
        ([2.0, NAN, 1.0, NAN, NAN], [0, 2]),
        ([2.0, NAN, 1.0, 4.0], [3, 0]),
        ([NAN, 1.0], [1]),
        ([NAN, 3.0, NAN, 5.0, 4.0, 2.0, "error: out of luck", NAN, 1.0], None),
        ([NAN, 3.0, NAN, 5.0, 4.0, 2.0, EXIT, NAN, 1.0], None),
    ],
)
def test_trials_that_have_diverged_do_not_go_on(outcomes, going_on, script, capsys):
    """And a run that has failed otherwise leaves its bracket unfinished, to be tried again."""
    own = bracket(script, outcomes)
    own.compare()
    assert own.numbers == (going_on or [])
    diverged = [number for number, outcome in enumerate(outcomes) if outcome == NAN]
    lines = [f"trial {number} counts as the worst: seed 1 has diverged" for number in diverged]
    assert capsys.readouterr().err.splitlines() == ([] if going_on is None else lines)
    over = [trial.number for trial in own.search.study.trials if trial.state.is_finished()]
    assert over == ([] if going_on is None else [n for n in range(len(outcomes)) if n not in going_on])


def test_a_bracket_of_five_trials_follows_a_full_one(script):
    search = bracket(script, [1.0]).search
    search.args.trials = 15
    assert [own.numbers for own in search.brackets()] == [[0], [*range(1, 10)], [*range(10, 15)]]


def test_a_seed_that_has_ended_no_episode_makes_its_trial_the_worst(script):
    own = bracket(script, [3.0, 5.0, 9.0, None, 5.0, 5.0], seeds=(1, 2))
    assert [own.search.value(number, 0) for number in own.numbers] == [4.0, tuning.WORST, 5.0]


@pytest.mark.parametrize("script", ALL, ids=stem)
def test_scripts_end_at_nan_with_the_line_that_tuning_knows(script):
    with pytest.raises(SystemExit) as ended:
        script.Run.end_at_nan(SimpleNamespace(step=3), "qf_loss is nan")
    assert worker.DIVERGED.match(ended.value.code)


def test_the_value_at_a_rung_is_that_of_the_attempt_which_ended_there(script):
    """Of a trial that has gone on to the next one, too."""
    own = bracket(script, [3.0, 5.0])
    order = own.search.order(1, 1, 1)
    add_summary(order.folder / "later", global_step=6, episodic_return=-9.0)
    worker.write(order.folder / worker.DONE, 6)
    assert [own.search.value(number, 0) for number in (0, 1)] == [3.0, 5.0]
    assert [own.search.value(number, 1) for number in (0, 1)] == [None, -9.0]


@pytest.mark.parametrize("cut", [1, 12, 25])
def test_a_search_goes_on_where_a_crash_has_cut_its_journal(cut, script):
    own = bracket(script, [3.0, 5.0, 4.0])
    own.compare()
    journal = script.parent / "journal.log"
    os.truncate(journal, journal.stat().st_size - cut)
    made = (own.search.args, own.search.script, own.search.space, own.search.flags, own.search.folder)
    for _ in range(2):  # the second one reads what the first one has added
        (again,) = tuning.Search(*made).brackets()
        assert again.numbers == [0, 1, 2]
    again.compare()
    assert again.numbers == [1]


@pytest.mark.parametrize("target", ["journal.log", "/a/folder/that/was/copied/journal.log"])
def test_a_search_goes_on_where_a_kill_has_left_a_lock(target, script):
    """Optuna waits half a minute for the lock of a program that is gone, and forever if the folder has moved."""
    own = bracket(script, [3.0, 5.0, 4.0])
    (script.parent / "journal.log.lock").symlink_to(target)
    own.compare()
    assert own.numbers == [1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "python -m launch tune: give what to search for by --range, --choice or --space"),
        ("--range learning-rat 1 2", "--range learning-rat 1 2: walk.py has no such flag; give learning-rate"),
        ("--range learning-rate 1", "--range learning-rate 1: give a flag, its smallest and largest value, .*"),
        ("--range learning-rate 0 1 log", "--range learning-rate 0 1 log: .*log.*"),
        ("--range learning-rate 2 1", "--range learning-rate 2 1: .*"),
        ("--choice threads 1 many", "walk.py does not accept --threads=many; see python .* --help"),
        ("--choice threads", "--choice threads: give its values"),
        ("--choice threads 1 --env-id ''", "--env-id '': name an environment, or leave this out"),
        ("--space none.toml", "--space none.toml: give a TOML file .*"),
        ("--choice threads 1 --trials 0", "--trials 0: give a finite number from 1"),
        ("--choice threads 1 --search-seed 5000000000", "--search-seed 5000000000: give a number from 0 to 4294967295"),
        ("--choice threads 1 1", "--choice threads: give each value once"),
        ("--choice threads 1 --seeds 1 1", "--seeds 1: give it once"),
        ("--choice threads 1 --seeds -1", "--seeds -1: give a number from 0 to 4294967295"),
        ("--choice seed 1 2", "--choice seed: leave it out; --seeds sets it"),
        ("--range seed 1 9", "--range seed 1 9: leave it out; --seeds sets it"),
        ("--choice env_id Walk-v0", "--choice env_id: leave it out; --env-id sets it"),
        ("--choice total-timesteps 9", "--choice total-timesteps: leave it out; give it after the two .*"),
        ("--choice threads 1 -- --env-id=A", "--env-id=A: leave it out; --env-id sets it"),
        (
            "--range learning-rate 1 2 --choice learning_rate 1",
            "--choice learning_rate: learning-rate is given twice; leave one of them out",
        ),
        ("--range learning-rate 1 inf", "--range learning-rate 1 inf: give finite numbers"),
        ("--range learning-rate nan 1", "--range learning-rate nan 1: give finite numbers"),
        ("--range learning-rate -1 1", "--learning-rate -1.0: give a number from 0"),
        ("--choice learning-rate 1 nan", "--learning-rate nan: give a number from 0"),
        ("--range threads 1 2 -- --learning-rate=nan", "--learning-rate nan: give a number from 0"),
    ],
)
def test_bad_search_spaces_are_refused_in_one_line(script, words, said, capsys):
    line = refused(capsys, tuning.main, [str(script), "--out", str(script.parent / "runs"), *shlex.split(words)])
    assert re.fullmatch(said, line), line
    assert not (script.parent / "runs").exists()


NO_ENTRIES = ("low = 0.1", 'low = "a"\nhigh = 1', "low = 0\nhigh = true", "choices = 3", "low = 1\nhigh = 2\nlog = 1")


def test_a_search_space_can_be_a_file(script, tmp_path, capsys):
    path = tmp_path / "space.toml"
    path.write_text(
        "[learning-rate]\nlow = 0.1\nhigh = 1\nlog = true\n[threads]\nlow = 1\nhigh = 4\n[crash]\nchoices = [true]"
    )
    args = tuning.Args(space=path)
    space = tuning.search_space(orders.Script(script), args)
    assert repr(space["learning-rate"]) == "FloatDistribution(high=1.0, log=True, low=0.1, step=None)"
    assert repr(space["threads"]) == "IntDistribution(high=4, log=False, low=1, step=1)"
    remedy = "give low and high, both numbers, and optionally log = true, or a list of choices"
    faults = {entry: f"learning-rate: {remedy}" for entry in NO_ENTRIES}
    faults["low = nan\nhigh = 1"] = "learning-rate: give finite numbers"
    for entry, said in faults.items():
        path.write_text(f"[learning-rate]\n{entry}")
        assert refused(capsys, tuning.search_space, orders.Script(script), args) == f"--space {path}: {said}"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dqn", "dqn_torchcompile"])
def test_a_trial_at_a_rung_is_what_an_uninterrupted_run_was_there(name, tmp_path):
    """Networks, optimizer, replay buffer and random states, bit by bit; and what it resumes from is what it left.

    Of one algorithm: all scripts resume by the same text, and test_runs.py has all of them resume.
    """
    script = orders.Script(ROOT / "leanrl" / f"{name}.py")
    flags = ["--total-timesteps=900", "--learning-starts=100", "--threads=1", "--no-cuda"]
    module = scripts.load(name)
    numbers = {"total_timesteps": 900, "learning_starts": 100, "threads": 1, "checkpoint_interval": 300}
    args = module.Args(**numbers, cuda=False, run_dir=str(tmp_path / "through"))
    scripts.train(module, args, lambda run: keep_checkpoints(run, tmp_path))
    python(script.path, *flags, f"--run-dir={tmp_path / 'plain'}", check=True)
    (path,) = (tmp_path / "plain").glob("*/checkpoint.pt")
    without, with_checkpoints = (torch.load(file, weights_only=True) for file in (path, tmp_path / "900.pt"))
    assert_same_state(without["learner"], with_checkpoints["learner"])

    order = orders.order(script, None, {}, 1, flags, tmp_path / "tuned", 1, until=300)
    order.place()
    assert worker.train(order.message("", {}, os.devnull)) == {"status": "done"}
    at_rung = torch.load(worker.furthest_checkpoint(order.folder), weights_only=True)
    uninterrupted = torch.load(tmp_path / "300.pt", weights_only=True)
    assert at_rung["global_step"] == uninterrupted["global_step"] == 300
    assert at_rung["returns"] == uninterrupted["returns"]
    assert_same_state(at_rung["learner"], uninterrupted["learner"])

    order.until = None
    assert worker.train(order.message("", {}, os.devnull)) == {"status": "done"}
    python(script.path, f"--resume={tmp_path / '300.pt'}", f"--run-dir={tmp_path / 'hand'}", check=True)
    (path,) = (tmp_path / "hand").glob("*/checkpoint.pt")
    tuned = torch.load(worker.furthest_checkpoint(order.folder), weights_only=True)
    assert tuned["global_step"] == 900
    assert_same_state(tuned["learner"], torch.load(path, weights_only=True)["learner"])

    (order.folder / worker.DONE).unlink()  # as if it had been killed after its last checkpoint
    for path in order.folder.glob("*/summary.json"):
        path.unlink()
    assert worker.train(order.message("", {}, os.devnull)) == {"status": "done"}
    assert worker.summaries(order.folder)


def keep_checkpoints(run, folder):
    """Copy each checkpoint of a run to folder/<step>.pt."""
    save = run.save

    def save_and_copy():
        save()
        shutil.copy(run.folder / "checkpoint.pt", folder / f"{run.step}.pt")

    run.save = save_and_copy


RECIPE = ROOT / "doc" / "examples" / "slurm" / "launch.sbatch"


def stand_ins(folder, srun):
    """A folder for PATH, with an `srun` and an `scontrol` that play one node."""
    (folder / "bin").mkdir()
    for name, body in {
        "srun": srun,
        "scontrol": f'[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> {folder}/scontrol.txt',
    }.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    soon = {"RAY_gcs_rpc_server_connect_timeout_s": "1", "RAY_py_gcs_connect_timeout_s": "1"}  # instead of after 40 s
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "TEST_FOLDER": str(folder), "PATH": path}
    return os.environ | job | soon


@pytest.mark.thorough
def test_the_slurm_recipe_is_queued_again_and_goes_on(script):
    """The recipe, with another command and port, on one node."""
    folder = script.parent
    environment = stand_ins(folder, srun='shift; exec "$@"')  # without its --cpus-per-task
    port = free_port()
    flags = ("--seconds", "0.5", "--checkpoint-interval", "1000")
    words = words_of(script, flags=flags)
    text = re.sub(r"(?m)^python -m launch .*(?= &$)", shlex.join(words), RECIPE.read_text())
    text = text.replace("6379", str(port)).replace("symmetric-run", "symmetric-run --num-cpus=2")
    assert shlex.join(words) in text
    (folder / "job.sh").write_text(text)
    job = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    raylet = ["pgrep", "-x", "raylet"]  # of a test before, still ending
    wait_for(lambda: subprocess.run(raylet, stdout=subprocess.DEVNULL).returncode)
    try:
        process = subprocess.Popen(["bash", str(folder / "job.sh")], **job)
        wait_for(lambda: process.poll() is not None or any(steps > 3 for steps in steps_now(folder)))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 130
        assert (folder / "scontrol.txt").read_text() == "requeue 7\n"
        interrupted = values(folder / "runs" / "walk")
        assert interrupted and all(0 < step < 20 for step, _ in interrupted.values())
        stop_ray(folder)
        assert subprocess.run(["bash", str(folder / "job.sh")], **job, timeout=200).returncode == 0
    finally:
        stop_ray(folder)
    assert (folder / "scontrol.txt").read_text() == "requeue 7\n"
    for seed in (1, 2, 3):
        assert values(folder / "runs" / "walk")[f"Walk-v0/base/{seed}"] == (20, by_hand(script, seed))


def test_the_slurm_recipe_ends_if_ray_does_not_start(tmp_path):
    environment = stand_ins(tmp_path, srun="exit 1")
    assert subprocess.run(["bash", str(RECIPE)], cwd=ROOT, env=environment, timeout=60).returncode == 1


def free_port():
    """Above those of Ray's workers, and below those that the system gives to whoever asks for any port."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def stop_ray(folder):
    """Kill what is left of the recipe's second command, by its environment: under Slurm that ends with the job."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TEST_FOLDER") == str(folder):
                process.kill()
                process.wait(30)
