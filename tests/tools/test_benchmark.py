"""Interleaved rounds, the matrix over them, and the monitor."""

import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from conftest import WITH_PYTHON, Terminal, wait_for
from helpers import RUN, error_of, python, refused

from benchmark.speed import matrix, monitor, rounds
from benchmark.studies import ablation, compile_modes, instrument_overhead, population, scaling, start, tips
from common import ROOT
from common.algorithms import MEASURED
from common.folders import locked
from common.scripts import load

LOCKED = (ablation, compile_modes, instrument_overhead)
MKL = ROOT / "tools" / "mkl_on_amd.py"
STUDIES = (*LOCKED, population, scaling, start, tips)


def program(path, body):
    """A stand-in for a training process: `body` may use `slices`, which have 10 steps each."""
    imports = f"import os, sys, time\nsys.path.append({str(ROOT)!r})\n"
    imports += "from common.slices import TimeSlices\n"
    path.write_text(f"{imports}slices = TimeSlices(600)\n{body}")
    return path


def test_slices_count_neither_waiting_nor_an_unfinished_one(tmp_path):
    """Slices end at the steps 15, 25 and 35; printing is no signal. Each step takes a second longer than the last."""
    body = """
class Waiting:
    def readline(self):
        now[0] += 100.0
        return sys.__stdin__.readline()

now = [0.0]
time.perf_counter = lambda: now[0]
sys.stdin = Waiting()
for seconds, step in enumerate((5, 10, 15, 25, 35, 38)):
    print("noise")
    slices(step)
    now[0] += seconds
print(slices.done, slices.waited, slices.steps_per_second, file=slices.channel)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, program(tmp_path / "program.py", body)], **pipes)
    for _ in range(4):
        assert len(process.stdout.readline().split()) == 2
        print(file=process.stdin, flush=True)
    done = [(10, 1.0), (10, 2.0), (10, 3.0)]
    assert process.communicate()[0] == f"{done} 400.0 {30 / 6.0}\n"


def test_a_process_that_nobody_drives_any_more_ends(tmp_path):
    path = program(tmp_path / "program.py", "slices(1)\nprint('alive', file=slices.channel)")
    done = python(path, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and done.stdout == "0 0.0\n"


@pytest.mark.parametrize("death", ["os._exit(3)", "slices(1)\nos._exit(3)", "slices(1)\nslices(11)\nos._exit(3)"])
def test_a_mode_that_dies_leaves_the_rest_of_its_round_alone(death, tmp_path):
    body = f"for step in range(0, 50, 10):\n    slices(step)\nopen({str(tmp_path / 'done')!r}, 'w')"
    modes = {"good": [str(program(tmp_path / "good.py", body))], "bad": [str(program(tmp_path / "bad.py", death))]}
    statuses = rounds.run_round(rounds.RoundArgs(run_dir=tmp_path / "runs"), modes, seed=1)
    assert statuses == {"good": 0, "bad": 3} and (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("speed", "status", "message"),
    [(7.5, 0, None), (7.5, 1, "a run has crashed"), (None, 0, "300 steps are too few")],
)
def test_only_runs_that_were_measured_give_speeds(speed, status, message, tmp_path):
    body = f"""
(folder,) = [Path(word.split("=")[1]) / "run" for word in sys.argv if word.startswith("--run-dir=")]
folder.mkdir()
(folder / "summary.json").write_text(json.dumps({{"steady_sps": {speed}}}))
slices(1)
sys.exit({status})
"""
    programs = {"one": [str(program(tmp_path / "one.py", f"import json\nfrom pathlib import Path\n{body}"))]}
    settings = rounds.RunArgs(total_timesteps=300)
    measured = partial(rounds.run_programs, "dqn", programs, (1, 2), tmp_path / "runs", settings)
    if message:
        with pytest.raises(SystemExit, match=f"error: dqn, one: {message}"):
            measured()
    else:
        assert measured() == {"one": [{"steady_sps": 7.5}] * 2}


def test_a_round_that_is_interrupted_leaves_no_process(tmp_path):
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nfor step in range(10**9):\n    slices(step)"
    programs = {"endless": [str(program(tmp_path / "endless.py", body))]}
    slices = iter(range(3))

    def on_slice(name):
        if next(slices) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.run_round(rounds.RoundArgs(run_dir=tmp_path / "runs"), programs, 1, on_slice)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_round_is_interleaved(tmp_path):
    """Two modes of which each notes its time slices; the shorter run ends first."""
    log = tmp_path / "slices.txt"
    programs = {}
    body = "for step in range(0, {}, 10):\n    slices(step)\n    open({!r}, 'a').write('{}')"
    for name, steps in (("a", 30), ("b", 50)):
        path = program(tmp_path / f"{name}.py", body.format(steps, str(log), name))
        programs[name] = [str(path)]
    rounds.run_round(rounds.RoundArgs(run_dir=tmp_path / "runs"), programs, seed=1)
    assert log.read_text() == "abababbb"


@pytest.mark.thorough
def test_a_real_round(tmp_path):
    flags = ["--algos", "dqn", "--modes", "plain", "eager", "--seeds", "1", "--total-timesteps", "3000"]
    flags += ["--flags=--learning-starts 100"]
    folders = ["--out", str(tmp_path / "results"), "--run-dir", str(tmp_path / "runs")]
    done = python("-m", "benchmark.speed", *flags, *folders)
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/speed/dqn/CartPole-v1/*/1.json")]
    assert {result["mode"] for result in results} == {"plain", "eager"}
    assert all(result["summary"]["steady_sps"] and result["summary"]["warmup_seconds"] for result in results)
    assert any(line.startswith("| DQN, CartPole-v1 | plain |") for line in done.stdout.splitlines())


BAD_ARGUMENTS = [
    ({"modes": ("fast",)}, "--modes fast: choose from plain, eager"),
    ({"modes": ("rllib",), "learn": True}, "--modes rllib: choose from plain, eager"),
    ({"algos": ("a2c",)}, "--algos a2c: choose from sac_continuous_action"),
    ({"total_timesteps": 0}, "--total-timesteps 0: give a finite number from 1"),
    ({"num_envs": 0}, "--num-envs 0: give a finite number from 1"),
    ({"seeds": ()}, "--seeds : give at least one"),
    ({"seeds": (4294967296,)}, "--seeds 4294967296: give a number from 0 to 4294967295"),
    ({"seeds": (1, 2, 1)}, "--seeds 1: give it once"),
    ({"algos": ("dqn", "dqn")}, "--algos dqn: give it once"),
    ({"modes": ("plain", "plain")}, "--modes plain: give it once"),
    ({"env_ids": ("ALE/Pong", "ALE-Pong")}, "--env-ids ALE-Pong: its results would have the names of ALE/Pong's"),
]


def test_bad_input(capsys):
    for changed, said in BAD_ARGUMENTS:
        assert refused(capsys, matrix.main, matrix.Args(dry_run=True, **changed)).startswith(said)
    line = refused(capsys, scaling.main, scaling.Args(cudagraphs=True))
    assert line.startswith("--cudagraphs True: there is no CUDA device")


@pytest.mark.parametrize(
    ("study", "changed", "said"),
    [
        (ablation, {"total_timesteps": 0}, "--total-timesteps 0: give a finite number from 1"),
        (ablation, {"seeds": (1, 1)}, "--seeds 1: give it once"),
        (compile_modes, {"seeds": ()}, "--seeds : give at least one"),
        (instrument_overhead, {"seeds": (1, 1)}, "--seeds 1: give it once"),
        (population, {"agents": (2, 0)}, "--agents 0: give a finite number from 1"),
        (population, {"seconds": math.nan}, "--seconds nan: give a finite number from 0"),
        (scaling, {"num_envs": (0,)}, "--num-envs 0: give a finite number from 1"),
        (start, {"times": 0}, "--times 0: give a finite number from 1"),
        (tips, {"rounds": 0}, "--rounds 0: give a finite number from 1"),
        *((study, {"results": Path("/sys/none")}, "--results /sys/none: give a folder that can") for study in STUDIES),
        *((study, {"run_dir": Path("/sys/none")}, "--run-dir /sys/none: give a folder that can") for study in LOCKED),
    ],
)
def test_studies_refuse_bad_input(study, changed, said, tmp_path, capsys):
    line = refused(capsys, study.main, study.Args(**{"results": tmp_path} | changed))
    assert line.startswith(said)


def test_a_monitor_sees_who_works(tmp_path):
    """Each name has a clock of its own; a process that sleeps takes nothing."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    watch = monitor.Monitor(True)
    try:
        for _ in range(2):
            for name, process in (("busy", busy), ("idle", idle)):
                with watch.watching(name, process.pid):
                    time.sleep(1.2 * monitor.INTERVAL)
    finally:
        busy.kill()
        idle.kill()
    (first, cores), (second, more) = watch.table("busy")["rows"]
    assert watch.table("busy")["columns"] == ["seconds", "cores"]
    assert monitor.INTERVAL <= first < 1.2 * monitor.INTERVAL + 0.2 < second < 2.4 * monitor.INTERVAL + 0.4
    assert 0.1 < cores < 1.1 and 0.1 < more < 1.1
    _, (_, cores) = watch.table("idle")["rows"]
    assert cores == 0
    watch.samples["long"] = [[i, 2 * i] for i in range(1000)]
    assert watch.medians("long") == {"cores": 999.0, "samples": 1000}
    assert watch.table("long")["rows"][:2] == [[4.5, 9], [14.5, 29]] and len(watch.table("long")["rows"]) == 100


def test_a_monitor_reads_a_card(monkeypatch):
    calls = {"nvmlInit": None, "nvmlDeviceGetHandleByIndex": "card"}
    calls |= {"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=61), "nvmlDeviceGetPowerUsage": 350_500}
    calls |= {"nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 * 2**30), "nvmlDeviceGetClockInfo": 1980}
    pynvml = SimpleNamespace(
        NVML_CLOCK_SM=1, **{name: lambda *args, value=value: value for name, value in calls.items()}
    )
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    assert dict(zip(monitor.GPU_COLUMNS, monitor.Card().sample(), strict=True)) == {
        "gpu_percent": 61,
        "gpu_memory_mib": 3072,
        "gpu_watts": 350.5,
        "gpu_mhz": 1980,
    }


STAND_IN = """
import json, pathlib
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
with open({notes!r}, "a") as file:
    print("{mode}", flags["seed"], os.getpid(), file=file)
for step in range(0, {steps}, 10):
    slices(step)
    while flags["seed"] == "2" and step == 20 and os.path.exists({hang!r}):
        time.sleep(0.01)
{crash}
folder = pathlib.Path(flags["run-dir"]) / "run"
folder.mkdir()
summary = {{"steady_sps": {speed}, "warmup_seconds": 1.0, "matmul_precision": "highest"}}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Two modes of matrix.py, "plain" and "eager"; gives a function that writes them and the lines they have noted."""
    notes = tmp_path / "notes.txt"
    notes.touch()

    def write(crash=""):
        modes = {}
        for mode, speed in (("plain", 100), ("eager", 150)):
            values = {"notes": str(notes), "hang": str(tmp_path / "hang"), "steps": 30, "mode": mode, "speed": speed}
            body = STAND_IN.format(**values, crash=crash if mode == "eager" else "")
            modes[mode] = [str(program(tmp_path / f"{mode}.py", body))]
        monkeypatch.setattr(rounds, "MODES", modes)
        return modes

    return write, lambda: [line.split() for line in notes.read_text().splitlines()]


def settings_of(tmp_path):
    settings = {"algos": ("dqn",), "modes": ("plain", "eager"), "seeds": (1, 2)}
    return settings | {"out": tmp_path / "results", "run_dir": tmp_path / "runs"}


def matrix_of(tmp_path, **changes):
    """Run two rounds of DQN by matrix.py; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        matrix.main(matrix.Args(**settings_of(tmp_path) | changes))
    return ended.value.code


def results_of(tmp_path):
    """{(mode, seed): result}"""
    paths = (tmp_path / "results").glob("*/speed/dqn/CartPole-v1/*/*.json")
    return {(path.parent.name, int(path.stem)): json.loads(path.read_text()) for path in paths}


def alive(pid):
    """Whether there is such a process, other than one that only waits for its parent."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and "Z" not in status.read_text().split(")")[1][:3]


def test_matrix_finishes_what_a_crash_leaves_and_does_nothing_twice(tmp_path, stand_ins, capsys):
    write, notes = stand_ins
    write(crash="if flags['seed'] == '2': sys.exit('out of luck')")
    assert matrix_of(tmp_path) == 1
    assert [f"{mode} {seed}" for mode, seed, _ in notes()] == ["plain 1", "eager 1", "eager 2", "plain 2"]
    results = results_of(tmp_path)
    log = results["eager", 2]["failed"]
    assert "out of luck" in Path(log).read_text() and results["eager", 2]["exit_code"] == 1
    for key, speed in ((("plain", 1), 100), (("eager", 1), 150), (("plain", 2), 100)):
        assert results[key]["summary"]["steady_sps"] == speed
    assert results["eager", 1]["plain"] == {"steady_sps": 100, "warmup_seconds": 1.0}
    out, err = capsys.readouterr()
    assert f"| | eager | 150; seed 2 failed: {log} | 1.50 | 1.0 | 0 |" in out.splitlines()
    assert f"error: a run failed; see {log}" in err.splitlines()

    assert matrix_of(tmp_path) == 1 and len(notes()) == 4  # all is there, and one failure is still one
    write()
    (path,) = tmp_path.glob("results/*/speed/dqn/*/eager/2.json")
    path.unlink()
    assert matrix_of(tmp_path) == 0
    assert [f"{mode} {seed}" for mode, seed, _ in notes()[4:]] == ["eager 2", "plain 2"]
    assert matrix_of(tmp_path, seeds=(1,), total_timesteps=900) == 0  # results of other commands do not count
    assert len(notes()) == 8


def test_what_cannot_be_stored_is_not_measured(tmp_path, stand_ins, capsys):
    write, notes = stand_ins
    write()
    (tmp_path / "file").write_text("")
    for name in ("out", "run_dir"):
        assert matrix_of(tmp_path, **{name: tmp_path / "file" / "results"}) == 2
        line = f"error: --{name.replace('_', '-')} {tmp_path / 'file' / 'results'}: give a folder that can be written ("
        assert capsys.readouterr().err.startswith(line)
    assert notes() == []


def test_two_matrices_do_not_share_their_runs(tmp_path, stand_ins, capsys):
    """The second one leaves the first one's folders alone."""
    write, notes = stand_ins
    write()
    (tmp_path / "runs" / "speed" / "dqn" / "CartPole-v1" / "plain" / "1").mkdir(parents=True)
    with locked("run-dir", tmp_path / "runs") as folder:
        assert matrix_of(tmp_path) == 2
    assert f"another command is using {folder}" in capsys.readouterr().err
    assert list((tmp_path / "runs").rglob("1")) and notes() == []


def test_a_result_that_a_crash_has_cut_is_named(tmp_path, stand_ins, capsys):
    write, _ = stand_ins
    write()
    assert matrix_of(tmp_path, seeds=(1,)) == 0
    (path,) = tmp_path.glob("results/*/speed/dqn/CartPole-v1/eager/1.json")
    path.write_text(path.read_text()[:100])
    capsys.readouterr()
    assert matrix_of(tmp_path, seeds=(1,)) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: it cannot be read (JSONDecodeError: ")


def test_each_mode_has_an_empty_compiler_cache_in_each_round(tmp_path):
    body = f"""
folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
with open({str(tmp_path / "caches.txt")!r}, "a") as file:
    print(folder, bool(os.listdir(folder)), file=file)
open(os.path.join(folder, "code"), "w").close()
assert folder == os.environ["TMPDIR"] == os.environ["HOME"]
"""
    programs = {name: [str(program(tmp_path / f"{name}.py", body))] for name in ("a", "b")}
    for seed in (1, 2):
        assert set(rounds.run_round(rounds.RoundArgs(run_dir=tmp_path / "runs"), programs, seed).values()) == {0}
    caches = [line.split() for line in (tmp_path / "caches.txt").read_text().splitlines()]
    assert len({folder for folder, _ in caches}) == 4 and {there for _, there in caches} == {"False"}


WARMING = f"""{RUN}
def train(args):
    with Run(args) as run:
        while run.step < args.total_timesteps:
            run.advance(0, False)
            run.learner.updates += run.step > 100
            time.sleep(0 if run.learner.updates > 3 else 0.001)
            if run.step % 10 == 0:
                run.log(dict())
"""


def test_slices_begin_when_the_run_is_warm(tmp_path):
    """It learns from step 100 on and is warm at 104: the first slice begins at the next log, 110."""
    (tmp_path / "warming.py").write_text(WARMING)
    words = ["-m", "benchmark.speed.interleaved", tmp_path / "warming.py", f"--run-dir={tmp_path}"]
    done = python(*words, input=100 * "\n")
    slices = [line.split()[0] for line in done.stdout.splitlines()]
    assert done.returncode == 0 and slices == ["0"] + ["10"] * ((600 - 110) // 10), done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["slice_speeds"]) == 49 and min(summary["slice_speeds"]) > 0
    assert 0.1 < summary["warmup_seconds"] < 999 < summary["wall_seconds"] < 1000


def test_matrix_goes_on_after_it_was_killed(tmp_path, stand_ins, monkeypatch):
    """Killed in the second round, in which plain hangs: no process is left, and only that round is run again."""
    write, notes = stand_ins
    (tmp_path / "hang").touch()
    lines = [f"import sys; sys.path.append({str(ROOT)!r})", "from pathlib import Path, PosixPath"]
    lines += ["from benchmark.speed import matrix, rounds"]
    lines += [f"rounds.MODES = {write()!r}", f"matrix.main(matrix.Args(**{settings_of(tmp_path)!r}))"]
    with open(tmp_path / "matrix.log", "w") as log:
        process = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stderr=log, stdout=log)
    wait_for(lambda: len(notes()) >= 4)
    process.kill()
    process.wait()
    assert len(notes()) == 4, (tmp_path / "matrix.log").read_text()
    assert set(results_of(tmp_path)) == {("plain", 1), ("eager", 1)}
    for _, _, pid in notes():
        wait_for(lambda pid=pid: not alive(pid))
    (tmp_path / "hang").unlink()
    assert matrix_of(tmp_path) == 0
    assert [f"{mode} {seed}" for mode, seed, _ in notes()[4:]] == ["eager 2", "plain 2"]
    assert len(results_of(tmp_path)) == 4


def commands(capsys, **settings):
    """What a dry run prints."""
    matrix.main(matrix.Args(dry_run=True, run_dir=Path("runs/matrix"), **settings))
    return capsys.readouterr()


def test_dry_run_prints_the_commands(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = {"flags": "--gamma 0", "out": Path("elsewhere")}
    out, _ = commands(capsys, algos=("sac_atari",), modes=("plain", "compile+cudagraphs"), seeds=(21, 31), **settings)
    steps = MEASURED["sac_atari"].speed.steps
    folder = "runs/matrix/speed/sac_atari/BeamRider-v5"
    common = f"--env-id=BeamRider-v5 --total-timesteps={steps} --seed={{0}} --run-dir={folder}/"
    own = "/{0} --learning-starts 1000 --buffer-size 100000 --gamma 0"
    program = "python -m benchmark.speed.interleaved"
    plain = f"{program} sac_atari --checkpoint-interval=0 {common}plain{own}"
    flags = "--checkpoint-interval=0 --compile --cudagraphs"
    turbo = f"{program} sac_atari_torchcompile {flags} {common}compile+cudagraphs{own}"
    assert out.splitlines() == [plain.format(21), turbo.format(21), turbo.format(31), plain.format(31)]
    out, _ = commands(capsys, algos=("sac_atari",), modes=("compile",), seeds=(21,), learn=True)
    folder = "runs/matrix/learning/sac_atari/BeamRider-v5/compile/21"
    flags = "--checkpoint-interval=0 --compile --env-id=BeamRider-v5 --total-timesteps=5000000 --seed=21"
    assert out == f"python leanrl/sac_atari_torchcompile.py {flags} --run-dir={folder}\n"
    monkeypatch.setattr(matrix, "find_spec", lambda module: True)
    monkeypatch.setattr(matrix, "entry_points", lambda group: ["cuda"])
    monkeypatch.setattr(matrix.checkouts, "python", lambda peer: Path("python"))
    out, _ = commands(capsys)
    modes = [len(rounds.MODES) + len(entry.peers) for entry in MEASURED.values()]
    assert len(out.splitlines()) == 3 * sum(modes)
    out, _ = commands(capsys, quick=True)
    assert len(out.splitlines()) == len(rounds.MODES) * len(MEASURED)


def test_modes_are_skipped_for_want_of_a_device_or_of_packages(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(matrix, "find_spec", lambda module: None if module == "sbx" else True)
    out, err = commands(capsys, algos=("dqn",), seeds=(1,))
    assert len(out.splitlines()) == 4 and "cudagraphs" not in out and "sb3" in out
    assert err.splitlines()[:3] == [
        "skipped: cudagraphs needs a CUDA device",
        "skipped: compile+cudagraphs needs a CUDA device",
        "skipped: sbx needs requirements/peers.txt",
    ]
    assert (
        err.splitlines()[3] == "skipped: cleanrl needs CLEANRL, the folder of a checkout (benchmark/speed/checkouts.py)"
    )


def test_modes_of_which_none_can_run(capsys, monkeypatch):
    monkeypatch.setattr(matrix, "find_spec", lambda module: True)
    out, _ = commands(capsys, algos=("sac_atari", "dqn"), modes=("sb3",), seeds=(1,))
    (line,) = out.splitlines()  # SAC for Atari has no peers
    assert line.startswith("python -m benchmark.speed.peers sb3 dqn")
    with pytest.raises(SystemExit) as ended:
        commands(capsys, modes=("cudagraphs",))
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[1].startswith("error: --modes cudagraphs: none of them can run here")


@pytest.mark.parametrize("changed", [{"flags": "--gamma 0"}, {"num_envs": 4}])
def test_results_of_other_settings_need_a_folder_of_their_own(changed, capsys):
    line = refused(capsys, matrix.main, matrix.Args(dry_run=True, **changed))
    assert line.endswith("results/ is for the settings of the tables; give --out another folder")


def test_run_sh_hands_its_flags_on():
    words = [ROOT / "run.sh", "--dry-run", "--algos", "a2c"]
    line = error_of(subprocess.run(words, env=WITH_PYTHON, capture_output=True, text=True))
    assert line.startswith("--algos a2c: choose from sac_continuous_action")


def test_a_learning_run_leaves_a_thinned_curve(tmp_path, monkeypatch, capsys):
    """2000 episodes of 10 steps, each with its number as return; seconds count from the beginning of the run."""
    body = """
import pathlib
from torch.utils.tensorboard import SummaryWriter
folder = pathlib.Path(dict(word[2:].split("=", 1) for word in sys.argv[1:])["run-dir"]) / "run"
writer = SummaryWriter(folder)
begin = time.time()
for i in range(1, 2001):
    writer.add_scalar("charts/episodic_return", i, 10 * i, walltime=begin + i)
writer.close()
(folder / "summary.json").write_text('{"global_step": 20000, "wall_seconds": 60, "matmul_precision": "highest"}')
"""
    (tmp_path / "leanrl").mkdir()
    program(tmp_path / "leanrl" / "dqn.py", body)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    assert matrix_of(tmp_path, learn=True, modes=("plain",), seeds=(1,)) == 0
    (path,) = tmp_path.glob("results/*/learning/dqn/CartPole-v1/plain/1.json")
    curve = json.loads(path.read_text())["curve"]
    assert len(curve) == 200
    assert [row[0] for row in curve[:2]] == [100, 200] and [row[2] for row in curve[:2]] == [5.5, 15.5]
    assert all(abs(row[1] - row[0] / 10) < 5 for row in curve)
    row = "| DQN, CartPole-v1 | plain | 1900.5 | 1: 1900.5 | 20000 | 1.0 | 488.69 ± 16.11 |"
    assert row in capsys.readouterr().out.splitlines()


def test_learning_runs_side_by_side(tmp_path, monkeypatch, capsys):
    """Two at a time, each with its part of the cores; what has run is not run again, and what fits is said first."""
    body = """
import pathlib
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(flags["run-dir"]) / "run"
folder.mkdir(parents=True)
(folder / "dqn.py").write_text("")
begin = time.time()
time.sleep(0.5)
lines = dict(threads=flags["threads"], begin=begin, end=time.time(), global_step=500_000, matmul_precision="highest")
(folder / "summary.json").write_text(__import__("json").dumps(lines | {"wall_seconds": 1}))
"""
    (tmp_path / "leanrl").mkdir()
    program(tmp_path / "leanrl" / "dqn.py", body)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "learning_curve", lambda folder: [])
    monkeypatch.setattr(matrix.os, "cpu_count", lambda: 4)
    settings = {"learn": True, "modes": ("plain",), "env_ids": ("CartPole-v1", "Acrobot-v1"), "parallel": 2}
    assert matrix_of(tmp_path, **settings) == 0
    err = capsys.readouterr().err
    assert "4 learning runs, about 0.2 hours on 2 cores" in err
    assert "into an hour fit 4 (0.2 hours): dqn CartPole-v1 plain; dqn Acrobot-v1 plain" in err
    paths = sorted(tmp_path.glob("results/*/learning/dqn/*/plain/*.json"))
    results = [json.loads(path.read_text()) for path in paths]
    assert len(results) == 4 and {result["summary"]["threads"] for result in results} == {"2"}
    assert all(list(result["editions"]) == ["dqn"] for result in results)
    spans = [(result["summary"]["begin"], result["summary"]["end"]) for result in results]
    busy = [sum(begin <= time < end for begin, end in spans) for time, _ in spans]
    assert max(busy) == 2
    paths[0].unlink()
    assert matrix_of(tmp_path, **settings) == 0
    again = [path for path in paths if json.loads(path.read_text()) not in results]
    assert again == [paths[0]]


def test_an_interrupted_learning_run_resumes(tmp_path, monkeypatch):
    """Ctrl-C while DQN trains: it leaves a checkpoint, and the same command goes on from there."""
    settings = {"learn": True, "modes": ("plain",), "seeds": (1,), "total_timesteps": 3000}
    settings |= {"flags": "--learning-starts 100 --no-cuda"}
    runs = tmp_path / "runs" / "learning" / "dqn" / "CartPole-v1" / "plain" / "1"
    statuses = matrix.LearningRun.statuses

    def interrupt(job):
        shown = re.findall(r"(\d+)/3000 \[", (runs / "log.txt").read_text()) if list(runs.glob("*/events*")) else []
        if shown and int(shown[-1]) >= 100:  # the progress bar
            raise KeyboardInterrupt
        return statuses(job)

    monkeypatch.setattr(matrix.LearningRun, "statuses", interrupt)
    assert matrix_of(tmp_path, **settings) == 130
    (summary,) = runs.glob("*/summary.json")
    first = json.loads(summary.read_text())
    assert 100 <= first["global_step"] < 3000 and summary.with_name("checkpoint.pt").exists()
    monkeypatch.setattr(matrix.LearningRun, "statuses", statuses)
    assert matrix_of(tmp_path, **settings) == 0
    first_part, second_part = sorted(runs.glob("*/summary.json"), key=matrix.steps_of)
    assert first_part == summary
    (path,) = tmp_path.glob("results/*/learning/dqn/CartPole-v1/plain/1.json")
    result = json.loads(path.read_text())
    last = json.loads(second_part.read_text())
    assert result["summary"]["global_step"] == 3000
    assert result["summary"]["wall_seconds"] == first["wall_seconds"] + last["wall_seconds"]
    steps, seconds, _ = zip(*result["curve"], strict=True)
    assert steps[0] < first["global_step"] < steps[-1] and list(seconds) == sorted(seconds)
    path.unlink()
    assert matrix_of(tmp_path, **settings) == 0  # a finished run is run again, not resumed
    assert len(list(runs.glob("*/summary.json"))) == 1


def test_a_second_ctrl_c_does_not_end_the_wait_for_checkpoints():
    seen = []

    def interrupt():
        raise KeyboardInterrupt

    def wait(seconds):
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("waited")

    job = SimpleNamespace(seconds=1, finished=lambda out: False, start=lambda: None, statuses=interrupt)
    job.stop, job.end = lambda: seen.append("asked"), lambda: seen.append("ended")
    job.process = SimpleNamespace(wait=wait)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        matrix.learn([job], None, None, 1)
    assert seen == ["asked", "waited", "ended"] and signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("lost", [False, True])
def test_a_signal_ends_a_learning_run_with_its_checkpoint(lost, hangups, tmp_path):
    """SIGTERM, or a terminal that is gone."""
    words = [ROOT / "run.sh", "--learn", "--algos", "dqn", "--env-ids", "CartPole-v1", "--modes", "plain"]
    words += ["--seeds", "1", "--out", tmp_path / "results", "--run-dir", tmp_path / "runs"]
    terminal = Terminal([*words, "--flags=--learning-starts 100 --no-cuda --threads 1"], env=WITH_PYTHON)
    log = tmp_path / "runs" / "learning" / "dqn" / "CartPole-v1" / "plain" / "1" / "log.txt"
    terminal.wait_for(lambda: log.exists() and re.search(r" [1-9]\d\d+/500000 \[", log.read_text()))
    if lost:
        terminal.close()
    else:
        terminal.process.terminate()
    assert terminal.process.wait(150) == 130
    (summary,) = tmp_path.rglob("summary.json")
    step = json.loads(summary.read_text())["global_step"]
    assert torch.load(summary.with_name("checkpoint.pt"), weights_only=True)["global_step"] == step >= 100
    assert not list(tmp_path.glob("results/**/*.json"))


@pytest.mark.parametrize(
    "changed", [{"parallel": 2}, {"parallel": 0, "learn": True}, {"parallel": 10_000, "learn": True}]
)
def test_parallel_is_refused(changed, capsys):
    line = refused(capsys, matrix.main, matrix.Args(dry_run=True, modes=("plain",), **changed))
    assert line.startswith(f"--parallel {changed['parallel']}: ")


def test_modes_with_mkl_unlocked(capsys, monkeypatch):
    """The flag adds them; they run the same programs, with a library preloaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out, _ = commands(capsys, algos=("dqn",), modes=("plain", "compile"), seeds=(1,), mkl_on_amd=True)
    plain, compiled, *unlocked = out.splitlines()
    assert unlocked == [plain.replace("/plain/", "/plain+mkl/"), compiled.replace("/compile/", "/compile+mkl/")]
    assert set(rounds.environment("compile+mkl")) == {"LD_PRELOAD"} and rounds.environment("compile") == {}


def test_mkl_on_amd_prints_a_library_that_says_yes(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    path = python(MKL, env=environment, check=True).stdout.strip()
    library = ctypes.CDLL(path)
    assert Path(path).is_relative_to(tmp_path)
    assert library.mkl_serv_intel_cpu_true() == library.mkl_serv_intel_cpu() == 1
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "other"), "CXX": "no-compiler"}
    line = error_of(python(MKL, env=environment))
    assert line.startswith(f"{tmp_path}/other/leanrl/libmkl_on_amd.so cannot be built (") and "CXX" in line
    environment |= {"XDG_CACHE_HOME": "/sys/none"}
    assert "Operation not permitted" in error_of(python(MKL, env=environment))


def test_mkl_on_amd_changes_nothing_but_rounding(tmp_path):
    """The sum of squares of a matmul, and its distance to the float64 one, with and without the library."""
    code = "import torch; torch.manual_seed(1); x = torch.randn(256, 256); y = x @ x; "
    code += "z = x.double() @ x.double(); print(y.square().sum().item(), ((y - z).norm() / z.norm()).item())"
    found = []
    for preloaded in ("", python(MKL).stdout.strip()):
        done = python("-c", code, env=os.environ | {"LD_PRELOAD": preloaded}, check=True)
        found.append([float(word) for word in done.stdout.split()])
    (one, error), (other, other_error) = found
    assert one == pytest.approx(other, rel=1e-6) and error < 1e-6 and other_error < 1e-6


def test_modes_table():
    speeds = {"eager": [100.0], "default": [200.0], "max-autotune-no-cudagraphs": [210.0]}
    warmups = {"eager": [1.0], "default": [20.0], "max-autotune-no-cudagraphs": [30.0]}
    rows = compile_modes.rows({"algo": "dqn", "steps_per_second": speeds, "warmup_seconds": warmups})
    assert rows == [
        ["DQN, CartPole-v1", "eager", "100", "0.50", "1"],
        ["DQN, CartPole-v1", "default", "200", "1.00", "20"],
        ["DQN, CartPole-v1", "max-autotune-no-cudagraphs", "210", "1.05", "30"],
    ]


@pytest.mark.parametrize("algo", MEASURED)
def test_scripts_understand_the_flags_of_the_modes(algo):
    script = load(f"{algo}_torchcompile")
    for flags in compile_modes.MODES.values():
        tyro.cli(script.Args, args=flags)


def test_a_warm_start_finds_what_the_cold_one_left(tmp_path, monkeypatch):
    """Each run of this program takes a second longer without its cache or headers, and prints a line once it is warm.

    The headers are in the temporary folder, as torch's are.
    """
    body = """
import os, time
from pathlib import Path
for path in Path(os.environ["TMPDIR"], "headers"), Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "code"):
    if not path.exists():
        time.sleep(1)
    path.parent.mkdir(exist_ok=True)
    path.touch()
print("0 0.0", flush=True)
time.sleep(60)
"""
    path = tmp_path / "program.py"
    path.write_text(body)
    monkeypatch.setattr(start, "INTERLEAVED", (path,))
    seconds = start.measure(start.Args(times=2), "dqn")["seconds"]
    assert [len(found) for found in seconds.values()] == [1, 2, 2]
    assert min(seconds["first"]) > max(seconds["cold"]) + 0.5
    assert min(seconds["cold"]) > 1 and max(seconds["warm"]) < min(seconds["cold"]) - 0.5
    assert start.rows({"algo": "dqn", "seconds": {"first": [30.2], "cold": [20.2, 31.0, 25.4], "warm": [5.0] * 3}}) == [
        ["DQN, CartPole-v1", "30", "25 (20 to 31)", "5"]
    ]
    assert start.rows({"algo": "dqn", "seconds": {"first": [30.2], "warm": [5.0]}}) == [
        ["DQN, CartPole-v1", "30", "", "5"]
    ]


def test_overhead_is_a_ratio_to_the_run_alone():
    """Of all slices together: 0.2 and 0.25 seconds here, with one step in each slice."""
    speeds = {"none": [100.0, 100.0, 50.0] * 5, "--watch": [100.0, 50.0, 50.0] * 5}
    ((name, instrument, cell, *others),) = instrument_overhead.rows({"algo": "dqn", "modes": {"eager": speeds}})
    assert (name, instrument, others) == ("DQN, CartPole-v1", "`--watch`", ["not measured"] * 3)
    ratio, low, high = map(float, re.findall(r"[\d.]+", cell))
    assert ratio == 0.8 and 0.65 < low < 0.75 and 0.85 < high <= 1


@pytest.mark.thorough
def test_programs_with_instruments_train_interleaved(tmp_path):
    programs = {
        "none": [*instrument_overhead.INSTRUMENTED, "", "dqn"],
        "both": [*instrument_overhead.INSTRUMENTED, "--random-baseline 2 --watch-gradients", "dqn"],
    }
    settings = rounds.RunArgs(total_timesteps=2000, flags="--learning-starts 500 --buffer-size 1000")
    summaries = rounds.run_programs("dqn", programs, (1,), tmp_path / "runs", settings)
    baselines = [path.relative_to(tmp_path / "runs").parts[0] for path in tmp_path.rglob("random_baseline.json")]
    assert baselines == ["both"]
    assert summaries["both"][0]["episodic_return"] == summaries["none"][0]["episodic_return"]
