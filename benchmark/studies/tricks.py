"""The tricks of the turbo scripts, each as the edits of a script's text that take it away. ablation.py measures them.

What a script learns without a trick is the same up to rounding.
"""

from dataclasses import dataclass

from common import ROOT

EAGER = ("eager", "cudagraphs")  # modes in which nothing is compiled
COMPILED = ("compile", "compile+cudagraphs")
ALL = EAGER + COMPILED


@dataclass(frozen=True)
class Trick:
    name: str
    """for the folder of its runs"""
    where: str
    """the function that has it"""
    what: str
    """what the script does, and what it would do otherwise"""
    modes: tuple[str, ...]
    """modes in which it can be taken away: a compiler by itself drops much that is superfluous"""
    edits: tuple[tuple[str, str], ...]
    """texts of the script, each there once, and what they become; some leave lines behind a return"""


def without(algo, trick):
    """The text of the turbo script without a trick; ValueError unless each text to replace is there once."""
    source = (ROOT / "leanrl" / f"{algo}_torchcompile.py").read_text()
    for old, new in trick.edits:
        if source.count(old) != 1:
            raise ValueError(f"{algo}, {trick.name}: {source.count(old)} places, not one, with this text: {old}")
        source = source.replace(old, new)
    return source


# ---------------------------------------------------------------------------------------------------------------------
# Tricks of several scripts
# ---------------------------------------------------------------------------------------------------------------------


def flat_adam(*calls):
    """`calls` of Adam in the script, each with the FlatNetwork whose parameters it is for."""
    init = """\
        self.decay = torch.ones_like(self._betas)
        parameters = list(flat.views(weights).values()) if flat else [weights]
        optimizer = torch.optim.Adam(parameters, self.lr, (BETA1, BETA2), EPS, capturable=weights.is_cuda)
        vars(self).update(flat=flat, parameters=parameters, optimizer=optimizer)
"""
    step = """\
        parts = self.flat.views(gradient).values() if self.flat else [gradient]
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part
        return self.optimizer.step()
        self.decay.mul_(self._betas)"""
    return Trick(
        "flat_adam",
        "Adam.step",
        "Adam on one flat vector, not `torch.optim.Adam` on each parameter",
        EAGER,
        (
            ("    def __init__(self, weights, lr):\n", "    def __init__(self, weights, lr, flat=None):\n"),
            ("        self.decay = torch.ones_like(self._betas)  # beta1**t and beta2**t after t steps\n", init),
            ("        self.decay.mul_(self._betas)", step),
            ('if name not in ("lr", "_betas")', 'if name not in ("lr", "_betas") and torch.is_tensor(tensor)'),
            *((call, f"{call[:-1]}, {network})") for call, network in calls),
        ),
    )


def compiled_acting(where):
    return Trick(
        "compiled_acting",
        where,
        "acting and storing compiled too",
        COMPILED,
        (("            self.store_and_act = compiled(self.store_and_act, mode, options)\n", ""),),
    )


def cpp_wrapper(where):
    return Trick(
        "cpp_wrapper",
        where,
        "on a CPU, kernels called from C++, not from Python",
        ("compile",),
        (('else {"cpp_wrapper": True}', "else {}"),),
    )


NO_MODULE_GUARDS = Trick(
    "no_module_guards",
    "compiled",
    "compiled code without guards on modules, not with them",
    COMPILED,
    ((' | {"guard_filter_fn": needed_guards}', ""),),
)
BATCHED_CRITICS = Trick(
    "batched_critics",
    "FlatNetwork.__call__",
    "the critics as one batched matmul per layer, not one after the other",
    (*COMPILED, "cudagraphs"),  # eager code does without
    (("batched = args.compile or self.cudagraphs", "batched = False"),),
)
TRANSPOSED_STORAGE = Trick(
    "transposed_storage",
    "FlatNetwork.views",
    "matrices stored transposed, so that gradients need no copy",
    ALL,
    (("parameter.view(*lead, *reversed(shape)).mT", "parameter.view(*lead, *shape)"),),
)
NUMPY_ACTING = Trick(
    "numpy_acting",
    "on_host",
    "acting in NumPy on the layers that acting needs, not by calling the module",
    ALL,
    (
        (
            "    trial = copy.deepcopy(network)\n",
            "    return partial(by_torch, network)\n    trial = copy.deepcopy(network)\n",
        ),
    ),
)
DIRECT_ENVS = Trick(
    "direct_envs",
    "DirectEnvs.step",
    "environments stepped by the script, not by `SyncVectorEnv`",
    ALL,
    (
        (
            "        space = self.env.observation_space\n",
            """\
        next_obs, rewards, terminated, truncated, infos = self.env.step(actions)
        last_obs = next_obs
        if "final_obs" in infos:
            ended = infos["_final_obs"]
            last_obs = next_obs.copy()
            last_obs[ended] = np.stack(infos["final_obs"][ended])
        return next_obs, last_obs, rewards, terminated, truncated
""",
        ),
    ),
)

# ---------------------------------------------------------------------------------------------------------------------
# SAC
# ---------------------------------------------------------------------------------------------------------------------

SAC = (
    BATCHED_CRITICS,
    Trick(
        "no_critic_gradient",
        "SAC.update_actor",
        "no gradient for the critics' weights in the actor's loss",
        EAGER,
        (
            (
                """\
            q = self.critics(obs, actions).amin(0)
            actor_loss = (alpha * log_prob - q).mean()
            (gradient,) = torch.autograd.grad(actor_loss, weights)
""",
                """\
            critic_weights = self.critics.weights.detach().requires_grad_()
            q = self.critics(obs, actions, weights=critic_weights).amin(0)
            actor_loss = (alpha * log_prob - q).mean()
            gradient, _ = torch.autograd.grad(actor_loss, (weights, critic_weights))
""",
            ),
        ),
    ),
    flat_adam(
        ("Adam(self.actor.weights, args.policy_lr)", "self.actor"),
        ("Adam(self.critics.weights, args.q_lr)", "self.critics"),
    ),
    TRANSPOSED_STORAGE,
    compiled_acting("SAC.store_and_act"),
    NO_MODULE_GUARDS,
)

# ---------------------------------------------------------------------------------------------------------------------
# TD3
# ---------------------------------------------------------------------------------------------------------------------

TD3 = (
    BATCHED_CRITICS,
    Trick(
        "first_critic_alone",
        "TD3.update_actor",
        "the actor's loss computes one critic, not both",
        ALL,
        (
            (
                "self.critics.members[0](obs, actions)",
                "self.critics(obs, actions)[0]",
            ),
        ),
    ),
    Trick(
        "no_critic_gradient",
        "TD3.update_actor",
        "no gradient for the critics' weights in the actor's loss",
        EAGER,
        (
            (
                """\
        actor_loss = -self.critics.members[0](obs, actions).mean()
        (gradient,) = torch.autograd.grad(actor_loss, weights)
""",
                """\
        critic_weights = self.critics.weights.detach().requires_grad_()
        first = {name: view[0] for name, view in self.critics.views(critic_weights).items()}
        actor_loss = -self.critics.call(first, obs, actions).mean()
        gradient, _ = torch.autograd.grad(actor_loss, (weights, critic_weights))
""",
            ),
        ),
    ),
    flat_adam(
        ("Adam(self.actor.weights, args.learning_rate)", "self.actor"),
        ("Adam(self.critics.weights, args.learning_rate)", "self.critics"),
    ),
    Trick(
        "compiled_sampling",
        "TD3.update_critics",
        "rows looked up and gathered inside the compiled update, not before it",
        COMPILED,
        (
            ("def update_critics(self, uniform, noise):", "def update_critics(self, batch, noise):"),
            ("        batch = self.replay.sample(uniform)\n", ""),
            ("self.update_critics(self.uniform, ", "self.update_critics(self.replay.sample(self.uniform), "),
        ),
    ),
    compiled_acting("TD3.store_and_act"),
)

# ---------------------------------------------------------------------------------------------------------------------
# PPO
# ---------------------------------------------------------------------------------------------------------------------

PPO = (
    NUMPY_ACTING,
    DIRECT_ENVS,
    Trick(
        "values_at_once",
        "PPO.make_batch",
        "values and log-probabilities of a rollout at once, not step by step",
        ALL,
        (
            (
                '        mean, log_std, values = self.agent(steps["obs"])\n',
                """\
        outputs = [self.agent(obs) for obs in steps["obs"].split(self.num_envs)]
        mean, values = (torch.cat([output[i] for output in outputs]) for i in (0, 2))
        log_std = outputs[0][1]
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
                "    covered = 1\n",
                """\
    for t in reversed(range(len(rewards) - 1)):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages
""",
            ),
        ),
    ),
    flat_adam(("Adam(self.agent.weights, args.learning_rate)", "self.agent")),
    Trick(
        "one_graph",
        "PPO.update_minibatch",
        "Adam in the compiled graph of forward and backward pass, not after it",
        COMPILED,
        (
            ('self.optimizers["agent"].step(self.agent.weights, gradient * scale)', "return gradient * scale"),
            (
                "            self.update_minibatch(rows)\n",
                '            self.optimizers["agent"].step(self.agent.weights, self.update_minibatch(rows))\n',
            ),
        ),
    ),
    cpp_wrapper("PPO.apply_compile_and_cudagraphs"),
)

# ---------------------------------------------------------------------------------------------------------------------
# DQN
# ---------------------------------------------------------------------------------------------------------------------

DQN = (
    NUMPY_ACTING,
    DIRECT_ENVS,
    Trick(
        "one_crossing",
        "DQN.send_block",
        "transitions stored on the device once per update, not one by one",
        ALL,
        (
            (
                "        self.collected += self.num_envs\n",
                """\
        self.collected += self.num_envs
        self.send_block()
        self.store_block()
""",
            ),
        ),
    ),
    flat_adam(("Adam(self.q.weights, args.learning_rate)", "self.q")),
    Trick(
        "compiled_sampling",
        "DQN.store_and_update",
        "storing and sampling inside the compiled update, not before it",
        COMPILED,
        (
            ("def store_and_update(self, uniform):", "def store_and_update(self, batch):"),
            ("        self.store_block()\n        batch = self.replay.sample(uniform)\n", ""),
            (
                "        self.scalars.store(**self.store_and_update(self.uniform))\n",
                """\
        self.store_block()
        self.scalars.store(**self.store_and_update(self.replay.sample(self.uniform)))
""",
            ),
        ),
    ),
    NO_MODULE_GUARDS,
    cpp_wrapper("DQN.apply_compile_and_cudagraphs"),
)
TRICKS = {"sac_continuous_action": SAC, "td3_continuous_action": TD3, "ppo_continuous_action": PPO, "dqn": DQN}
