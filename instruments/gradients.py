"""Norms of gradients and weights per layer, and checks for gradients that are zero, explode or are not finite."""

import math
import statistics
import sys
from collections import Counter, deque

import torch
from tqdm import tqdm

from common.scripts import optimizers_of, refuse_population
from instruments.instrument import Instrument, Pace

HISTORY = 100  # samples that define the usual norm; many, so that slow growth is noticed too
EXPLODES = 1000.0  # times the usual norm
LEAST = 100.0  # the smallest norm of an explosion: a first reward also makes small gradients large
ZERO_LOOKS = 3  # in a row before a warning
ROUNDING = 1e-6  # of the first moment: a smaller gradient counts as 0


class GradientWatch(Instrument):
    """Logs at intervals: norms as `gradients/<layer>` and `weights/<layer>`; the norm of the last change over that of
    the weights as `update_ratios/<layer>`; `gradient_histograms/<layer>` and `weight_histograms/<layer>`.

    A layer whose gradient stays zero is named once. If a norm is infinite, NaN or a thousand times the usual norm, the
    run ends with exit code 1, without another checkpoint. Gradients are those that the optimizer gets. PPO and PQN clip
    theirs before that, so `grad_norm` among their losses is watched as well.
    """

    def prepare(self, script, args):
        super().prepare(script, args)
        refuse_population("--watch-gradients", script)
        for optimizer in vars(script).values():
            if isinstance(optimizer, type) and hasattr(optimizer, "beta1"):  # before compilation and capture
                keep_gradients(optimizer)

    def start(self, run):
        super().start(run)
        self.numbers = Pace()
        self.histograms = Pace()
        self.usual = {}
        self.zeros = Counter()
        self.save = run.save
        run.save = self.save_if_sound
        learner = run.learner
        self.sources = {}
        for name, optimizer in optimizers_of(learner).items():
            source = ModuleLayers if isinstance(optimizer, torch.optim.Optimizer) else TurboLayers
            self.sources[name] = source(learner, name)

    def log(self, losses):
        undefined = "explained_variance"  # if all returns are equal
        bad = any(not math.isfinite(value) for name, value in losses.items() if name != undefined)
        if bad or self.numbers.due:
            with self.numbers:
                self.look(losses)
        if self.histograms.due:
            with self.histograms:
                self.write_histograms()

    def save_if_sound(self):
        """Save unless gradients exploded: such a checkpoint would replace the last good one."""
        self.look({})
        return self.save()

    def layers(self):
        """Gradient, weights and the last change of the weights, by layer; changes are NaN before the first step."""
        layers = {}
        for source in self.sources.values():
            layers |= source.layers()
        return layers

    def look(self, losses):
        names, norms = [], []
        for name, tensors in self.layers().items():
            names.append(name)
            norms += [tensor.norm() for tensor in tensors]
        if not names:
            return
        triples = torch.stack(norms).view(len(names), 3).tolist()  # the only wait for the device
        rows = dict(zip(names, triples, strict=True))
        self.trap_not_finite({name: gradient for name, (gradient, _, _) in rows.items()})
        stepped = {name: row for name, row in rows.items() if not math.isnan(row[2])}
        gradients = {name: gradient for name, (gradient, _, _) in stepped.items()}
        self.trap_explosion(gradients, losses)
        self.trap_zero(gradients)
        for name, (gradient, weights, change) in stepped.items():
            self.write("gradients", name, gradient)
            self.write("weights", name, weights)
            if weights > 0:
                self.write("update_ratios", name, change / weights)

    def write(self, kind, name, value):
        self.run.writer.add_scalar(f"{kind}/{name}", value, self.run.step)

    def write_histograms(self):
        for name, (gradient, weights, _) in self.layers().items():
            if gradient.isfinite().all() and weights.isfinite().all():
                self.run.writer.add_histogram(f"gradient_histograms/{name}", gradient, self.run.step)
                self.run.writer.add_histogram(f"weight_histograms/{name}", weights, self.run.step)

    def end_run(self, what):
        self.run.end_at_nan(what)

    def trap_not_finite(self, gradients):
        said = []
        for network in self.sources:
            layers = [name for name in gradients if name.split(".")[0] == network]
            bad = [name for name in layers if not math.isfinite(gradients[name])]
            said += [f"all layers of {network}"] if len(bad) == len(layers) > 1 else bad
        if said:
            self.end_run(f"the gradient of {', '.join(said)} is not finite")

    def trap_explosion(self, gradients, losses):
        watched = dict(gradients)
        if "grad_norm" in losses:
            watched["all layers before clipping"] = losses["grad_norm"]
        for name, norm in watched.items():
            past = self.usual.setdefault(name, deque(maxlen=HISTORY))
            usual = statistics.median(past) if past else math.inf
            if norm > max(EXPLODES * usual, LEAST):
                largest = max(gradients, key=gradients.get)
                what = f"the gradient of {name} explodes: its norm is {norm:.3g}, {usual:.3g} was usual"
                self.end_run(f"{what}; the largest layer is {largest}")
            past.append(norm)

    def trap_zero(self, gradients):
        for name, norm in gradients.items():
            self.zeros[name] = self.zeros[name] + 1 if norm == 0 else 0
            if self.zeros[name] == ZERO_LOOKS:
                where = f"warning: step {self.run.step}: the gradient of {name} is zero"
                tqdm.write(f"{where}: nothing that this layer does reaches the loss", file=sys.stderr)


def keep_gradients(adam):
    """Make a script's Adam keep its newest gradients, or the first non-finite ones once there are any.

    They are recovered from the change of its first moments, a list or one vector.
    """
    initialize, step = adam.__init__, adam.step

    def __init__(self, weights, *settings, **named_settings):
        initialize(self, weights, *settings, **named_settings)
        self.gradients = [m.new_zeros(2, *m.shape) for m in listed(self.m)]  # row 1: the first non-finite ones
        self.row = torch.zeros(1, dtype=torch.int64, device=self.weights[0].device)
        self.corrects_next = hasattr(self, "corrections") and bool(self.corrections.any())

    def step_and_keep(self, loss):
        without = [m.lerp(torch.zeros_like(m), 1 - self.beta1) for m in listed(self.m)]  # as if the gradient were 0
        result = step(self, loss)
        with torch.no_grad():
            finite = torch.ones((), dtype=torch.bool, device=self.row.device)
            for kept, m, rest in zip(self.gradients, listed(self.m), without, strict=True):
                gradient = (m - rest) / (1 - self.beta1)
                gradient = gradient.masked_fill(gradient.abs() <= ROUNDING * m.abs(), 0.0)
                kept.index_copy_(0, self.row, gradient.unsqueeze(0))
                finite = finite & gradient.sum().isfinite()
            self.row.bitwise_or_(finite.logical_not())
        return result

    adam.__init__, adam.step = __init__, step_and_keep


def listed(moments):
    """The moments of an Adam as a list, even if they are one vector for all weights."""
    return moments if isinstance(moments, list) else [moments]


class TurboLayers:
    """The layers of an optimizer that keeps gradients, also under CUDA graphs."""

    def __init__(self, learner, name):
        self.optimizer = optimizers_of(learner)[name]
        network = getattr(learner, name, None)
        self.stacked = isinstance(network, dict)  # critics, with a leading dimension
        if self.stacked:
            self.names = [f"{name}.{{}}.{layer}" for layer, weights in network.items() if weights.requires_grad]
        elif isinstance(network, torch.nn.Module):
            layers = network.named_parameters()
            self.names = [f"{name}.{layer}" for layer, weights in layers if weights.requires_grad]
        else:
            self.names = [name]

    @torch.no_grad()
    def layers(self):
        optimizer = self.optimizer
        layers = {}
        moments = ([kept[0] for kept in optimizer.gradients], listed(optimizer.m), listed(optimizer.v))
        if hasattr(optimizer, "parts"):  # one vector for all weights
            moments = [optimizer.parts(vector) for (vector,) in moments]
        for name, weights, gradient, m, v in zip(self.names, optimizer.weights, *moments, strict=True):
            triple = (gradient, weights.detach(), self.last_change(weights.detach(), m, v))
            if self.stacked:
                layers |= {name.format(i): member for i, member in enumerate(zip(*triple, strict=True))}
            else:
                layers[name] = triple
        return layers

    def last_change(self, weights, m, v):
        """The last step's change of weights with these moments; NaN before the first step."""
        optimizer = self.optimizer
        if hasattr(optimizer, "steps"):
            betas = (optimizer.beta1, optimizer.beta2)
            return radam_change(m, v, float(optimizer.steps), betas, optimizer.lr, optimizer.eps)
        corrections = optimizer.corrections
        if optimizer.corrects_next:  # those before the step's end
            corrections = (corrections - optimizer.rates) / (1 - optimizer.rates)
        correction1, correction2 = corrections
        change = optimizer.lr * (m / correction1) / ((v / correction2).sqrt() + optimizer.eps)
        return with_decay(change, weights, optimizer.lr * getattr(optimizer, "weight_decay", 0.0))


class ModuleLayers:
    """The layers of a torch.optim.Adam or RAdam. Gradients are copied at each step, since other losses add to them."""

    def __init__(self, learner, name):
        self.optimizer = optimizers_of(learner)[name]
        network = getattr(learner, name, None)
        is_module = isinstance(network, torch.nn.Module)
        names = {p: f"{name}.{layer}" for layer, p in network.named_parameters()} if is_module else {}
        self.groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        self.names = [names.get(p, name) for p in self.groups]
        self.gradients = {p: torch.zeros_like(p) for p in self.groups}
        self.optimizer.register_step_pre_hook(self.keep)

    def keep(self, *_):
        for parameter, gradient in self.gradients.items():
            gradient.zero_() if parameter.grad is None else gradient.copy_(parameter.grad)

    @torch.no_grad()
    def layers(self):
        triples = [
            (gradient, parameter.detach(), self.last_change(parameter))
            for parameter, gradient in self.gradients.items()
        ]
        return dict(zip(self.names, triples, strict=True))

    def last_change(self, parameter):
        """The last step's change of a parameter; NaN before the first step, 0 for a parameter without a gradient."""
        if not self.optimizer.state:
            return torch.full_like(parameter, math.nan)
        state = self.optimizer.state.get(parameter)
        if not state:
            return torch.zeros_like(parameter)
        group = self.groups[parameter]
        if isinstance(self.optimizer, torch.optim.RAdam):
            moments = (state["exp_avg"], state["exp_avg_sq"])
            return radam_change(*moments, float(state["step"]), group["betas"], group["lr"], group["eps"])
        correction1, correction2 = (1 - beta ** float(state["step"]) for beta in group["betas"])
        root = (state["exp_avg_sq"] / correction2).sqrt() + group["eps"]
        change = group["lr"] * (state["exp_avg"] / correction1) / root
        decay = group["weight_decay"] if isinstance(self.optimizer, torch.optim.AdamW) else 0.0
        return with_decay(change, parameter.detach(), group["lr"] * decay)


def with_decay(change, weights, share):
    """A step's whole change of the `weights` after it, by a `change` and, before that, a decay by a share of them."""
    return change + share * (weights + change) / (1 - share)


def radam_change(m, v, steps, betas, lr, eps):
    """The change of weights by step number `steps` of torch.optim.RAdam, with the moments after it; NaN for step 0."""
    if steps == 0:
        return torch.full_like(m, math.nan)
    correction1, correction2 = (1 - beta**steps for beta in betas)
    change = lr * (m / correction1)
    longest = 2 / (1 - betas[1]) - 1
    length = longest - 2 * steps * betas[1] ** steps / correction2
    if length <= 5:
        return change  # of momentum alone
    rectification = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return change * math.sqrt(rectification * correction2) / (v.sqrt() + eps)
