"""Speed rounds on a Ray cluster. A round runs on one machine, and has all of it: ratios compare modes, not machines."""

import ray
from ray.exceptions import NodeDiedError, TaskUnschedulableError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmark import ROOT
from benchmark.arguments import stop
from benchmark.report.machine import machine
from launch.cluster import connect

NOT_SENT = [".git", ".venv", "results", "runs", "doc"]  # of the repository, which goes to each machine


def here_and_alone(node, function):
    """`function` as a Ray task that takes all cores and cards of `node`."""
    options = {"num_cpus": node["Resources"]["CPU"], "num_gpus": node["Resources"].get("GPU", 0)}
    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(**options, scheduling_strategy=place)(function)


def train(job):
    """The results of a round's modes."""
    statuses = job.run(lambda mode: None)
    return job.results(statuses, machine())


class Machines:
    """The machines of the cluster at `address` that have cores, with what each is (`machine`)."""

    def __init__(self, address):
        connect(address, runtime_env={"working_dir": str(ROOT), "excludes": NOT_SENT})
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        kinds = ray.get([here_and_alone(node, machine).remote() for node in nodes])
        self.kinds = {node["NodeID"]: kind for node, kind in zip(nodes, kinds, strict=True)}
        self.free = nodes

    def run(self, jobs):
        """Run all jobs, each as soon as a machine is free: yields jobs with their machine and results."""
        left = list(jobs)
        running = {}
        while left or running:
            while left and self.free:
                node, job = self.free.pop(), left.pop(0)
                running[here_and_alone(node, train).remote(job)] = (job, node)
            if not running:
                stop("all machines of the cluster are gone; run the same command again to continue")
            (task,), _ = ray.wait(list(running))
            job, node = running.pop(task)
            try:
                results = ray.get(task)
            except (NodeDiedError, TaskUnschedulableError, WorkerCrashedError):  # another machine gets the round
                left.append(job)
                continue
            self.free.append(node)
            yield job, self.kinds[node["NodeID"]], results
