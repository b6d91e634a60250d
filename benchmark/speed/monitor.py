"""The load of a process on CPU and GPU, sampled twice a second while it runs."""

import contextlib
import json
import threading
import time
from collections import defaultdict

import numpy as np
import psutil
import torch

from common.arguments import refuse

INTERVAL = 0.5  # seconds
ROWS = 100  # of a table
CPU_COLUMNS = ["seconds", "cores"]
GPU_COLUMNS = ["gpu_percent", "gpu_memory_mib", "gpu_watts", "gpu_mhz"]


class Monitor:
    """Samples of multiple interleaved processes, each with its own clock, which runs during its time slices."""

    def __init__(self, on):
        self.on = on
        self.card = Card() if on and torch.cuda.is_available() else None
        self.seconds = defaultdict(float)
        self.samples = defaultdict(list)

    @contextlib.contextmanager
    def watching(self, name, pid):
        """Context manager that samples process `pid` and its children, and adds the samples to those of `name`."""
        if not self.on:
            yield
            return
        begin = time.perf_counter()
        over = threading.Event()
        thread = threading.Thread(target=self.sample, args=(name, pid, begin, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.seconds[name] += time.perf_counter() - begin

    def sample(self, name, pid, begin, over):
        """Sample until `over` is set; a slice shorter than INTERVAL leaves no samples."""
        last, last_cpu = begin, cpu_seconds(pid)
        while not over.wait(INTERVAL):
            now, cpu = time.perf_counter(), cpu_seconds(pid)
            row = [self.seconds[name] + now - begin, (cpu - last_cpu) / (now - last)]
            self.samples[name].append(row + (self.card.sample() if self.card else []))
            last, last_cpu = now, cpu

    def save(self, name, folder):
        """Write the table of `name` to monitor.json in `folder`, if the monitor is enabled."""
        if self.on:
            (folder / "monitor.json").write_text(json.dumps(self.table(name)), encoding="utf-8")

    def table(self, name):
        """Columns and at most ROWS rows, each the mean over an equal number of samples."""
        rows = self.samples[name]
        parts = np.array_split(np.array(rows), min(len(rows), ROWS)) if rows else []
        means = [[round(float(value), 2) for value in part.mean(0)] for part in parts]
        return {"columns": self.columns, "rows": means}

    def medians(self, name):
        """The median load of `name`, by column."""
        medians = np.median(self.samples[name], 0).round(2).tolist()
        return dict(zip(self.columns[1:], medians[1:], strict=True)) | {"samples": len(self.samples[name])}

    @property
    def columns(self):
        return CPU_COLUMNS + (GPU_COLUMNS if self.card else [])


class Card:
    """The first GPU as reported by NVML, with the load of all processes on it."""

    def __init__(self):
        try:
            import pynvml
        except ImportError:
            refuse("monitor", True, "a card's load is read by nvidia-ml-py: pip install -r requirements/test.txt")
        self.nvml = pynvml
        self.nvml.nvmlInit()
        self.handle = self.nvml.nvmlDeviceGetHandleByIndex(0)

    def sample(self):
        """The values of GPU_COLUMNS: share of time with a running kernel, MiB in use, watts, the processors' clock."""
        return [
            self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu,
            self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used / 2**20,
            self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000,
            self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM),
        ]


def cpu_seconds(pid):
    """CPU time of a process, its children, and terminated children that it has waited for."""
    seconds = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(one.cpu_times()[:4])
    return seconds
