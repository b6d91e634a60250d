"""The tricks of the turbo scripts, each with the edits of a script's text that remove it. ablation.py measures them.

Without a trick, a script learns the same up to rounding.
"""

from dataclasses import dataclass

from common import ROOT

EAGER = ("eager", "cudagraphs")  # modes without compilation
COMPILED = ("compile", "compile+cudagraphs")
ALL = EAGER + COMPILED


@dataclass(frozen=True)
class Trick:
    name: str
    """name, used for the folder of its runs"""
    where: str
    """the function that implements it"""
    what: str
    """the trick, and the alternative"""
    modes: tuple[str, ...]
    """modes in which removing it makes a difference: a compiler removes much redundant work by itself"""
    edits: tuple[tuple[str, str], ...]
    """texts that occur once in the script, and their replacements; some leave code after a return"""


def without(algo, trick):
    """The text of the turbo script without a trick; ValueError unless each text to replace occurs exactly once."""
    source = (ROOT / "leanrl" / f"{algo}_torchcompile.py").read_text()
    for old, new in trick.edits:
        if source.count(old) != 1:
            raise ValueError(f"{algo}, {trick.name}: {source.count(old)} places, not one, with this text: {old}")
        source = source.replace(old, new)
    return source


# ---------------------------------------------------------------------------------------------------------------------
# Tricks of multiple scripts
# ---------------------------------------------------------------------------------------------------------------------


OWN_ADAM = Trick(
    "own_adam",
    "Adam.step",
    "Adam in a few operations on all parameters at once, not `torch.optim.Adam`",
    EAGER,
    (
        (
            "        self.corrections = torch.zeros_like(self.rates)",
            """\
        settings = {"eps": self.eps, "capturable": device.type == "cuda"}
        self.optimizer = torch.optim.Adam(self.weights, lr, (self.beta1, self.beta2), **settings)
        self.corrections = torch.zeros_like(self.rates)""",
        ),
        (
            "        self.corrections.lerp_(self.one, self.rates)\n",
            """\
        for parameter, gradient in zip(self.weights, gradients, strict=True):
            parameter.grad = gradient
        return self.optimizer.step()
""",
        ),
    ),
)


def batched_critics(learner):
    return Trick(
        "batched_critics",
        f"{learner}.q_values",
        "the critics as one batched matmul per layer, not one after the other",
        (*COMPILED, "cudagraphs"),  # eager code does without it
        (("        if self.args.compile or self.args.cudagraphs:\n", "        if False:\n"),),
    )


def fast_acting(learner):
    return Trick(
        "compiled_acting",
        f"{learner}.fast",
        "acting and storing compiled too",
        ("compile",),
        (("        self.store_and_act = self.fast(self.store_and_act)\n", ""),),
    )


NEEDED_GUARDS = Trick(
    "no_module_guards",
    "needed_guards",
    "compiled code without guards on layers, not with them",
    COMPILED,
    (('            options["guard_filter_fn"] = needed_guards\n', ""),),
)
DIRECT_ENVS = Trick(
    "direct_envs",
    "DirectEnvs.step",
    "environments stepped by the script, not by `SyncVectorEnv`",
    ALL,
    (
        ("envs = DirectEnvs(make_envs(args, folder))", "envs = make_envs(args, folder)"),
        ("envs.restart(ended)", 'envs.reset(options={"reset_mask": ended})[0]'),
    ),
)


def numpy_acting(function, network):
    return Trick(
        "numpy_acting",
        "numpy_function",
        "acting in NumPy, not by calling the module",
        ALL,
        (
            (
                f"        self.{function} = numpy_function(self.{network})\n",
                f"        self.{function} = lambda x: self.{network}(torch.from_numpy(x)).detach().numpy()\n",
            ),
        ),
    )


def flat_optimizer(name, line):
    """torch.optim's `name` instead of the script's own; `line` is one of its constructor, after all arguments."""
    return Trick(
        f"flat_{name.lower()}",
        f"Clipped{name}.step",
        f"{name} on one vector of all gradients, not `torch.optim.{name}` on each parameter",
        EAGER,
        (
            (
                line,
                f"""\
        settings = {{"eps": self.eps, "capturable": device.type == "cuda"}}
        self.optimizer = torch.optim.{name}(self.weights, lr, (self.beta1, self.beta2), **settings)
        self.optimizer.param_groups[0]["lr"] = self.lr
{line}""",
            ),
            (
                "        self.m.lerp_(gradient, 1 - self.beta1)\n",
                """\
        for parameter, part in zip(self.weights, self.parts(gradient), strict=True):
            parameter.grad = part
        self.optimizer.step()
        return norm
""",
            ),
        ),
    )


def one_graph(learner, optimizer, network, docstring):
    """`docstring` is that of `update_minibatch`."""
    step = f'self.optimizers["{network}"].step'
    return Trick(
        "one_graph",
        f"{learner}.update_minibatch",
        f"{optimizer} in the compiled graph of forward and backward pass, not after it",
        COMPILED,
        (
            (
                f'    def update_minibatch(self):\n        """{docstring}"""\n',
                "    def compute_gradient(self):\n",
            ),
            (
                f"""\
        grad_norm = {step}(gradient)
        self.store(grad_norm=grad_norm)
""",
                f"""\
        return gradient

    def update_minibatch(self):
        grad_norm = {step}(self.compute_gradient())
        self.store(grad_norm=grad_norm)
""",
            ),
            (
                "        self.update_minibatch = self.compiled(self.update_minibatch)\n",
                "        self.compute_gradient = self.compiled(self.compute_gradient)\n",
            ),
        ),
    )


def cpp_wrapper(where):
    return Trick(
        "cpp_wrapper",
        where,
        "on a CPU, kernels called from C++, not from Python",
        ("compile",),
        (('options["cpp_wrapper"] = True', 'options["cpp_wrapper"] = False'),),
    )


# ---------------------------------------------------------------------------------------------------------------------
# SAC
# ---------------------------------------------------------------------------------------------------------------------

SAC = (batched_critics("SAC"), OWN_ADAM, fast_acting("SAC"), NEEDED_GUARDS)

# ---------------------------------------------------------------------------------------------------------------------
# TD3
# ---------------------------------------------------------------------------------------------------------------------

TD3 = (
    batched_critics("TD3"),
    Trick(
        "first_critic_alone",
        "TD3.update_actor",
        "the actor's loss computes one critic, not both",
        ALL,
        (
            (
                """\
        first = {name: weights[0].detach() for name, weights in self.critics.items()}
        actor_loss = -functional_call(self.critic, first, (obs, self.actor(obs))).mean()
""",
                """\
        critics = {name: weights.detach() for name, weights in self.critics.items()}
        actor_loss = -self.q_values(critics, obs, self.actor(obs))[0].mean()
""",
            ),
        ),
    ),
    OWN_ADAM,
    Trick(
        "compiled_sampling",
        "TD3.update_critics",
        "rows looked up and gathered inside the compiled update, not before it",
        COMPILED,
        (
            ("        self.batch.copy_(self.replay.sample(self.uniform))\n", ""),
            (
                "        self.update_critics()\n",
                """\
        self.batch.copy_(self.replay.sample(self.uniform))
        self.update_critics()
""",
            ),
        ),
    ),
    fast_acting("TD3"),
)

# ---------------------------------------------------------------------------------------------------------------------
# PPO
# ---------------------------------------------------------------------------------------------------------------------

PPO = (
    numpy_acting("mean_actions", "host_agent.actor"),
    DIRECT_ENVS,
    Trick(
        "values_at_once",
        "PPO.make_batch",
        "values and log-probabilities of a rollout at once, not step by step",
        ALL,
        (
            (
                """\
        log_prob = gaussian_log_prob(self.agent.actor(obs), self.agent.log_std, actions)
        values = self.agent.critic(obs)
        next_values = self.agent.critic(next_obs)
""",
                """\
        means = torch.stack([self.agent.actor(row) for row in obs])
        log_prob = gaussian_log_prob(means, self.agent.log_std, actions)
        values = torch.stack([self.agent.critic(row) for row in obs])
        next_values = torch.stack([self.agent.critic(row) for row in next_obs])
""",
            ),
        ),
    ),
    Trick(
        "gae_by_doubling",
        "gae",
        "advantages by doubling, not by a loop over steps",
        ALL,
        (
            (
                "    advantages = deltas\n    covered = 1\n",
                """\
    advantages = deltas.clone()
    for t in reversed(range(len(deltas) - 1)):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages
    covered = 1
""",
            ),
        ),
    ),
    flat_optimizer("Adam", "        self.corrections = self.rates.clone()"),
    one_graph("PPO", "Adam", "agent", "One step of Adam on the loss of `minibatch`."),
    cpp_wrapper("PPO.compiled"),
)

# ---------------------------------------------------------------------------------------------------------------------
# DQN
# ---------------------------------------------------------------------------------------------------------------------

DQN = (
    numpy_acting("forward", "network"),
    DIRECT_ENVS,
    Trick(
        "one_crossing",
        "BlockReplayBuffer.send",
        "transitions stored on the device once per update, not one by one",
        ALL,
        (
            (
                "        self.collected += len(obs)\n",
                """\
        self.collected += len(obs)
        self.send()
        self.store()
""",
            ),
        ),
    ),
    OWN_ADAM,
    Trick(
        "compiled_sampling",
        "DQN.store_and_learn",
        "storing and sampling inside the compiled update, not before it",
        COMPILED,
        (
            (
                """\
        self.replay.store()
        batch = self.replay.sample(self.uniform)
        obs, next_obs, actions, rewards, terminated = batch.split""",
                "        obs, next_obs, actions, rewards, terminated = self.batch.split",
            ),
            (
                "        self.store_and_learn = self.fast(self.store_and_learn)\n",
                """\
        self.store_and_learn = self.fast(self.store_and_learn)
        self.batch = torch.zeros(args.batch_size, sum(self.widths), device=device)
""",
            ),
            (
                "        self.store_and_learn()\n",
                """\
        self.replay.store()
        self.batch.copy_(self.replay.sample(self.uniform))
        self.store_and_learn()
""",
            ),
        ),
    ),
    NEEDED_GUARDS,
    cpp_wrapper("DQN.fast"),
)

# ---------------------------------------------------------------------------------------------------------------------
# PQN
# ---------------------------------------------------------------------------------------------------------------------

PQN = (
    numpy_acting("host_values", "host_q"),
    Trick(
        "numpy_layer_norm",
        "numpy_function",
        "LayerNorm in NumPy, not by calling the layer",
        ALL,
        (("    if type(module) is nn.LayerNorm and ", "    if False and "),),
    ),
    DIRECT_ENVS,
    Trick(
        "targets_by_doubling",
        "discounted",
        "targets by doubling, not by a loop over steps",
        ALL,
        (
            (
                "    sums = terms\n    covered = 1\n",
                """\
    sums = terms.clone()
    for t in reversed(range(len(terms) - 1)):
        sums[t] += decay[t] * sums[t + 1]
    return sums
    covered = 1
""",
            ),
        ),
    ),
    flat_optimizer("RAdam", "        self.sizes = self.step_sizes().to(device)"),
    one_graph("PQN", "RAdam", "q", "One step of RAdam on `minibatch`."),
    cpp_wrapper("PQN.compiled"),
)
TRICKS = {"sac_continuous_action": SAC, "td3_continuous_action": TD3, "ppo_continuous_action": PPO, "dqn": DQN}
TRICKS |= {"pqn": PQN}
