"""The tricks of the turbo scripts, each with the edits of a script's text that remove it. ablation.py measures them.

Without a trick, a script learns the same up to rounding.
"""

from dataclasses import dataclass

from common.scripts import path_of

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
    edits: str
    """a diff, see `replacements`; some leave code after a return"""


def replacements(edits):
    """The texts to replace in a script and their replacements, of a diff: lines with - go, those with + come.

    Others stay. An empty line separates two texts. Both ends of a text may be within lines of the script.
    """
    for part in edits.strip("\n").split("\n\n"):
        lines = part.split("\n")
        old = "\n".join(line[1:] for line in lines if line[0] != "+")
        yield old, "\n".join(line[1:] for line in lines if line[0] != "-")


def without(algo, trick):
    """The text of the turbo script without a trick; ValueError unless each text to replace occurs exactly once."""
    source = path_of(f"{algo}_torchcompile").read_text(encoding="utf-8")
    for old, new in replacements(trick.edits):
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
    """
+        settings = {"eps": self.eps, "capturable": device.type == "cuda"}
+        self.optimizer = torch.optim.Adam(self.weights, lr, (self.beta1, self.beta2), **settings)
         self.corrections = torch.zeros_like(self.rates)

-        self.corrections.add_(self.rates * (1 - self.corrections))
+        for parameter, gradient in zip(self.weights, gradients, strict=True):
+            parameter.grad = gradient
+        return self.optimizer.step()
""",
)


def batched_critics(learner):
    return Trick(
        "batched_critics",
        f"{learner}.q_values",
        "the critics as one batched matmul per layer, not one after the other",
        ALL,
        """
-        return vmap(q, randomness="different")(critics)  # dropout draws a mask per critic
+        members = zip(*critics.values(), strict=True)
+        return torch.stack([q(dict(zip(critics, member, strict=True))) for member in members])
""",
    )


def compiled_acting(where, line):
    return Trick("compiled_acting", where, "acting and storing compiled too", ("compile",), f"-        {line}")


SAC_ACTING = compiled_acting("SAC.compiled", "self.store_and_act = self.captured(self.compiled(self.store_and_act))")
TD3_ACTING = compiled_acting("TD3.fast", "self.store_and_act = self.fast(self.store_and_act)")

DIRECT_ENVS = Trick(
    "direct_envs",
    "DirectEnvs.step",
    "environments stepped by the script, not by `SyncVectorEnv`",
    ALL,
    """
-envs = DirectEnvs(make_envs(args, folder))
+envs = make_envs(args, folder)

-envs.restart(ended)
+envs.reset(options={"reset_mask": ended})[0]
""",
)


def numpy_acting(function, network):
    return Trick(
        "numpy_acting",
        "numpy_function",
        "acting in NumPy, not by calling the module",
        ALL,
        f"""
-        self.{function} = numpy_function(self.{network})
+        self.{function} = lambda x: self.{network}(torch.from_numpy(x)).detach().numpy()
""",
    )


def flat_optimizer(name, line):
    """torch.optim's `name` instead of the script's own; `line` is one of its constructor, after all arguments."""
    return Trick(
        f"flat_{name.lower()}",
        f"Clipped{name}.step",
        f"{name} on one vector of all gradients, not `torch.optim.{name}` on each parameter",
        EAGER,
        f"""
+        settings = {{"eps": self.eps, "capturable": device.type == "cuda"}}
+        self.optimizer = torch.optim.{name}(self.weights, lr, (self.beta1, self.beta2), **settings)
+        self.optimizer.param_groups[0]["lr"] = self.lr
 {line}

-        self.m.lerp_(gradient, 1 - self.beta1)
+        for parameter, part in zip(self.weights, self.parts(gradient), strict=True):
+            parameter.grad = part
+        self.optimizer.step()
+        return norm
""",
    )


def one_graph(learner, optimizer, network, docstring):
    """`docstring` is that of `update_minibatch`."""
    step = f'self.optimizers["{network}"].step'
    return Trick(
        "one_graph",
        f"{learner}.update_minibatch",
        f"{optimizer} in the compiled graph of forward and backward pass, not after it",
        COMPILED,
        f"""
-    def update_minibatch(self):
-        \"\"\"{docstring}\"\"\"
+    def compute_gradient(self):

-        grad_norm = {step}(gradient)
+        return gradient
+
+    def update_minibatch(self):
+        grad_norm = {step}(self.compute_gradient())
         self.keep(grad_norm=grad_norm)

-        self.update_minibatch = self.compiled(self.update_minibatch)
+        self.compute_gradient = self.compiled(self.compute_gradient)
""",
    )


def cpp_wrapper(where):
    return Trick(
        "cpp_wrapper",
        where,
        "on a CPU, kernels called from C++, not from Python",
        ("compile",),
        """
-options["cpp_wrapper"] = True
+options["cpp_wrapper"] = False
""",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tricks of one script
# ---------------------------------------------------------------------------------------------------------------------

TD3_FIRST_CRITIC = Trick(
    "first_critic_alone",
    "TD3.update_actor",
    "the actor's loss computes one critic, not both",
    ALL,
    """
-        first = {name: tensor[0].detach() for name, tensor in self.critics.items()}
-        actor_loss = -functional_call(self.critic_module, first, (obs, self.actor(obs))).mean()
+        critics = {name: weights.detach() for name, weights in self.critics.items()}
+        actor_loss = -self.q_values(critics, obs, self.actor(obs))[0].mean()
""",
)
TD3_SAMPLING = Trick(
    "compiled_sampling",
    "TD3.update_critics",
    "rows looked up and gathered inside the compiled update, not before it",
    COMPILED,
    """
-        self.batch.copy_(self.replay.sample(self.uniform))

+        self.batch.copy_(self.replay.sample(self.uniform))
         self.update_critics()
""",
)
PPO_VALUES = Trick(
    "values_at_once",
    "PPO.make_batch",
    "values and log-probabilities of a rollout at once, not step by step",
    ALL,
    """
-        batch["log_prob"] = self.log_prob(batch)
-        batch["values"] = values = self.agent.critic(batch["obs"])
-        next_values = self.agent.critic(batch["next_obs"])
+        steps = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
+        batch["log_prob"] = torch.stack([self.log_prob(step) for step in steps])
+        batch["values"] = values = torch.stack([self.agent.critic(row) for row in batch["obs"]])
+        next_values = torch.stack([self.agent.critic(row) for row in batch["next_obs"]])
""",
)
PPO_GAE = Trick(
    "gae_by_doubling",
    "gae",
    "advantages by doubling, not by a loop over steps",
    ALL,
    """
-    advantages = deltas
+    advantages = deltas.clone()
+    for t in reversed(range(len(deltas) - 1)):
+        advantages[t] += decay[t] * advantages[t + 1]
+    return advantages
     covered = 1
""",
)
DQN_CROSSING = Trick(
    "one_crossing",
    "BlockReplayBuffer.upload",
    "transitions stored on the device once per update, not one by one",
    ALL,
    """
         self.collected += len(obs)
+        self.upload()
+        self.store()
""",
)
DQN_SAMPLING = Trick(
    "compiled_sampling",
    "DQN.store_and_learn",
    "storing and sampling inside the compiled update, not before it",
    COMPILED,
    """
-        self.replay.store()
-        batch = self.replay.sample(self.uniform)
-        obs, next_obs, actions, rewards, terminated = batch.split
+        obs, next_obs, actions, rewards, terminated = self.batch.split

         self.store_and_learn = self.fast(self.store_and_learn)
+        self.batch = torch.zeros(args.batch_size, sum(self.widths), device=device)

+        self.replay.store()
+        self.batch.copy_(self.replay.sample(self.uniform))
         self.store_and_learn()
""",
)
PQN_LAYER_NORM = Trick(
    "numpy_layer_norm",
    "numpy_function",
    "LayerNorm in NumPy, not by calling the layer",
    ALL,
    """
-    if type(module) is nn.LayerNorm and
+    if False and
""",
)
PQN_TARGETS = Trick(
    "targets_by_doubling",
    "discounted",
    "targets by doubling, not by a loop over steps",
    ALL,
    """
-    sums = terms
+    sums = terms.clone()
+    for t in reversed(range(len(terms) - 1)):
+        sums[t] += decay[t] * sums[t + 1]
+    return sums
     covered = 1
""",
)
TRICKS = {
    "sac_continuous_action": (batched_critics("SAC"), OWN_ADAM, SAC_ACTING, cpp_wrapper("SAC.compiled")),
    "td3_continuous_action": (
        batched_critics("TD3"),
        TD3_FIRST_CRITIC,
        OWN_ADAM,
        TD3_SAMPLING,
        TD3_ACTING,
        cpp_wrapper("TD3.fast"),
    ),
    "ppo_continuous_action": (
        numpy_acting("mean_actions", "host_agent.actor"),
        DIRECT_ENVS,
        PPO_VALUES,
        PPO_GAE,
        flat_optimizer("Adam", "        self.corrections = self.rates.clone()"),
        one_graph("PPO", "Adam", "agent", "One step of Adam on the loss of `minibatch`."),
        cpp_wrapper("PPO.compiled"),
    ),
    "dqn": (
        numpy_acting("forward", "network"),
        DIRECT_ENVS,
        DQN_CROSSING,
        OWN_ADAM,
        DQN_SAMPLING,
        cpp_wrapper("DQN.fast"),
    ),
    "pqn": (
        numpy_acting("host_values", "host_q"),
        PQN_LAYER_NORM,
        DIRECT_ENVS,
        PQN_TARGETS,
        flat_optimizer("RAdam", "        self.sizes = self.step_sizes().to(device)"),
        one_graph("PQN", "RAdam", "q", "One step of RAdam on `minibatch`."),
        cpp_wrapper("PQN.compiled"),
    ),
}
