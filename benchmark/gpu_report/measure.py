"""The report's course: programs warm up together, then train one at a time while all others stand still."""

import contextlib
import json
import os
import time
from importlib.util import find_spec

import psutil
import torch

from benchmark import editions
from benchmark.gpu_report import outcomes, tables
from benchmark.gpu_report.cases import CASES, NICENESS, PROFILED, TRACED, modes_of, tests_of
from benchmark.gpu_report.programs import Program, Programs, paused, start_low
from benchmark.gpu_report.turns import EMULATED
from benchmark.results import replace, store
from benchmark.speed.monitor import Monitor
from common.algorithms import ALGORITHMS
from common.arguments import note, one_line
from common.machine import machine, nvidia_smi
from common.processes import end

CARD = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "memory.total")
SLICE = 2.0  # seconds, at most
SLICES = 3  # of each program; the first is not counted
LAST = 15  # seconds before the end in which nothing new begins
PATIENCE = 60  # seconds beyond a slice: it ends at a log, and a profile takes three
SHORT = ("failed", "launches_per_step", "us_per_step", "busy_us_per_step", "busy_share", "gaps_per_step")
HOST_GIB, CARD_GIB = 2.0, 1.5  # of a program, about


def card():
    """What nvidia-smi says of the card, by name; None where it is missing."""
    return nvidia_smi(*CARD) or None


def room():
    """The number of programs for which host and card have memory."""
    programs = psutil.virtual_memory().available / 2**30 / HOST_GIB
    if torch.cuda.is_available():
        programs = min(programs, torch.cuda.mem_get_info()[0] / 2**30 / CARD_GIB)
    return int(programs)


def monitor():
    """Samples the load of the card too where NVML can be used."""
    try:
        return Monitor(not torch.cuda.is_available() or find_spec("pynvml") is not None)
    except Exception as error:  # NVML's library or permissions are missing
        note(f"the load of the card is not recorded ({one_line(error)})")
        return Monitor(False)


class Measurement:
    """Measures `algos` in `seconds`, with files in `out`: complete at every moment, also if this is killed."""

    def __init__(self, algos, seconds, warm, emulated, out, work):
        self.begin = time.monotonic()
        self.algos, self.length, self.until_warm, self.emulated = algos, seconds, warm, emulated
        self.out, self.work = out, work
        self.waiting = list(algos)  # not started
        self.profiles = {}
        self.programs = Programs()
        self.others = {}  # processes beside the programs, by name
        self.room = room()
        self.monitor = monitor()
        self.outcomes = work / "outcomes.jsonl"
        self.variables = {  # of all processes: each compiles by itself, and finds what others have compiled
            "TORCHINDUCTOR_CACHE_DIR": str(work / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            EMULATED: str(int(emulated)),
            outcomes.FILE: str(self.outcomes),
        }
        scripts = [editions.script(name) for algo in algos for name in (algo, f"{algo}_torchcompile")]
        cases = {algo: CASES[algo] for algo in algos}
        self.report = {"machine": machine(), "card": card(), "emulated": emulated} | editions.today(*scripts)
        self.report |= {"flags": {algo: case.small if emulated else case.flags for algo, case in cases.items()}}
        self.report |= {"env_ids": {algo: ALGORITHMS[algo].env_id for algo in algos}, "phases": [], "smoke": {}}
        self.report |= {"agreement": {}, "speeds": {algo: {} for algo in algos}, "profiles": {}, "load": {}}
        self.save()

    @property
    def seconds(self):
        """Seconds since the start."""
        return time.monotonic() - self.begin

    @property
    def failed(self):
        """Whether anything failed, or was not finished."""
        speeds = (result for own in self.report["speeds"].values() for result in own.values())
        own = self.report["agreement"]
        return bool(own["failed"] or own["not_finished"]) or any("failed" in result for result in speeds)

    @property
    def left(self):
        """Seconds until the end."""
        return self.length - self.seconds

    # -----------------------------------------------------------------------------------------------------------------
    # Files
    # -----------------------------------------------------------------------------------------------------------------

    def say(self, text):
        line = f"{self.seconds:6.1f} s  {text}"
        print(line, flush=True)
        with open(self.out / "log.txt", "a", encoding="utf-8") as file:
            print(line, file=file)

    def phase(self, name):
        self.report["phases"].append([name, round(self.seconds, 1)])
        self.say(f"== {name}")
        self.save()

    def save(self):
        """Write what is known so far."""
        self.read_smoke()
        self.read_tests()
        for program in self.programs:
            if program.slices or program.ended:
                self.report["speeds"][program.algo][program.mode] = program.result()
            if self.monitor.samples[program.name]:
                self.report["load"][program.name] = self.monitor.medians(program.name)
        short = {name: {key: own[key] for key in SHORT if key in own} for name, own in self.profiles.items()}
        self.report["profiles"] = short
        replace(self.out / "table.txt", tables.markdown(self.report) + "\n")
        store(self.out / "profile.json", self.profiles)
        store(self.out / "report.json", self.report)

    def read_smoke(self):
        for line in json_lines(self.work / "smoke.log"):
            self.report["smoke"] |= line

    def read_tests(self):
        found = {line["test"]: line for line in json_lines(self.outcomes)}
        by_outcome = {kind: {} for kind in ("passed", "failed", "skipped")}
        for name, line in found.items():
            by_outcome[line["outcome"]][name] = line.get("says", line["seconds"])
        missing = [name for name in tests_of(self.algos, self.emulated) if name not in found]
        says = ", ".join(f"{len(tests)} {kind}" for kind, tests in by_outcome.items())
        says += f", {len(missing)} not finished" if missing else ""
        self.report["agreement"] = {"says": says, "not_finished": missing} | by_outcome

    def note_failure(self, program):
        self.say(f"{program.name}: {program.ended[:150]}")
        with open(self.out / "failures.log", "a", encoding="utf-8") as file:
            print(f"=== {program.name}: {program.ended}", *program.lines(60), sep="\n", file=file)

    # -----------------------------------------------------------------------------------------------------------------
    # Phases
    # -----------------------------------------------------------------------------------------------------------------

    def run(self):
        self.phase("warm-up")
        if not self.emulated:
            self.others["smoke"] = self.start(["-m", "benchmark.gpu_report.smoke"], self.work / "smoke.log")
        self.start_programs()
        self.start_tests(*tests_of(self.algos, self.emulated))
        self.warm_up(self.until_warm)
        while True:
            self.phase("measure")
            starting = [program.process for program in self.programs if program.starting]
            with paused([*starting, *self.others.values()]):
                self.measure()
                self.profile(*PROFILED)
            unfinished = self.waiting or any(program.starting for program in self.programs)
            if not unfinished or self.left < 3 * LAST:
                break
            self.phase("warm-up of the rest")
            self.start_programs()
            self.warm_up(self.seconds + max(LAST, (self.left - 3 * LAST) / 2))
        self.end_programs(self.programs)
        self.phase("more tests")
        self.run_tests()

    def finish(self):
        """End all processes, and write what is known."""
        self.end_programs(self.programs)
        for process in self.others.values():
            end(process)
        for algo in self.waiting:
            self.report["speeds"][algo] = {mode: {"failed": "not started in time"} for mode in modes_of(algo)}
        self.phase("end")

    def start(self, words, log):
        return start_low(NICENESS["tests"], words, log, self.variables)

    def start_programs(self):
        """Start the programs of as many waiting algorithms as there is room for, in place of measured ones."""
        measured = [program for program in self.programs if program.slices]
        if self.waiting:
            self.end_programs(measured)
        while self.waiting:
            running = sum(program.process.poll() is None for program in self.programs)
            modes = modes_of(self.waiting[0])
            if running and running + len(modes) > self.room:
                return
            algo = self.waiting.pop(0)
            for mode in modes:
                self.programs.add(Program(algo, mode, self.work / "runs", self.emulated, self.variables))

    def end_programs(self, programs):
        for program in programs:
            program.end()

    def start_tests(self, *words):
        workers = 2 if self.emulated else max(2, os.cpu_count() // 2)
        options = ["-q", "--tb=short", "--show-capture=no", "-o", "addopts=", "-p", "no:cacheprovider"]
        options += ["-p", outcomes.__name__, "-n", workers]
        self.others["tests"] = self.start(["-m", "pytest", *options, *words], self.out / "tests.log")

    def run_tests(self):
        """Finish the tests of the modes that were measured; then run all others that need a card."""
        self.wait_for_tests()
        if self.left > 3 * LAST and not self.emulated:
            done = [f"--deselect={name}" for name in tests_of(self.algos, self.emulated)]
            self.start_tests("-m", "gpu", "-k", "real and not 1e9", *done, "tests")
            self.wait_for_tests()

    @property
    def testing(self):
        return self.others["tests"].poll() is None

    def wait_for_tests(self):
        while self.testing and self.left > LAST:
            time.sleep(1)

    def warm_up(self, until):
        """Wait until all programs are warm and all tests are done, or `until` this many seconds after the start."""
        told = self.seconds
        while self.seconds < min(until, self.length - LAST):
            self.next_answer(1.0)
            starting = [program.name for program in self.programs if program.starting]
            if not starting and not self.testing:
                return
            if self.seconds > told + 20:
                told = self.seconds
                self.save()
                self.say(f"not warm: {'; '.join(starting) or 'none'}. Tests: {self.report['agreement']['says']}")

    def measure(self):
        """Measure the programs that are ready, one algorithm after another."""
        for algo in self.algos:
            ready = [program for program in self.programs if program.algo == algo and program.ready]
            if not ready or self.left < LAST:
                continue
            seconds = self.slice_seconds()
            for i in range(SLICES):
                for program in ready if i % 2 == 0 else reversed(ready):
                    self.train(program, seconds)
            self.save()
            self.say(tables.speeds(self.report | {"speeds": {algo: self.report["speeds"][algo]}}).splitlines()[-1])
            self.profile(*[TRACED] * (algo == TRACED[0]))

    def slice_seconds(self):
        """The length of a slice that leaves time for all programs."""
        unmeasured = sum(program.starting or program.ready for program in self.programs)
        unmeasured += sum(len(modes_of(algo)) for algo in self.waiting)
        return min(SLICE, max(0.4, (self.left - 3 * LAST) / (1.5 * SLICES * unmeasured)))

    def train(self, program, seconds):
        """A slice of a program."""
        if self.left < seconds + LAST / 2:
            return
        values = self.answer_of(program, seconds, seconds=seconds)
        if values:
            program.slices.append((values["steps"], values["seconds"]))
            program.memory_mib = values["memory_mib"]

    def profile(self, *names):
        """Trace steady steps of measured programs."""
        for name in names:
            program = self.programs.all.get(name)
            if not program or not program.slices or program.ended or program.name in self.profiles:
                continue
            if self.left > LAST:
                keep = str(self.out / "trace.json.gz") if name == TRACED else None
                values = self.answer_of(program, 0, profile=True, keep=keep)
                self.profiles[program.name] = values["profile"] if values else {"failed": program.ended}
                self.save()

    def answer_of(self, program, duration, **order):
        """Have a program work for about `duration` seconds; returns its answer, or None if it fails or is late."""
        until = time.monotonic() + min(duration + PATIENCE, self.left)
        program.order(**order)
        with self.monitor.watching(program.name, program.process.pid):
            while not program.ended and time.monotonic() < until:
                who, values = self.next_answer(until - time.monotonic())
                if who is program:
                    return values
        if not program.ended:
            program.end(f"no answer to {json.dumps(order)}")  # it would disturb the others
            self.note_failure(program)
        return None

    def next_answer(self, seconds):
        program, values = self.programs.next_answer(seconds)
        if program and values is None:
            self.note_failure(program)
        return program, values


def json_lines(path):
    """The lines of a file that are JSON, if there is one; the last one may not be complete yet."""
    for line in path.read_text(errors="replace", encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
