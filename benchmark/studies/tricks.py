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
OWN_ADAM = Trick(
    "own_adam",
    "Adam.step",
    "Adam in a few operations on all parameters at once, not `torch.optim.Adam`",
    EAGER,
    (
        (
            "        self.ones = torch.zeros_like(self.betas)",
            """\
        settings = {"eps": self.eps, "capturable": device.type == "cuda"}
        self.optimizer = torch.optim.Adam(self.weights, lr, (self.beta1, self.beta2), **settings)
        self.ones = torch.zeros_like(self.betas)""",
        ),
        (
            "        self.ones.lerp_(torch.ones_like(self.ones), 1 - self.betas)\n",
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
        (*COMPILED, "cudagraphs"),  # eager code does without
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
    Trick(
        "numpy_acting",
        "in_numpy",
        "acting in NumPy, not by calling the module",
        ALL,
        (
            (
                "        self.forward = in_numpy(self.network)\n",
                "        self.forward = lambda x: self.network(torch.from_numpy(x)).numpy()\n",
            ),
        ),
    ),
    Trick(
        "direct_envs",
        "DirectEnvs.step",
        "environments stepped by the script, not by `SyncVectorEnv`",
        ALL,
        (("envs = DirectEnvs(make_envs(args, folder))", "envs = make_envs(args, folder)"),),
    ),
    Trick(
        "one_crossing",
        "DQN.send_block",
        "transitions stored on the device once per update, not one by one",
        ALL,
        (("        self.collected += len(obs)\n", "        self.collected += len(obs)\n        self.store_block()\n"),),
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
        self.replay.write(self.block, self.received)
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
        self.replay.write(self.block, self.received)
        self.batch.copy_(self.replay.sample(self.uniform))
        self.store_and_learn()
""",
            ),
        ),
    ),
    NEEDED_GUARDS,
    Trick(
        "cpp_wrapper",
        "DQN.fast",
        "on a CPU, kernels called from C++, not from Python",
        ("compile",),
        (('options["cpp_wrapper"] = True', 'options["cpp_wrapper"] = False'),),
    ),
)
TRICKS = {"sac_continuous_action": SAC, "td3_continuous_action": TD3, "ppo_continuous_action": PPO, "dqn": DQN}
