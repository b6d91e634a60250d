"""Runs on Ray: on this machine, or on a cluster that is there already."""

import os
import secrets
import shutil
import socket
import sys
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from common import processes
from common.arguments import refuse
from common.folders import locked
from launch import worker
from launch.orders import Order
from tools import mkl_on_amd

ATTEMPTS = 5  # at a run whose machine or process died
LOOPBACK = "127.0.0.1"


def connect(address, **settings):
    """Connect to the Ray cluster at `address`, else at RAY_ADDRESS, else start one on this machine for this command.

    `settings` are ray.init's.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    settings |= {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        ray.init(address="local", _node_ip_address=LOOPBACK, include_dashboard=False, **settings)
    else:
        try:
            require_answer(address)
            ray.init(address=address, **settings)
        except (OSError, RayError, ValueError, RuntimeError) as error:
            refuse("address", address, f"no Ray cluster answers there ({str(error).splitlines()[0]})")
    for module in (worker, processes):
        ray.cloudpickle.register_pickle_by_value(module)
    processes.end_as_at_ctrl_c()  # ray.init sets handlers of its own


def require_answer(address):
    """OSError if nothing listens at HOST:PORT, on which Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


class Cluster:
    """The runs that are queued and running. All of them end when this program does."""

    def __init__(self, address, cpus, gpus, mkl, out):
        connect(address)
        if gpus is None:
            gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
        self.slots = sys.maxsize  # runs at a time
        for name, number in (("CPU", cpus), ("GPU", gpus)):
            there = [node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]]
            if not 0 <= number <= max(there):
                remedy = f"give at most {max(there):g}, what the largest machine has"
                refuse(f"{name.lower()}s-per-run", number, remedy)
            if number:
                self.slots = min(self.slots, sum(int(amount / number) for amount in there))
        self.session = secrets.token_hex(4)
        self.stop_file = Path(out) / "stop"
        self.stop_file.write_text("")
        self.environment = {"OMP_NUM_THREADS": str(max(1, int(cpus)))}
        if mkl:
            library = shutil.copy(mkl_on_amd.library(), out)  # where all machines see it
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
        """Orders that are over, each with its outcome (`worker.train`), after waiting for the first of them."""
        ready, _ = ray.wait(list(self.tasks), timeout=timeout)
        return [(self.tasks.pop(task), outcome(task)) for task in ready]

    def stop(self):
        """End all runs, with their checkpoints."""
        with processes.undisturbed():
            self.stop_file.write_text("stop")  # Ray can crash when it cancels a task that it is starting
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
    """The folder of a script's runs, which all machines see, for this command alone: a context."""
    return locked("out", out, script.path.stem)
