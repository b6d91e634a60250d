"""The tricks of the turbo scripts, each as the edits of a script's text that take it away. ablation.py measures them.

What a script learns without a trick is the same up to rounding.
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EAGER = ("eager", "cudagraphs")  # modes of run.py in which nothing is compiled
COMPILED = ("compile", "compile+cudagraphs")


@dataclass(frozen=True)
class Trick:
    name: str
    """for the folder of its runs"""
    what: str
    """what the script does, in place of what"""
    where: str
    """its function"""
    modes: tuple[str, ...]
    """modes of run.py in which it can be taken away: a compiler by itself drops much that is superfluous"""
    edits: tuple[tuple[str, str], ...]
    """texts of the script, each there once, and what they become; some leave lines behind a return"""


def batched_critics():
    old = "return vmap(self.call, randomness="
    new = "return torch.stack([self.member(weights, i, *(x[i] for x in inputs)) for i in range(len(self.networks))])"
    what = "the critics as one batched matmul per layer, not one after the other"
    return Trick("batched_critics", what, "Apply.__call__", EAGER + COMPILED, ((old, f"{new}\n        {old}"),))


def flat_adam(*created):
    """`created` are calls of Adam, and the `Apply` whose parameters each is for."""
    init = """
    def __init__(self, weights, lr, network=None):
        self.parts = lambda flat: list(network.unflatten(flat).values()) if network else [flat]
        self.parameters = self.parts(weights)
        self.optimizer = torch.optim.Adam(self.parameters, lr, (BETA1, BETA2), EPS)
"""
    old = "        self.decay.mul_(self.betas)"
    step = f"""\
        for parameter, part in zip(self.parameters, self.parts(gradient), strict=True):
            parameter.grad = part
        return self.optimizer.step()
{old}"""
    edits = [("\n    def __init__(self, weights, lr):\n", init), (old, step)]
    edits += [(call, f"{call[:-1]}, {network})") for call, network in created]
    what = "Adam on one flat vector, not `torch.optim.Adam` on each parameter"
    return Trick("flat_adam", what, "Adam.step", EAGER, tuple(edits))


def transposed_storage():
    old = "piece.view((*lead, *reversed(shape))).mT if len(shape) == 2 else piece.view((*lead, *shape))"
    what = "matrices stored transposed, so that gradients need no copy"
    edits = ((old, "piece.view((*lead, *shape))"),)
    return Trick("transposed_storage", what, "Apply.unflatten", EAGER + COMPILED, edits)


def index_select():
    old = "self.rows.index_select(0, (uniform * self.stored.clamp(max=self.size)).long())"
    new = "self.rows[(uniform * self.stored.clamp(max=self.size)).long()]"
    what = "rows of the replay buffer by `index_select`, not by indexing"
    return Trick("index_select", what, "DeviceReplayBuffer.sample", EAGER, ((old, new),))


def compiled_acting(where):
    old = '("store_and_act", "update_critics", "update_actor")'
    edits = ((old, '("update_critics", "update_actor")'),)
    return Trick("compiled_acting", "acting and storing compiled too", f"{where}.store_and_act", COMPILED, edits)


def cheap_guards():
    edits = (('options = {"guard_filter_fn": cheap_guards}', "options = {}"),)
    return Trick(
        "cheap_guards",
        "guards of compiled code on what the learner holds, not on all else too",
        "cheap_guards",
        COMPILED,
        edits,
    )


def cpp_wrapper(where):
    edits = (('options["cpp_wrapper"] = not self.on_cuda', 'options["cpp_wrapper"] = False'),)
    what = "on a CPU, kernels called from C++, not from Python"
    return Trick("cpp_wrapper", what, f"{where}.apply_compile_and_cudagraphs", ("compile",), edits)


def numpy_acting():
    what = "acting in NumPy on the layers that acting needs, not by calling the module"
    edits = (("    agreed = True\n", "    agreed = False\n"),)
    return Trick("numpy_acting", what, "on_host", EAGER + COMPILED, edits)


def direct_envs():
    old = "        space = self.env.observation_space\n"
    new = """        next_obs, rewards, terminated, truncated, infos = self.env.step(actions)
        last_obs = next_obs
        if "final_obs" in infos:
            ended = infos["_final_obs"]
            last_obs = next_obs.copy()
            last_obs[ended] = np.stack(infos["final_obs"][ended])
        return next_obs, last_obs, rewards, terminated, truncated
"""
    what = "environments stepped by the script, not by `SyncVectorEnv`"
    return Trick("direct_envs", what, "DirectEnvs.step", EAGER + COMPILED, ((old, new),))


SAC_NO_CRITIC_GRADIENT = (
    """loss = (alpha * log_prob - self.critics(self.critic_weights, obs, actions).amin(0)).mean()
            (gradient,) = torch.autograd.grad(loss, weights)""",
    """critic_weights = self.critic_weights.detach().requires_grad_()
            loss = (alpha * log_prob - self.critics(critic_weights, obs, actions).amin(0)).mean()
            gradient, _ = torch.autograd.grad(loss, (weights, critic_weights))""",
)
TD3_NO_CRITIC_GRADIENT = (
    """loss = -self.critics.member(self.critic_weights, 0, obs, actions).mean()
        (gradient,) = torch.autograd.grad(loss, weights)""",
    """critic_weights = self.critic_weights.detach().requires_grad_()
        loss = -self.critics.member(critic_weights, 0, obs, actions).mean()
        gradient, _ = torch.autograd.grad(loss, (weights, critic_weights))""",
)
NO_CRITIC_GRADIENT = "no gradient for the critics' weights in the actor's loss"
SAC_SHARED_PASS = (
    ("mean, log_std = self.actor(weights, obs)\n        for noise", "for noise"),
    (
        "actions, log_prob = self.squash(mean, log_std, noise)",
        "mean, log_std = self.actor(weights, obs)\n            actions, log_prob = self.squash(mean, log_std, noise)",
    ),
)
TD3_BOTH_CRITICS = (
    "self.critics.member(self.critic_weights, 0, obs, actions)",
    "self.critics(self.critic_weights, obs, actions)[0]",
)
TD3_SAMPLING = (
    ("def update_critics(self, uniform, noise):", "def update_critics(self, batch, noise):"),
    ("        batch = self.replay.sample(uniform)\n", ""),
    ("self.update_critics(self.uniform()", "self.update_critics(self.replay.sample(self.uniform())"),
)
PPO_GAE = (
    "    covered = 1\n",
    """    for t in reversed(range(len(rewards) - 1)):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages
""",
)
PPO_VALUES_AT_ONCE = (
    'mean, log_std, values = self.agent(self.weights, steps["obs"])',
    """outputs = [self.agent(self.weights, obs) for obs in steps["obs"].split(self.num_envs)]
        mean, values = (torch.cat([output[i] for output in outputs]) for i in (0, 2))
        log_std = outputs[0][1]""",
)
PPO_ONE_GRAPH = (
    ('self.optimizers["agent"].step(self.weights, gradient * scale)', "return gradient * scale"),
    (
        "            self.update_minibatch(rows)",
        '            self.optimizers["agent"].step(self.weights, self.update_minibatch(rows))',
    ),
)
DQN_ONE_CROSSING = (
    "        self.filled += self.num_envs\n",
    "        self.filled += self.num_envs\n        self.ship()\n        self.store_inbox()\n",
)
DQN_STORING = (
    ("def store_and_update(self, uniform):", "def store_and_update(self, batch):"),
    ("        self.store_inbox()\n        batch = self.replay.sample(uniform)\n", ""),
    (
        "        self.scalars.keep(**self.store_and_update(self.uniform()))",
        """        self.store_inbox()
        self.scalars.keep(**self.store_and_update(self.replay.sample(self.uniform())))""",
    ),
)
TRICKS = {
    "sac_continuous_action": (
        batched_critics(),
        Trick("no_critic_gradient", NO_CRITIC_GRADIENT, "SAC.update_actor", EAGER, (SAC_NO_CRITIC_GRADIENT,)),
        Trick(
            "shared_actor_pass",
            "one pass of the actor for the temperature and for the next actor step, not two",
            "SAC.update_actor",
            EAGER,
            SAC_SHARED_PASS,
        ),
        flat_adam(
            ("Adam(self.actor_weights, args.policy_lr)", "self.actor"),
            ("Adam(self.critic_weights, args.q_lr)", "self.critics"),
        ),
        transposed_storage(),
        compiled_acting("SAC"),
        cheap_guards(),
    ),
    "td3_continuous_action": (
        batched_critics(),
        Trick(
            "first_critic_alone",
            "the actor's loss computes one critic, not both",
            "TD3.update_actor",
            EAGER + COMPILED,
            (TD3_BOTH_CRITICS,),
        ),
        Trick("no_critic_gradient", NO_CRITIC_GRADIENT, "TD3.update_actor", EAGER, (TD3_NO_CRITIC_GRADIENT,)),
        flat_adam(
            ("Adam(self.actor_weights, args.learning_rate)", "self.actor"),
            ("Adam(self.critic_weights, args.learning_rate)", "self.critics"),
        ),
        index_select(),
        Trick(
            "compiled_sampling",
            "rows looked up and gathered inside the compiled update",
            "TD3.update_critics",
            COMPILED,
            TD3_SAMPLING,
        ),
        compiled_acting("TD3"),
    ),
    "ppo_continuous_action": (
        numpy_acting(),
        direct_envs(),
        Trick(
            "values_at_once",
            "values and log-probabilities of a rollout at once, not step by step",
            "PPO.make_batch",
            EAGER + COMPILED,
            (PPO_VALUES_AT_ONCE,),
        ),
        Trick(
            "gae_by_doubling", "advantages by doubling, not by a loop over steps", "gae", EAGER + COMPILED, (PPO_GAE,)
        ),
        flat_adam(("Adam(self.weights, self.learning_rate)", "self.agent")),
        Trick(
            "one_graph",
            "Adam in the compiled graph of forward and backward pass, not eager after it",
            "PPO.update_minibatch",
            COMPILED,
            PPO_ONE_GRAPH,
        ),
        cpp_wrapper("PPO"),
    ),
    "dqn": (
        numpy_acting(),
        direct_envs(),
        Trick(
            "one_crossing",
            "transitions stored on the device once per update, not one by one",
            "DQN.ship",
            EAGER + COMPILED,
            (DQN_ONE_CROSSING,),
        ),
        flat_adam(("Adam(self.q_weights, args.learning_rate)", "self.q")),
        Trick(
            "compiled_sampling",
            "storing and sampling inside the compiled update",
            "DQN.store_and_update",
            COMPILED,
            DQN_STORING,
        ),
        cheap_guards(),
        cpp_wrapper("DQN"),
    ),
}


def without(algo, trick):
    """The text of the turbo script without a trick; ValueError unless each text to replace is there once."""
    source = (ROOT / "leanrl" / f"{algo}_torchcompile.py").read_text()
    for old, new in trick.edits:
        if source.count(old) != 1:
            raise ValueError(f"{algo}, {trick.name}: {source.count(old)} places, not one, with this text: {old}")
        source = source.replace(old, new)
    return source
