"""Instruments do not change a run, report correct values, and catch planted bugs."""

import contextlib
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    AGENTS,
    ATARI,
    ENTRIES,
    PLAIN,
    TURBO,
    VARIANTS,
    Countdown,
    algorithm,
    assert_same_state,
    leaves,
    load_copy,
    make_learner,
    scalars,
    stem,
)
from emulated_cuda import emulated_cuda
from helpers import refused
from test_docs_debugging import plant
from test_edits import edited
from test_training_on_cuda import SIZES
from torch.utils.tensorboard import SummaryWriter

from common.scripts import optimizers_of
from instruments import __main__ as command
from instruments import frames, instrument, playing, plots, videos
from instruments.baseline import RandomBaseline
from instruments.frames import FrameDump, in_order
from instruments.gradients import GradientWatch, ModuleLayers, keep_gradients
from instruments.profiler import Profile
from instruments.videos import VideoOnDemand

SCRIPTS = {"plain": PLAIN, "turbo": TURBO}
SCRIPT = "leanrl/sac_continuous_action.py"


ALL = {f"{name}-{kind}": script for kind, scripts in SCRIPTS.items() for name, script in scripts.items()}
ALL |= {stem(script): script for script in VARIANTS}


def each_script(left_out=AGENTS):
    marks = {name: pytest.mark.xfail(reason=reason, strict=True) for name, reason in left_out.items()}
    params = [pytest.param(script, id=name, marks=marks.get(name, ())) for name, script in ALL.items()]
    return pytest.mark.parametrize("script", params)


@pytest.fixture
def always(monkeypatch):
    """Instruments look at each log, whatever it costs."""
    monkeypatch.setattr(instrument, "SHARE", math.inf)


@pytest.fixture
def copy(tmp_path):
    """A function that loads a fresh copy of a script, with edits: instruments change the module."""

    def load(script, *edits):
        source = Path(script.__file__).read_text()
        for old, new in edits:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        module = load_copy(Path(script.__file__).stem, source, tmp_path)
        module.LOG_INTERVAL = 10
        return module

    return load


def train(script, folder, instruments, **flags):
    """Train with instruments; returns the run's folder and, where the run has ended itself, why, else ""."""
    end = ""
    try:
        command.train(script, script.Args(run_dir=str(folder), **flags), instruments)
    except SystemExit as stop:
        end = stop.code
    (run,) = folder.glob("*/")
    return run, end


def state(folder):
    return torch.load(folder / "checkpoint.pt")["learner"]


@each_script()
def test_a_watched_run_learns_the_same(script, copy, tmp_path, always):
    name = algorithm(script)
    instruments = [GradientWatch(), RandomBaseline(1), Profile()]
    instruments += [FrameDump(10)] if name in ATARI else [VideoOnDemand()]
    watched, _ = train(copy(script), tmp_path / "watched", instruments, **SIZES[name])
    alone, _ = train(copy(script), tmp_path / "alone", [], **SIZES[name])
    assert_same_state(state(watched), state(alone))
    assert scalars(watched, "charts/random_return")


ON_POLICY = {"num_steps": 4, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 160, "desired_kl": None}
OFF_POLICY = {"policy_frequency": 1, "updates_per_step": 1}


@pytest.mark.parametrize("name", TURBO)
def test_each_layer_is_there_with_its_last_change(name, copy, tmp_path, always):
    """The last change of weights is by how much they have moved since the last log, in updates of one step each."""
    seen = {}

    class Keep(GradientWatch):
        def write_histograms(self):
            pass

        def look(self, losses):
            layers = {layer: [x.clone() for x in tensors] for layer, tensors in self.layers().items()}
            args, learner = self.run.args, self.run.learner
            on_policy = not hasattr(learner, "updates")  # one per iteration
            updates = self.run.step // (args.num_steps * args.num_envs) if on_policy else learner.updates
            seen.setdefault(updates, layers)

    script = copy(TURBO[name])
    script.LOG_INTERVAL = 1
    flags = OFF_POLICY if ENTRIES[name].off_policy else ON_POLICY
    flags = {flag: value for flag, value in flags.items() if hasattr(script.Args, flag)}
    train(script, tmp_path / "run", [Keep()], **SIZES[name] | flags)
    plain = make_learner(PLAIN[name])
    wanted = set()
    for key in plain.optimizers:
        network = plain.networks.get(key)
        wanted |= {f"{key}.{layer}" for layer, _ in network.named_parameters()} if network else {key}
    moved = 0
    for before, after in itertools.pairwise(sorted(seen)):
        assert seen[after].keys() == wanted
        for layer, (_, weights, change) in seen[after].items():
            if after - before == 1 and not change.isnan().any():
                torch.testing.assert_close(seen[before][layer][1] - weights, change, rtol=1e-3, atol=1e-6)
                moved += 1
    assert moved


def test_the_changes_of_radam_are_those_of_its_steps():
    """Its first five steps are of momentum alone, the later ones rectified."""
    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.RAdam(network.parameters(), lr=0.1)
    watched = ModuleLayers(SimpleNamespace(q=network, optimizers={"q": optimizer}), "q")
    assert all(change.isnan().all() for _, _, change in watched.layers().values())
    for _ in range(8):
        before = [parameter.detach().clone() for parameter in network.parameters()]
        optimizer.zero_grad()
        network(torch.randn(16, 3)).square().mean().backward()
        optimizer.step()
        for weights, (_, after, change) in zip(before, watched.layers().values(), strict=True):
            torch.testing.assert_close(weights - after, change)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_gradients_are_those_of_the_step(kind, copy, tmp_path, always):
    """After the first step Adam's first moment is a tenth of the gradient."""
    found = []

    class Keep(GradientWatch):
        def look(self, losses):
            if self.run.learner.updates > 1:
                self.run.stop = True
                return
            optimizer = self.run.learner.optimizers["critics"]
            if kind == "plain":
                moments = [state["exp_avg"] for state in optimizer.state.values()]
                gradients = [layers[0] for name, layers in self.layers().items() if name.startswith("critics")]
                found.extend((m.clone(), g.clone()) for m, g in zip(moments, gradients, strict=True))
            else:
                found.extend((m.clone(), g[0].clone()) for m, g in zip(optimizer.m, optimizer.gradients, strict=True))

    script = copy(SCRIPTS[kind]["sac"])
    script.LOG_INTERVAL = 1
    train(script, tmp_path / "run", [Keep()], **SIZES["sac"])
    assert found
    for moment, gradient in found:
        torch.testing.assert_close(moment, 0.1 * gradient)
        assert gradient.any()


CUT = (
    "return self.net(torch.cat((obs, actions), -1))",
    "return self.net[4](self.net[:4](torch.cat((obs, actions), -1)).detach())",
)


@pytest.mark.parametrize("edits", [(), (CUT,)], ids=["intact", "cut"])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_layers_without_a_gradient_are_named_once(kind, edits, copy, tmp_path, capsys, always):
    flags = SIZES["sac"] | {"autotune": bool(edits)}
    _, end = train(copy(SCRIPTS[kind]["sac"], *edits), tmp_path / "run", [GradientWatch()], **flags)
    assert not end
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    named = [line.split("gradient of ")[1].split(" ")[0] for line in lines]
    cut = {f"critics.{i}.net.{j}.{part}" for i in (0, 1) for j in (0, 2) for part in ("weight", "bias")}
    assert sorted(named) == sorted(cut if edits else ())


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_exploding_gradients_end_the_run(cudagraphs, copy, tmp_path, always):
    """The loss of the critics grows by a fifth in each update."""
    growing = "        self.growth.mul_(1.2)\n        qf_loss = self.growth * (q - target)"
    updates = "        self.updates = 0\n"
    edits = [
        ("        qf_loss = (q - target)", growing),
        (updates, f"{updates}        self.growth = torch.ones((), device=device)\n"),
    ]
    flags = SIZES["sac"] | {"total_timesteps": 400, "checkpoint_interval": 50, "cudagraphs": cudagraphs}
    with emulated_cuda() if cudagraphs else contextlib.nullcontext():
        run, line = train(copy(TURBO["sac"], *edits), tmp_path / "run", [GradientWatch()], **flags)
    assert "the gradient of critics." in line and "explodes" in line
    step = int(line.split("step ")[1].split(":")[0])
    checkpoint = torch.load(run / "checkpoint.pt")
    assert step - 50 <= checkpoint["global_step"] < step
    assert all(x.isfinite().all() for _, x in leaves(checkpoint["learner"]["networks"]))


@each_script()
def test_a_reward_that_is_nan_ends_the_run_and_names_the_layers(script, copy, tmp_path, always):
    """After the checkpoint in the middle of the run, which stays."""
    script = copy(script)
    script.LOG_INTERVAL = 1  # the look after an update comes before the next action, which cannot be drawn from NaN
    sizes = SIZES[algorithm(script)]
    half = 2 * sizes["total_timesteps"]
    begin = 1.25 * half

    class Spoil(GradientWatch):
        def start(self, run):
            super().start(run)
            step = run.envs.step

            def spoilt(actions):
                results = step(np.nan_to_num(actions) if isinstance(actions, np.ndarray) else actions)
                if run.step >= begin:
                    next(x for x in results if x.ndim == 1 and "float" in str(x.dtype))[:] = math.nan  # rewards
                return results

            run.envs.step = spoilt

    flags = sizes | {"total_timesteps": 2 * half, "checkpoint_interval": half}
    run, line = train(script, tmp_path / "run", [Spoil()], **flags)
    assert "the gradient of " in line and "all layers of " in line and "is not finite" in line
    checkpoint = torch.load(run / "checkpoint.pt")
    assert half <= checkpoint["global_step"] < 2 * half
    assert all(x.isfinite().all() for _, x in leaves(checkpoint["learner"]["networks"]) if torch.is_tensor(x))


def test_one_layer_that_is_not_finite_is_named(copy, tmp_path, always):
    """Square roots of 0 in the critics: their derivative is infinite, and times 0 that is NaN, for one bias alone."""
    zero = "0 * self.net[0].bias.sub(self.net[0].bias).sqrt()"
    spoilt = f"return self.net[4](self.net[:4](torch.cat((obs, actions), -1)) + {zero})"
    _, line = train(copy(TURBO["sac"], (CUT[0], spoilt)), tmp_path / "run", [GradientWatch()], **SIZES["sac"])
    assert "critics.0.net.0.bias, critics.1.net.0.bias, " in line and "layers of critics" not in line


def test_the_first_gradient_that_is_not_finite_is_kept(copy):
    """Later ones would not tell any more which layers were the first."""
    script = copy(TURBO["sac"])
    weights = torch.zeros(4, requires_grad=True)
    keep_gradients(script.Adam)
    optimizer = script.Adam([weights], 0.1)
    for gradient in ([1.0, 2.0, 3.0, 4.0], [1.0, math.nan, 3.0, 4.0], [math.nan] * 4):
        optimizer.step((weights * torch.tensor(gradient)).sum())
    assert optimizer.gradients[0][0].isnan().tolist() == [False, True, False, False]
    assert optimizer.tensors().keys() == TURBO["sac"].Adam([weights], 0.1).tensors().keys()


@pytest.mark.parametrize("name", TURBO)
def test_gradients_are_read_from_what_cuda_graphs_write(name, copy, tmp_path, always, monkeypatch):
    """On the emulated device, with and without graphs, at once and late: the same norms at each log. Without graphs
    critics run one by one, which rounds differently.
    """
    monkeypatch.setattr(GradientWatch, "write_histograms", lambda watch: None)  # dear, and not what is compared
    logged = []
    tags = None
    for cudagraphs, late in ((False, False), (True, False), (True, True)):
        with emulated_cuda(late):
            folder = tmp_path / f"{cudagraphs}-{late}"
            flags = SIZES[name] | {"cudagraphs": cudagraphs}
            run, _ = train(copy(TURBO[name]), folder, [GradientWatch()], **flags)
        tags = tags or [f"gradients/{layer}" for layer in first_layers(name)]
        logged.append({tag: scalars(run, tag) for tag in tags})
    assert all(len(values) > 1 for values in logged[0].values())
    assert logged[1] == logged[2]
    for tag, norms in logged[0].items():
        assert logged[1][tag] == pytest.approx(norms, rel=1e-4), tag


def test_gradients_are_read_from_compiled_updates(copy, tmp_path, always):
    name = "dqn"
    norms = []
    for compile in (False, True):
        folder = tmp_path / str(compile)
        run, _ = train(copy(TURBO[name]), folder, [GradientWatch()], **SIZES[name] | {"compile": compile})
        norms.append({tag: scalars(run, f"gradients/{tag}")[:2] for tag in first_layers(name)})
    assert all(len(own) == 2 for own in norms[0].values())
    for tag, own in norms[0].items():
        assert norms[1][tag] == pytest.approx(own, rel=1e-3), tag


def first_layers(name):
    key = next(iter(optimizers_of(make_learner(TURBO[name]))))
    networks = make_learner(TURBO[name]).tensors()["networks"][key]
    return [f"{key}.{layer}" for layer in networks if layer.endswith("weight")]


def test_nothing_waits_outside_of_logs(copy, tmp_path, monkeypatch):
    """With a pace that lets it look once a watched run waits for the device some more times, however long it is."""
    monkeypatch.setattr(instrument, "SHARE", 1e-12)
    more = []
    for steps in (300, 600):
        waits = []
        for watching in (False, True):
            with emulated_cuda() as device:
                flags = SIZES["sac"] | {"cudagraphs": True, "total_timesteps": steps}
                train(copy(TURBO["sac"]), tmp_path / f"{steps}-{watching}", [GradientWatch()] * watching, **flags)
                waits.append(device.counts["waits"])
        more.append(waits[1] - waits[0])
    assert more[0] == more[1] > 0


def test_the_random_baseline_goes_to_bar_file_and_plot(copy, tmp_path, capsys):
    flags = SIZES["dqn"] | {"env_id": "FourActions-v0", "total_timesteps": 200}
    run, _ = train(copy(TURBO["dqn"]), tmp_path / "run", [RandomBaseline(50)], **flags)
    baseline = json.loads((run / "random_baseline.json").read_text())
    mean = baseline["mean_return"]
    assert baseline["episodes"] == 50 and 2 < baseline["standard_deviation"] < 10
    assert 20 * 1.0 < mean < 20 * 2.0  # each action is its own reward, 0 to 3, for 20 steps
    assert f"mean return {mean:.2f} over 50 episodes" in (err := capsys.readouterr().err)
    assert f"random={mean:.1f}" in err and "return=" in err
    assert set(scalars(run, "charts/random_return")) == {np.float32(mean)}
    axes = Mock()
    plots.draw_run([axes], plots.read_events(run), (), "run", "black")
    (height,), style = axes.axhline.call_args
    assert style["linestyle"] == "--" and height == np.float32(mean)


def test_an_episode_of_the_random_baseline_is_a_whole_one():
    gym.register("Long-v0", entry_point=Countdown, kwargs={"length": 1500})
    baseline = RandomBaseline(2)
    baseline.prepare(None, SimpleNamespace(env_id="Long-v0", seed=1))
    assert baseline.mean == 1500 and baseline.deviation == 0


def test_plots_of_nothing_are_refused(tmp_path, capsys):
    """Events that are empty, damaged from the first byte on, or of a run that is too short."""
    for name in ("empty", "damaged", "short"):
        with SummaryWriter(tmp_path / name) as writer:
            writer.add_scalar("losses/qf_loss", 1.0, 10)
        (path,) = (tmp_path / name).iterdir()
        if name != "short":
            path.write_bytes(b"" if name == "empty" else b"\x01" + path.read_bytes()[1:])
    output = tmp_path / "plot.png"
    said = {name: "its TensorBoard events are empty or damaged; leave it out" for name in ("empty", "damaged")}
    said["short"] = "no episode has ended; name what to draw by --tags, or train longer"
    for name, remedy in said.items():
        args = plots.Args(runs=(tmp_path / name,), output=output)
        assert refused(capsys, plots.main, args) == f"runs {tmp_path / name}: {remedy}" and not output.exists()
    plots.main(plots.Args(runs=(tmp_path / "short",), tags=("losses/*",), output=output))
    assert output.exists()


def test_plots(copy, tmp_path, capsys):
    import matplotlib.font_manager  # noqa: F401  (the first time it may say that it builds a cache)

    run, _ = train(copy(TURBO["dqn"]), tmp_path / "run", [], **SIZES["dqn"])
    capsys.readouterr()
    plots.main(plots.Args(runs=(run,), tags=("losses/*",), labels=("one",), output=tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert not capsys.readouterr().err
    plots.main(plots.Args(runs=(run,), tags=("losses/typo",), output=tmp_path / "plot.png"))
    assert capsys.readouterr().err == "warning: --tags losses/typo: no run has it\n"
    args = plots.Args(runs=(run,), output=tmp_path / "nowhere" / "plot.png")
    assert "give a PNG or SVG file in a folder that exists" in refused(capsys, plots.main, args)


class Ask(VideoOnDemand):
    """Asks for a video at the first log."""

    asked = False

    def log(self, losses):
        if not self.asked:
            self.request.touch()
        self.asked = True
        super().log(losses)


def test_a_file_asks_for_a_video(copy, tmp_path, capsys):
    run, end = train(copy(TURBO["sac"]), tmp_path / "run", [Ask()], **SIZES["sac"])
    alone, _ = train(copy(TURBO["sac"]), tmp_path / "alone", [], **SIZES["sac"])
    assert_same_state(state(run), state(alone))
    assert not end and not (run / "watch").exists()
    assert len(list(run.glob("videos/step-*-episode-0.mp4"))) == 1
    assert "an episode of return " in capsys.readouterr().err


def test_a_video_that_fails_leaves_the_run_alone(copy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(videos, "make_env", lambda *args: 1 / 0)
    run, end = train(copy(TURBO["sac"]), tmp_path / "run", [Ask()], **SIZES["sac"])
    assert not end and (run / "summary.json").exists()
    assert "warning: no video: ZeroDivisionError: division by zero" in capsys.readouterr().err


@each_script()
def test_a_profile_of_twenty_steps(script, copy, tmp_path, capsys):
    script = copy(script)
    flags = SIZES[algorithm(script)] | {"total_timesteps": 800}
    if ENTRIES[algorithm(script)].off_policy:
        script.LOG_INTERVAL = 30
    else:
        del script.LOG_INTERVAL
        flags["num_steps"] = 32
    steps = []

    class Count(Profile):
        def start(self, run):
            super().start(run)
            self.step = run.envs.step = Mock(side_effect=run.envs.step)

        def begin(self):
            steps.append(self.step.call_count)
            super().begin()

        def finish(self):
            steps.append(self.step.call_count)
            super().finish()

    run, _ = train(script, tmp_path / "run", [Count()], **flags)
    begin, end = steps
    assert end - begin == 20
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert any("lerp_" in event["name"] for event in events)  # of moments
    assert "Self CPU" in (err := capsys.readouterr().err) and "warning" not in err


def test_a_run_too_short_for_a_profile(copy, tmp_path, capsys):
    run, _ = train(copy(TURBO["sac"]), tmp_path / "run", [Profile()], **SIZES["sac"] | {"total_timesteps": 44})
    assert not (run / "trace.json").exists()
    assert "warning: no profile" in capsys.readouterr().err


@pytest.fixture
def watch():
    """A watch that has seen nothing yet."""
    watch = GradientWatch()
    watch.usual = {}
    watch.zeros = Counter()
    watch.run = SimpleNamespace(step=7)
    watch.end_run = pytest.fail
    return watch


def test_norms_before_clipping_are_watched_too(watch):
    """PPO's gradients are clipped before the optimiser sees them."""
    for norm in (0.0, 1e-6, 90.0, 0.3, 0.5, 0.4, 0.5, 0.6, 90.0, 0.5):  # not yet 100
        watch.trap_explosion({"agent.log_std": 0.5}, {"grad_norm": norm})
    with pytest.raises(pytest.fail.Exception, match="all layers before clipping explodes: its norm is 600, 0"):
        watch.trap_explosion({"agent.log_std": 0.5}, {"grad_norm": 600.0})


def test_slow_growth_is_an_explosion_too(watch):
    with pytest.raises(pytest.fail.Exception, match="the gradient of critic explodes"):
        for look in range(200):
            watch.trap_explosion({"critic": 1.2**look}, {})


def test_a_gradient_is_dead_after_zeros_in_a_row(watch, capsys):
    """Not one that is zero at every second look, nor two zeros after two zeros. The third zero in a row is named."""
    for norm in 5 * [0.0, 1.0] + [0.0, 0.0, 1.0, 0.0, 0.0]:
        watch.trap_zero({"critic": norm, "actor": 1.0})
    assert not capsys.readouterr().err
    for _ in range(3):
        watch.trap_zero({"critic": 0.0, "actor": 1.0})
    line = "warning: step 7: the gradient of critic is zero: nothing that this layer does reaches the loss\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("kind", SCRIPTS)
def test_an_edited_optimiser_is_watched(kind, tmp_path, always):
    """AdamW, an edit of doc/changing.md."""
    script = edited("adamw", kind, tmp_path)
    script.LOG_INTERVAL = 10
    run, end = train(script, tmp_path / "run", [GradientWatch()], **SIZES["sac"])
    assert not end
    assert min(scalars(run, "gradients/critics.1.net.0.weight")) > 0


def test_a_scrambled_frame_stack_is_noticed(copy, tmp_path, capsys):
    _, *scrambled = plant.BUGS["third"]
    for edits, warns in (((), False), ((scrambled,), True)):
        folder = tmp_path / str(warns)
        flags = SIZES["ppo_atari"] | {"total_timesteps": 192}
        run, _ = train(copy(TURBO["ppo_atari"], *edits), folder, [FrameDump(50)], **flags)
        assert len(list(run.glob("frames/*.png"))) >= 3
        assert ("frames are out of order" in capsys.readouterr().err) == warns


@pytest.mark.parametrize("told", [True, False])
def test_resets_among_frames_are_no_disorder(told, tmp_path, capsys):
    """Most stacks begin an episode. They do not continue the stack before, which is as it should be where it is told.

    The environment reuses the memory of its observations.
    """
    begins = [True, True, False] * 3
    film = np.random.default_rng(0).integers(0, 255, (99, 84, 84), np.uint8)
    starts = np.cumsum([9 if begin else 1 for begin in begins])
    moments = iter(zip(starts, begins, strict=True))
    obs = np.empty((1, 4, 84, 84), np.uint8)

    def step(actions):
        start, begin = next(moments)
        obs[0] = film[start : start + 4]
        return obs, {"is_reset": [begin and told]}

    learner = SimpleNamespace(policy=lambda: (torch.nn.Identity(), ()))
    run = SimpleNamespace(step=0, folder=tmp_path, learner=learner, envs=SimpleNamespace(step=step))
    FrameDump(1).start(run)
    for _ in range(frames.STEPS):
        run.envs.step(None)
    assert run.envs.step is step and (tmp_path / "frames" / "0.png").exists()
    assert ("frames are out of order" in capsys.readouterr().err) != told


def test_pictures_need_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(frames, "find_spec", lambda module: None)
    script = TURBO["dqn_atari"]
    line = refused(capsys, FrameDump(9).prepare, script, script.Args())
    assert line == "--dump-frames 9: pip install matplotlib, or leave this out"


def test_order_of_frames():
    film = np.random.default_rng(0).integers(0, 255, (20, 6, 6))
    stacks = np.stack([film[t : t + 4] for t in range(8)])
    resets = [False] * 8
    assert in_order(stacks, resets)
    assert not in_order(stacks[:, ::-1], resets)
    assert not in_order(stacks[:, [1, 0, 2, 3]], resets)
    assert in_order(stacks[:, ::-1], [True] * 8)  # nothing to compare
    assert in_order(np.zeros((8, 4, 6, 6)), resets)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--: give a script behind two dashes"),
        ("-- leanrl/nothing.py", "-- leanrl/nothing.py: this is no Python file"),
        ("-- README.md", "-- README.md: this is no Python file"),
        ("-- tests/algorithms/catch.py", "-- tests/algorithms/catch.py: it has no `train`"),
        (f"--dump-frames -1 -- {SCRIPT}", "--dump-frames -1: give a number from 0"),
        (f"--dump-frames 9 -- {SCRIPT}", "--dump-frames 9: HalfCheetah-v5 is not an Atari game"),
        (
            "--watch-gradients -- leanrl/sac_population_torchcompile.py",
            "--watch-gradients: this script trains a population",
        ),
        (f"--random-baseline 2 -- {SCRIPT} --env-id No-v0", "--random-baseline 2: cannot play No-v0"),
        (f"--profile -- {SCRIPT} --env-id CartPole-v1", "--env-id CartPole-v1: actions must be bounded"),
    ],
)
def test_bad_input_gets_one_line(words, message, capsys, monkeypatch):
    monkeypatch.setattr(command.sys, "argv", ["instruments"])
    assert refused(capsys, command.main, words.split()).startswith(message)


@pytest.mark.parametrize(("env_id", "follows"), [("HalfCheetah-v5", True), ("InvertedPendulum-v5", False)])
def test_a_video_follows_a_body_that_runs(env_id, follows):
    """Where the model has a camera for that. Without it the cheetah leaves the picture within two seconds."""
    env = playing.make_env(env_id, 1, "rgb_array")
    assert (env.unwrapped.mujoco_renderer.camera_id >= 0) == follows
    env.close()
