"""Runs on Ray, on this machine or on an existing cluster."""

import os
import secrets
import shutil
import socket
import sys
from pathlib import Path

import ray
from ray._raylet import GcsClient
from ray.exceptions import RayError, RayTaskError

from common import processes
from common.arguments import one_line, refuse, stop
from common.folders import locked
from launch import worker
from launch.orders import Order
from tools import mkl_on_amd

ATTEMPTS = 5  # of a run whose machine or process died
LOOPBACK = "127.0.0.1"


def connect(address, **settings):
    """Connect to the Ray cluster at `address` or RAY_ADDRESS, or start one on this machine for this command.

    `settings` are passed to ray.init.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    settings |= {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address:
            require_answer(address)
            ray.init(address=address, **settings)
        else:
            ray.init(address="local", _node_ip_address=LOOPBACK, include_dashboard=False, **settings)
    except (OSError, RayError, ValueError, RuntimeError) as error:
        if address:
            refuse("address", address, f"cannot connect to a Ray cluster there ({one_line(error)})")
        stop(f"Ray does not start on this machine ({one_line(error)}); doc/many_runs.md shows runs without Ray")
    for module in (worker, processes):
        ray.cloudpickle.register_pickle_by_value(module)
    processes.end_as_at_ctrl_c()  # ray.init installs its own handlers


def require_answer(address):
    """Raise an error if nothing listens at HOST:PORT or it refuses our token; Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()
        GcsClient(address=address)


class Cluster:
    """The queued and running runs. All of them end when this program ends."""

    def __init__(self, address, cpus, gpus, mkl, out):
        connect(address)
        if gpus is None:
            gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
        self.slots = sys.maxsize  # runs at the same time
        for name, number in (("CPU", cpus), ("GPU", gpus)):
            there = [node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]]
            if not 0 <= number <= max(there):
                remedy = f"give at most {max(there):g}, as many as the largest machine has"
                refuse(f"{name.lower()}s-per-run", number, remedy)
            if number:
                self.slots = min(self.slots, sum(int(amount / number) for amount in there))
        self.session = secrets.token_hex(4)
        self.stop_file = Path(out) / "stop"
        self.stop_file.write_text("", encoding="utf-8")
        self.environment = {"OMP_NUM_THREADS": str(max(1, int(cpus)))}
        if mkl:
            library = shutil.copy(mkl_on_amd.library(), out)  # all machines can read it there
            if " " in str(library):
                refuse("out", out, "give a folder without a space in its name, for --mkl-on-amd")
            self.environment["LD_PRELOAD"] = str(library)
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": ATTEMPTS - 1, "scheduling_strategy": "SPREAD"}
        self.train = ray.remote(**options)(worker.train)
        self.tasks = {}

    def submit(self, order: Order):
        """Queue a run."""
        self.tasks[self.train.remote(order.message(self.session, self.environment, self.stop_file))] = order

    def finished(self, timeout=0.5):
        """Wait up to `timeout` seconds for a run to end; returns its order and outcome (`worker.train`) in a list."""
        ready, _ = ray.wait(list(self.tasks), timeout=timeout)
        return [(self.tasks.pop(task), outcome(task)) for task in ready]

    def stop(self):
        """End all runs; each saves a checkpoint."""
        with processes.undisturbed():
            # Ray can crash when it cancels a task that is just starting
            self.stop_file.write_text("stop", encoding="utf-8")
            for task, order in self.tasks.items():
                if worker.started(order.folder).get("session") == self.session:
                    outcome(task)
        self.tasks.clear()


def outcome(task):
    try:
        return ray.get(task)
    except RayTaskError as error:
        return {"status": "failed", "line": str(error).strip().splitlines()[-1]}
    except RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"status": "failed", "line": f"after {ATTEMPTS} attempts: {lines[0]}"}


def folder_of(out, script):
    """Context manager that locks the folder of a script's runs, shared by all machines, for this command."""
    return locked("out", out, script.path.stem)
