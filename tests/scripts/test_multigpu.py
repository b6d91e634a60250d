"""PPO for Atari on multiple ranks: one learner in multiple processes, which start, decide and end together.

The ranks are forks of this process, connected by gloo, like torchrun's on a machine without a GPU.
"""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import conftest
import emulated_cuda
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MULTI, assert_close_in_norm, clones, leaves, scalars
from formulas import assert_noticed
from torch.utils._pytree import tree_leaves

TURBO = conftest.TURBO["ppo_atari"]
SHAPE = (4, 84, 84)
SIZES = {"num_steps": 16, "num_minibatches": 4, "update_epochs": 2, "cuda": False, "threads": 1}
ITERATION = 16 * 12  # steps of an iteration with 12 games, which 2 and 3 ranks can share
SIZES |= {"num_envs": 12, "total_timesteps": 3 * ITERATION}
PATIENCE = 120  # seconds that a rank waits for the others; a test takes as long only if a rank hangs


class Games:
    """Stands in for envpool's pool: what happens in a game depends on its seed alone, and not on its actions.

    `period`: observations, rewards and ends come again after so many steps, also in a resumed run.
    """

    def __init__(self, num_envs, seed, period=None):
        self.observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
        self.action_space = gym.spaces.Discrete(4)
        self.seeds = range(num_envs) if period else range(seed, seed + num_envs)
        self.period = period
        self.ended = np.zeros(num_envs, bool)
        self.steps = 0
        self.begin()

    def begin(self):
        self.generators = [np.random.default_rng(seed) for seed in self.seeds]

    def each(self, draw):
        return np.stack([draw(generator) for generator in self.generators])

    def reset(self):
        return self.each(lambda generator: generator.integers(0, 256, SHAPE, np.uint8)), {}

    def step(self, actions):
        self.steps += 1
        starts = self.ended
        rewards = self.each(lambda generator: generator.choice((-1.0, 0.0, 2.0))) * ~starts
        self.ended = self.each(lambda generator: generator.random() < 0.2 * generator.random()) & ~starts
        if self.period and self.steps % self.period == 0:
            self.ended[:] = False
            self.begin()
        obs, _ = self.reset()
        never = np.zeros(len(rewards), bool)
        infos = {"reward": rewards, "terminated": self.ended.astype(np.int32)}
        return obs, np.sign(rewards), self.ended, never, infos


def become(script, rank, ranks, port, stderr, patience=PATIENCE):
    """Make this process a rank of `script`, as torchrun does with its environment variables."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.stderr = sys.__stderr__ = stderr.open("w", buffering=1)
    script.RANK = script.LOCAL_RANK = rank
    script.WORLD_SIZE = script.LOCAL_WORLD_SIZE = ranks
    script.TIMEOUT = timedelta(seconds=patience)
    script.make_pool = lambda args, seed: Games(args.num_envs, seed)
    torch.export.export, torch.export.save = MagicMock(), MagicMock()  # no policies, to save time


def launch(script, ranks, program, folder, patience=PATIENCE):
    """Run `program(rank)` as each rank of `script`; returns their exit codes, and what they wrote to stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    errors = [folder / f"stderr_{rank}" for rank in range(ranks)]

    def run(rank):
        become(script, rank, ranks, port, errors[rank], patience)
        program(rank)

    processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 2 * PATIENCE
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert None not in codes, f"a rank hangs: {codes}"
    return codes, ["\n".join(lines(path)) for path in errors]


def lines(path):
    """What a rank has written to stderr, without its progress bar."""
    text = path.read_text().replace("\r", "\n")
    return [line for line in text.splitlines() if line.strip() and "step/s" not in line]


def learn(script, folder, on_log=lambda learner, losses, step: None, on_start=lambda run: None, **kwargs):
    """Train as this rank; afterwards `folder` has what it learned and logged."""
    learned = {"losses": [], "weights": [], "adam": []}

    def note(learner, losses, step):
        on_log(learner, losses, step)
        learned["losses"].append(losses)
        learned["weights"].append(torch.cat([w.detach().flatten() for w in learner.agent.parameters()]))
        learned["adam"].append(clones(learner.optimizers["agent"].tensors()))
        learned["actions"] = learner.rollout["actions"].clone()
        torch.save(learned, folder / f"learned_{getattr(script, 'RANK', 0)}")

    conftest.train(script, script.Args(**SIZES | {"run_dir": str(folder / "runs")} | kwargs), note, on_start)


def learned(folder, ranks):
    return [torch.load(folder / f"learned_{rank}") for rank in range(ranks)]


def learn_together(script, folder, ranks=2, program=learn, **kwargs):
    """Train as each rank, without a message; returns what each has learned and logged."""
    codes, errors = launch(script, ranks, lambda rank: program(script, folder, **kwargs), folder)
    assert codes == [0] * ranks and not any(errors), errors
    return learned(folder, ranks)


def only_run(folder):
    (run,) = (folder / "runs").iterdir()
    return run


def checkpoint(folder):
    return torch.load(only_run(folder) / "checkpoint.pt", weights_only=True)


def summary(folder):
    return json.loads((only_run(folder) / "summary.json").read_text())


def assert_equal(one, other):
    for (name, value), (_, wanted) in zip(leaves(one), leaves(other), strict=True):
        assert torch.equal(value, wanted), name


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_all_ranks_hold_the_same_weights(ranks, tmp_path, script=MULTI):
    """And moments, after ten iterations, bit for bit, though each acts by itself."""
    first, *others = learn_together(script, tmp_path, ranks, total_timesteps=10 * ITERATION, update_epochs=1)
    for other in others:
        assert_equal([first["weights"], first["adam"]], [other["weights"], other["adam"]])
        assert not torch.equal(first["actions"], other["actions"])
    assert len(first["losses"]) == 10


def test_ranks_that_drift_apart_are_made_equal(tmp_path, script=MULTI):
    """Their weights and moments are equal again from the next iteration on."""

    def drift(learner, losses, step):
        if script.RANK == 1 and step == ITERATION:
            for tensor in tree_leaves(learner.tensors()):
                tensor.detach().add_(1e-6)

    one, other = learn_together(script, tmp_path, on_log=drift)
    assert not torch.equal(one["weights"][0], other["weights"][0])
    for name in ("weights", "adam"):
        assert_equal(one[name][1:], other[name][1:])


def same_numbers(script, run):
    """Let ranks draw the noise and the minibatches that are one process's with all games."""
    learner, ranks, rank = run.learner, script.WORLD_SIZE, script.RANK
    rows = SIZES["num_steps"] * SIZES["num_envs"] // ranks
    share = SIZES["num_envs"] // ranks
    half = SIZES["num_envs"] // 2
    epochs = iter(range(1000))

    def own_order(part, epoch):
        """Of the half of the games that rank `part` of two has."""
        order = torch.randperm(SIZES["num_steps"] * half, generator=torch.Generator().manual_seed(2 * epoch + part))
        return order.view(SIZES["num_minibatches"], -1)

    def rand(n, device=None):
        epoch = next(epochs)
        orders = [own_order(part, epoch) for part in range(2)]
        rows_of_all = [order // half * SIZES["num_envs"] + i * half + order % half for i, order in enumerate(orders)]
        order = orders[rank] if ranks == 2 else torch.cat(rows_of_all, 1)
        assert order.numel() == n == rows
        return order.flatten().argsort().float()

    generator = torch.Generator().manual_seed(5)
    shape = (SIZES["num_envs"], learner.noise.shape[-1])
    games = slice(rank * share, (rank + 1) * share)

    def exponential():
        learner.noise.copy_(torch.empty(shape).exponential_(generator=generator)[games])

    learner.noise.exponential_ = exponential
    torch.rand = rand


OTHER = {"norm_adv": False, "clip_vloss": False, "max_grad_norm": 0.01, "ent_coef": 0.1}


@pytest.mark.parametrize("kwargs", [{}, pytest.param(OTHER, marks=pytest.mark.thorough)], ids=["default", "other"])
def test_two_ranks_learn_what_one_process_does(kwargs, tmp_path, script=MULTI):
    """They play, learn and log what the single-process script does with all games.

    To rounding in the first iteration, of 8 minibatches. In the second one rounding may decide on which side of 0 a
    unit is, and Adam's steps have their full length also where a gradient is hardly more than its rounding.
    """
    both, alone = tmp_path / "both", tmp_path / "alone"
    kwargs = {"learning_rate": 3e-5, "total_timesteps": 2 * ITERATION} | kwargs
    ranks = learn_together(script, both, on_start=partial(same_numbers, script), **kwargs)
    (wanted,) = learn_together(TURBO, alone, 1, on_start=partial(same_numbers, TURBO), **kwargs)
    for got in ranks:
        torch.testing.assert_close(got["weights"][0], wanted["weights"][0], rtol=0, atol=1e-6)
        for i, tolerances in enumerate(((1e-7, 1e-5), (1e-6, 3e-3))):
            for name, tolerance in zip(("weights", "adam"), tolerances, strict=True):
                assert_close_in_norm(dict(leaves(got[name][i])), dict(leaves(wanted[name][i])), tolerance)
        for losses, wanted_losses in zip(got["losses"], wanted["losses"], strict=True):
            names = losses.keys() - {"explained_variance"}  # which is that of a rank's own games
            assert losses.keys() == wanted_losses.keys()
            for name in names:
                assert losses[name] == pytest.approx(wanted_losses[name], rel=1e-4, abs=1e-6), name
    for tag in ("charts/episodic_return", "charts/episodic_length"):
        returns = scalars(only_run(both), tag)
        assert returns == scalars(only_run(alone), tag) and len(returns) > 20
    for name in ("global_step", "episodes", "episodic_return", "num_envs", "seed"):
        assert summary(both)[name] == summary(alone)[name]
    assert summary(both)["ranks"] == 2 and checkpoint(both)["global_step"] == 2 * ITERATION


def end(script, folder, act, rank=1, iteration=2, ranks=2, patience=PATIENCE, **kwargs):
    """Train until `act(learner)` in one rank, after one iteration, ends the run."""

    def on_log(learner, losses, step):
        if rank == script.RANK and step == iteration * ITERATION:
            act(learner)

    begin = time.monotonic()
    kwargs = {"total_timesteps": 20 * ITERATION} | kwargs
    codes, errors = launch(script, ranks, lambda rank: learn(script, folder, on_log, **kwargs), folder, patience)
    assert time.monotonic() < begin + PATIENCE
    return codes, errors


@pytest.mark.parametrize(
    ("number", "rank"), [(signal.SIGINT, 1), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.thorough)]
)
def test_a_signal_to_one_rank_ends_all(number, rank, tmp_path):
    """After the same iteration, with checkpoint and summary."""
    codes, errors = end(MULTI, tmp_path, lambda learner: signal.raise_signal(number), rank=rank)
    assert codes == [128 + number] * 2 and not any(errors)
    assert checkpoint(tmp_path)["global_step"] == summary(tmp_path)["global_step"] == 2 * ITERATION


def test_a_signal_while_all_go_on(tmp_path, script=MULTI):
    """A signal to a rank that already knows that all go on ends all of them one iteration later."""

    def strike(learner):
        state_dict = learner.state_dict

        def struck():
            learner.state_dict = state_dict  # only once: a second signal after a second interrupts
            signal.raise_signal(signal.SIGTERM)
            return state_dict()

        learner.state_dict = struck

    codes, errors = end(script, tmp_path, strike, checkpoint_interval=ITERATION)
    assert codes == [143, 143] and not any(errors)
    assert checkpoint(tmp_path)["global_step"] == summary(tmp_path)["global_step"] == 3 * ITERATION


def kill(learner):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(learner):
    raise ZeroDivisionError("of an edit")


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_an_error_in_one_rank_ends_all(rank, tmp_path):
    """It is shown once, the other rank has a line at most, and there is a checkpoint."""
    codes, errors = end(MULTI, tmp_path, fail, rank=rank)
    assert codes == [1, 1]
    assert errors[rank].count("Traceback") == 1 and "ZeroDivisionError: of an edit" in errors[rank]
    other = errors[1 - rank]
    assert not other if rank == 0 else other.startswith("error: rank 0 cannot reach the other ranks: ")
    assert other.count("\n") == 0
    assert checkpoint(tmp_path)["global_step"] == summary(tmp_path)["global_step"] == 2 * ITERATION


def test_a_rank_that_is_killed_ends_all(tmp_path):
    """With a line and a checkpoint."""
    codes, errors = end(MULTI, tmp_path, kill, ranks=3)
    assert codes == [1, -signal.SIGKILL, 1]
    assert errors[0].startswith("error: rank 0 cannot reach the other ranks: ") and errors[0].count("\n") == 0
    assert not errors[1] and not errors[2]
    assert checkpoint(tmp_path)["global_step"] == summary(tmp_path)["global_step"] == 2 * ITERATION


@pytest.mark.thorough
def test_rank_0_that_is_killed_leaves_the_last_checkpoint(tmp_path):
    codes, errors = end(MULTI, tmp_path, kill, rank=0, iteration=3, checkpoint_interval=ITERATION)
    assert codes == [-signal.SIGKILL, 1] and not any(errors)
    assert checkpoint(tmp_path)["global_step"] == 2 * ITERATION


@pytest.mark.thorough
def test_a_rank_that_hangs_ends_all(tmp_path):
    """After TIMEOUT."""
    codes, errors = end(MULTI, tmp_path, lambda learner: time.sleep(40), patience=15)
    assert codes == [1, 1]
    assert errors[0].startswith("error: rank 0 cannot reach the other ranks: ") and errors[0].count("\n") == 0
    assert checkpoint(tmp_path)["global_step"] == 2 * ITERATION


def test_all_ranks_end_at_a_nan_of_one(tmp_path):
    """Here of its rewards: exit code 1, one line, no checkpoint that holds it."""

    def spoil(learner):
        learner.record = lambda *outcomes: None
        learner.host_outcomes["rewards"].fill_(torch.nan)

    codes, errors = end(MULTI, tmp_path, spoil, checkpoint_interval=2 * ITERATION)
    assert codes == [1, 1] and not errors[1]
    step = 3 * ITERATION
    assert errors[0].startswith(f"error: step {step}: policy_loss is nan") and errors[0].count("\n") == 0
    assert checkpoint(tmp_path)["global_step"] == 2 * ITERATION and summary(tmp_path)["global_step"] == step


def test_target_kl_is_that_of_all_ranks(tmp_path, script=MULTI):
    """One rank's KL divergence is over the target, and the mean is: all ranks leave out the same epochs."""

    def on_start(run):
        make_batch = run.learner.make_batch

        def spoil():
            make_batch()
            if script.RANK == 1:
                run.learner.batch["log_prob"].sub_(0.3)

        run.learner.make_batch = spoil

    one, other = learn_together(script, tmp_path, on_start=on_start, target_kl=0.01, update_epochs=4)
    assert_equal([one["weights"], one["adam"]], [other["weights"], other["adam"]])
    assert all(losses["approx_kl"] > 0.01 for losses in one["losses"])
    next_step = torch.log(1 - one["adam"][-1][".corrections"][0]) / np.log(0.9)
    assert round(next_step.item()) - 1 == 3 * 4  # minibatches of one epoch in each iteration


def learn_periodically(script, folder, iterations, **kwargs):
    script.make_pool = lambda args, seed: Games(args.num_envs, seed, period=SIZES["num_steps"])
    learn(script, folder, anneal_lr=False, total_timesteps=iterations * ITERATION, **kwargs)


def test_resuming_continues_every_rank(tmp_path, script=MULTI):
    """Two ranks that are resumed go on, bit for bit, as if they had not been interrupted."""
    part = partial(learn_together, script, program=learn_periodically)
    whole = part(tmp_path / "whole", iterations=2)
    part(tmp_path / "first", iterations=1)
    second = part(tmp_path / "second", iterations=2, resume=str(only_run(tmp_path / "first")))
    for got, wanted in zip(second, whole, strict=True):
        assert_equal([got["weights"], got["adam"]], [wanted["weights"][1:], wanted["adam"][1:]])
        assert torch.equal(got["actions"], wanted["actions"])
    assert checkpoint(tmp_path / "second")["global_step"] == 2 * ITERATION


def test_resuming_from_a_checkpoint_on_the_way(tmp_path, script=MULTI):
    """Two ranks that are resumed from the checkpoint of an interval go on, bit for bit, like those that wrote it."""

    def keep(learner, losses, step):
        if script.RANK == 0 and step == 2 * ITERATION:
            shutil.copy(only_run(tmp_path / "whole") / "checkpoint.pt", tmp_path / "first.pt")

    part = partial(learn_together, script, program=learn_periodically)
    whole = part(tmp_path / "whole", iterations=3, checkpoint_interval=ITERATION, on_log=keep)
    assert torch.load(tmp_path / "first.pt", weights_only=True)["global_step"] == ITERATION
    rest = part(tmp_path / "rest", iterations=3, resume=str(tmp_path / "first.pt"))
    for got, wanted in zip(rest, whole, strict=True):
        assert_equal([got["weights"], got["adam"]], [wanted["weights"][1:], wanted["adam"][1:]])
        assert torch.equal(got["actions"], wanted["actions"])


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_resuming_on_another_number_of_ranks_is_noted(ranks, tmp_path):
    learn_together(MULTI, tmp_path / "two", total_timesteps=ITERATION)
    kwargs = {"resume": str(only_run(tmp_path / "two")), "total_timesteps": 2 * ITERATION}
    codes, errors = launch(MULTI, ranks, lambda rank: learn(MULTI, tmp_path / "other", **kwargs), tmp_path / "other")
    assert codes == [0] * ranks and not any(errors[1:])
    assert errors[0].startswith("note: the checkpoint is of 2 ranks, ") and errors[0].count("\n") == 0
    assert summary(tmp_path / "other")["global_step"] == 2 * ITERATION
    weights = [rank["weights"] for rank in learned(tmp_path / "other", ranks)]
    assert all(torch.equal(weights[0][0], other[0]) for other in weights)


def learn_with_noted_seeds(script, folder):
    pools = []
    script.make_pool = lambda args, seed: pools.append(Games(args.num_envs, seed)) or pools[-1]
    learn(script, folder, total_timesteps=ITERATION, seed=7)
    torch.save(list(pools[0].seeds), folder / f"seeds_{script.RANK}")


def test_seeds_of_games_do_not_overlap(tmp_path, script=MULTI):
    """The games of two ranks have the seeds of one process's games."""
    learn_together(script, tmp_path, program=learn_with_noted_seeds)
    assert torch.load(tmp_path / "seeds_0") + torch.load(tmp_path / "seeds_1") == list(range(7, 7 + 12))


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"num_envs": 13}, "error: --num-envs 13: give a multiple of 2, the number of ranks that share them"),
        ({"num_envs": 2, "num_minibatches": 32}, "error: --num-minibatches 32: give a divisor of each rank's 16 steps"),
        pytest.param({"env_id": "Pong-v4"}, "error: --env-id Pong-v4", marks=pytest.mark.thorough),
    ],
)
def test_bad_input_gets_one_line_of_all_ranks(kwargs, line, tmp_path):
    def program(rank):
        MULTI.make_pool = REAL_POOL
        learn(MULTI, tmp_path, **kwargs)

    codes, errors = launch(MULTI, 2, program, tmp_path)
    assert codes == [2, 2] and errors[0].startswith(line) and errors[0].count("\n") == 0 and not errors[1]
    assert not list(tmp_path.glob("runs/*"))


REAL_POOL = MULTI.make_pool


def test_a_folder_that_rank_0_cannot_make_ends_all(tmp_path):
    (tmp_path / "file").touch()
    codes, errors = launch(MULTI, 2, lambda rank: learn(MULTI, tmp_path, run_dir=str(tmp_path / "file/runs")), tmp_path)
    assert codes == [2, 1] and errors[0].startswith("error: --run-dir ") and errors[0].count("\n") == 0
    assert not errors[1]


def test_more_ranks_than_gpus_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(MULTI, "LOCAL_WORLD_SIZE", 8)
    with pytest.raises(SystemExit) as error:
        MULTI.train(MULTI.Args(run_dir=str(tmp_path / "runs")))
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.startswith("error: --cuda True: give torchrun --nproc-per-node 4, ")
    assert not list(tmp_path.glob("runs/*"))


class QueuedCollectives:
    """torch.distributed for the emulated device: a collective is one operator in the stream's queue, as with NCCL."""

    def __getattr__(self, name):
        return getattr(torch.distributed, name)

    def init_process_group(self, backend, device_id, **ranks):
        assert backend == "cpu:gloo,cuda:nccl" and device_id == torch.device("cuda", 0)
        torch.distributed.init_process_group("gloo", **ranks)

    def queue(self, function, tensor, *args):
        assert emulated_cuda.DEVICE.capture is None, "a collective is captured"
        tensor.block.touch()
        emulated_cuda.DEVICE.enqueue(partial(function, tensor.memory, *args))

    def all_reduce(self, tensor):
        self.queue(torch.distributed.all_reduce, tensor)

    def broadcast(self, tensor, source):
        self.queue(torch.distributed.broadcast, tensor, source)


ON_CUDA = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "cuda": True, "total_timesteps": 6 * 8 * 4}


def learn_on_cuda(script, folder, late, **kwargs):
    script.LOCAL_RANK, script.LOCAL_WORLD_SIZE = 0, 1  # one device per machine
    script.dist = QueuedCollectives()
    with emulated_cuda.emulated_cuda(late):
        learn(script, folder, **ON_CUDA | kwargs)


@pytest.mark.thorough
@pytest.mark.parametrize("kwargs", [{}, {"target_kl": 1e-4, "norm_adv": False, "matmul_precision": "high"}], ids=str)
def test_graphs_change_nothing_on_an_emulated_device(kwargs, tmp_path, script=MULTI):
    """Ranks learn the same bits on a device that works at once and, with graphs, on one that is late."""
    results = []
    for late in (False, True):
        own = tmp_path / str(late)
        results.append(learn_together(script, own, program=learn_on_cuda, late=late, cudagraphs=late, **kwargs))
        assert summary(own)["cudagraphs"] is late
    at_once, later = results
    assert_equal(at_once[0]["weights"], at_once[1]["weights"])
    for got, wanted in zip(later, at_once, strict=True):
        assert got["losses"] == wanted["losses"]
        for name in ("weights", "adam", "actions"):
            assert_equal(got[name], wanted[name])


def start_torchrun(folder, *words):
    """Two ranks of the script as torchrun starts them, which write to `folder`; short, but for its updates."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", MULTI.__file__, *words]
    command += ["--num-envs", "2", "--num-steps", "20", "--no-cuda", "--run-dir", folder / "runs"]
    return subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)


@pytest.mark.thorough
def test_torchrun_starts_ranks_that_compile(tmp_path):
    process = start_torchrun(tmp_path, "--compile", "--cudagraphs", "--total-timesteps", 200)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    report = summary(tmp_path)
    assert report["ranks"] == 2 and report["global_step"] == 200
    assert errors.count("warning: --cudagraphs needs a CUDA device; running without") == 1
    assert {path.name for path in only_run(tmp_path).iterdir()} >= {"checkpoint.pt", "policy.pt2"}


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["Ctrl-C", "kill -9"])
def test_what_torchrun_does_when_it_is_over(what, tmp_path):
    """Ctrl-C reaches torchrun alone, which passes it on; a rank that is killed ends the others."""
    process = start_torchrun(tmp_path, "--total-timesteps", 10**6, "--checkpoint-interval", 40)
    while not list(tmp_path.glob("runs/*/checkpoint.pt")):
        assert process.poll() is None
        time.sleep(0.1)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) == 2
    if what == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(int(workers[1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1  # whatever its workers' are
    assert "LostRank" not in errors or what == "kill -9"  # of the other rank, unless torchrun has ended it before
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert checkpoint(tmp_path)["global_step"] == summary(tmp_path)["global_step"] > 0


check_weights = partial(test_all_ranks_hold_the_same_weights, ranks=2)
check_joint_batch = partial(test_two_ranks_learn_what_one_process_does, kwargs={})
check_on_cuda = partial(test_graphs_change_nothing_on_an_emulated_device, kwargs={})
check_drift, check_target_kl = test_ranks_that_drift_apart_are_made_equal, test_target_kl_is_that_of_all_ranks
check_seeds, check_resuming = test_seeds_of_games_do_not_overlap, test_resuming_continues_every_rank
check_on_the_way = test_resuming_from_a_checkpoint_on_the_way
check_late_signal = test_a_signal_while_all_go_on

ADD_UP = "            add_up(self.sums)\n"
CLIP = "            self.sums.mul_((self.args.max_grad_norm / self.sums[: -len(LOSSES)].norm()).clamp(max=1))\n"
OWN_KL = f"            own = 2 * self.sums[-2].clone()\n{ADD_UP}            self.sums[-2] = own\n"
BROADCAST = "            collective(dist.broadcast, tensor.detach(), 0)\n"
MINIBATCHES = "zip(order, moments, strict=True)"
MEAN = 'shares = rows["valid"] / count.clamp(min=1)'
MEAN_OF_MEANS = 'shares = rows["valid"] / rows["valid"].sum() / WORLD_SIZE'
IN_GRAPH = (
    "self.compute_gradient = self.fast(self.compute_gradient)",
    "self.learn_epoch = self.fast(self.learn_epoch)",
)
GENERATORS = ("set_generators(self.generators[RANK])", "set_generators(self.generators[0])")
KEPT = "self.learner.generators = [states"
AT_THE_END = (KEPT, f"if self.step in (0, self.args.total_timesteps):\n            {KEPT}")
BUGS = [  # what is wrong, what is replaced by what, who sees it
    ("weights of its own", BROADCAST, "            pass\n", check_weights),
    ("a minibatch that a rank skips", MINIBATCHES, f"list({MINIBATCHES})[RANK:]", check_weights),
    ("noise of rank 0", "seed=args.seed + RANK * share", "seed=args.seed", check_weights),
    ("seeds that overlap", "RANK * share", "RANK", check_seeds),
    ("clipped before it is averaged", ADD_UP, CLIP + ADD_UP, check_joint_batch),
    ("advantages of its own", "        add_up(moments)\n", "        moments[:, 0] *= 2\n", check_joint_batch),
    ("a mean of the ranks' means", MEAN, MEAN_OF_MEANS, check_joint_batch),
    ("a sum without the other ranks", ADD_UP, "", check_weights),
    ("moments of its own", "tree_leaves(self.learner.tensors())", "self.learner.agent.parameters()", check_drift),
    ("episodes of rank 0 alone", "np.concatenate(gathered(played), -1)", "np.tile(played, 2)", check_joint_batch),
    ("KL divergence of its own", ADD_UP, OWN_KL, check_target_kl),
    ("a signal of its own", "and not signals", "and self.signal is None", check_late_signal),
    ("an all-reduce in a graph", *IN_GRAPH, check_on_cuda),
    ("sums rebound instead of filled", "self.sums.copy_(torch.cat(", "self.sums = (torch.cat(", check_on_cuda),
    ("rows rebound instead of filled", "self.rows.copy_(rows)", "self.rows = rows", check_on_cuda),
    ("generators of rank 0", *GENERATORS, check_resuming),
    ("generators of the beginning, except at the end", *AT_THE_END, check_on_the_way),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("bug", "old", "new", "check"), BUGS, ids=[bug[0] for bug in BUGS])
def test_a_planted_bug_is_caught(bug, old, new, check, tmp_path):
    assert_noticed(MULTI, old, new, lambda edited: check(tmp_path=tmp_path / "run", script=edited), tmp_path)
