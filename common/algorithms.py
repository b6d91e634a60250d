"""The algorithms: one entry for each pair of scripts. Tests and benchmark iterate over them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Speed:
    """Sizes of the speed measurement, on 2 cores. Steps are summed over all environments."""

    steps: int  # warm-up and about two minutes of steady training by the plain script
    quick_steps: int  # the same with 40 seconds of training
    plain: int  # steps per second of the plain script, to estimate the time of a matrix
    compiled: int  # the same for the turbo script with --compile
    flags: str = ""  # to reach steady state early


@dataclass(frozen=True)
class Scaling:
    """Settings that benchmark.studies.scaling varies."""

    flags: dict = field(default_factory=dict)
    iteration: int = 0  # transitions per iteration (on-policy)
    period: int = 1  # updates in a period, which contains everything that is not done in each update
    num_envs: tuple[int, ...] = (1, 16, 256)
    batches: tuple[int, ...] = (64, 256, 1024)

    def with_envs(self, num_envs):
        return {"num_envs": num_envs} | ({"num_steps": self.iteration // num_envs} if self.iteration else {})

    def with_batch(self, batch):
        return {"num_minibatches": self.iteration // batch} if self.iteration else {"batch_size": batch}


@dataclass(frozen=True)
class GpuReport:
    """What `./run.sh --gpu-report` runs."""

    place: int  # in the order of measurement; the first four are those without --everything
    flags: str  # steady state soon, and more steps than the report has time for
    small: str  # the same on the emulated device
    agreement: str  # the test that the modes agree


@dataclass(frozen=True)
class Algorithm:
    """leanrl/<script>.py and leanrl/<script>_torchcompile.py. Dictionaries are arguments of their Args."""

    script: str
    title: str  # in tables
    page: str
    env_id: str  # of measurements
    tiny: dict  # a run of a second
    small: dict  # a learner of tests
    emulated: dict  # a run on the emulated CUDA device
    others: dict  # settings that take other ways through the code there
    generated: dict  # a run of the generated CUDA code, on top of `emulated`
    functions: set  # names of the compiled functions
    counted: tuple[dict, int]  # flags, and steps to count: whole periods of all that is not done in each step
    generated_others: dict = field(default_factory=dict)  # the same on top of `others`
    variants: tuple[str, ...] = ()  # further scripts: many agents, multiple GPUs
    atari: bool = False
    on_device: bool = False  # environments whose steps are tensors on the device
    env_ids: tuple[str, ...] = ()  # of learning runs
    budget: int = 0  # steps of a learning run, as published
    published: dict[str, str] = field(default_factory=dict)  # by CleanRL (below), by environment without its version
    curves: dict[str, str] = field(default_factory=dict)  # learning curves on the page: captions of doc/artifacts/*.csv
    peers: tuple[str, ...] = ()  # of rounds.PEERS, those that have it
    peer_flags: dict[str, str] = field(default_factory=dict)  # its flags, and the names that sb3 and sbx have for them
    speed: Speed | None = None
    scaling: Scaling | None = None
    gpu_report: GpuReport | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # reasons for None

    @property
    def short(self):
        """The name in tests."""
        if self.script == "ppo":
            return "ppo_discrete"  # ppo is that for continuous actions
        for ending in ("_continuous_action", "_envpool", "_envs"):
            if self.script.endswith(ending):
                return self.script.removesuffix(ending)
        return self.script

    @property
    def name(self):
        """The title without the kind of environments."""
        return self.title.split(",")[0]

    @property
    def turbo(self):
        return f"{self.script}_torchcompile"

    @property
    def off_policy(self):
        return "buffer_size" in self.tiny

    def cleanrl(self, env_id):
        """The mean ± spread that CleanRL has published, or "" if there is none.

        Quoted verbatim from docs.cleanrl.dev/rl-algorithms: means over three seeds at the end of the same number of
        steps, with environments v4 (MuJoCo), v5 (Atari), v1 and v0, measured in 2022 and 2023 (PQN: 2025).
        """
        return self.published.get(env_id.split("-")[0], "")


MILLION = 1_000_000
CHEETAH, CARTPOLE, BREAKOUT, BEAM_RIDER = "HalfCheetah-v5", "CartPole-v1", "Breakout-v5", "BeamRider-v5"
WALKERS = (CHEETAH, "Hopper-v5", "Walker2d-v5")
SIX = (*WALKERS, "InvertedPendulum-v5", "Humanoid-v5", "Pusher-v5")
CLASSIC = (CARTPOLE, "Acrobot-v1", "MountainCar-v0")
MASKED = ("Taxi-v4", "benchmark.masked_tasks:TaxiWithoutMasks-v0", "benchmark.masked_tasks:HighOrLow-v0")
GAMES = (BREAKOUT, "Pong-v5", BEAM_RIDER)
WORLDS = "tests.torch_pendulum"  # environments whose steps are tensors on the device
ALL_PEERS = ("sb3", "sbx", "cleanrl", "leanrl-2024")
ON_CPU = {"cuda": False}

TINY_REPLAY = {"learning_starts": 100, "batch_size": 32, "buffer_size": 1000, **ON_CPU}
TINY_ROLLOUT = {"num_envs": 1, "num_steps": 50, "num_minibatches": 2, "update_epochs": 2, "checkpoint_interval": 0}
TINY_ROLLOUT |= ON_CPU
SMALL_REPLAY = {"batch_size": 32, "buffer_size": 64}
SMALL_FRAMES = {"num_envs": 2, "batch_size": 8, "buffer_size": 64}
SMALL_ROLLOUT = {"num_envs": 2, "num_steps": 16, "num_minibatches": 4, "checkpoint_interval": 0}
SMALL_WORLDS = {"env_id": f"{WORLDS}:Short-v0", "num_envs": 4, "num_steps": 3, "num_atoms": 21, "v_max": 20.0}
SMALL_WORLDS |= {"batch_size": 32, "buffer_size": 16, "critic_hidden_dim": 32, "actor_hidden_dim": 16}
EMULATED_REPLAY = {"batch_size": 16, "buffer_size": 40, "learning_starts": 30, "total_timesteps": 60}
EMULATED_FRAMES = EMULATED_REPLAY | {"env_id": BREAKOUT, "num_envs": 2, "batch_size": 4, "target_network_frequency": 30}
EMULATED_ROLLOUT = {"num_envs": 4, "num_steps": 6, "num_minibatches": 2, "update_epochs": 2, "checkpoint_interval": 0}
EMULATED_ROLLOUT["total_timesteps"] = 96
EMULATED_GAMES = EMULATED_ROLLOUT | {"num_envs": 2, "num_steps": 8}
EXPLORES = {"exploration_fraction": 0.3, "learning_rate": 1e-2}  # soon greedy, and soon not always of the same action
EXPLORES_GAMES = EXPLORES | {"learning_rate": 1e-4}
TF32 = {"matmul_precision": "high"}  # images then are channels last
COUNTED_REPLAY = {"learning_starts": 190, "buffer_size": 1000}
COUNTED_FRAMES = COUNTED_REPLAY | {"target_network_frequency": 100}
GREEDY = {"start_e": 0.0, "end_e": 0.0}
PENDULUM = {"env_id": f"{WORLDS}:TorchPendulum-v0"}
SCALED_REPLAY = {"learning_starts": 1000, "buffer_size": 100_000}
FULL_SOON = "--learning-starts 1000 --buffer-size 100000"
SOON_GREEDY = "--exploration-fraction 0.002"
REPORT_REPLAY = "--learning-starts 100 --buffer-size 1000 --total-timesteps 100000"
REPORT_ROLLOUT = "--num-minibatches 2 --update-epochs 1 --total-timesteps 200000"
TESTS = "tests/algorithms/test_"
RUNS_AGREE = "tests/cuda/test_runs_agree.py::test_runs_agree[{device}-{mode}-"
NEEDS_CARD = "a batch of its defaults takes a CPU a second"
SHORT_OF_TIME = "the report of a card has nine minutes"

REPLAY_FLAGS = {name: name for name in ("batch_size", "learning_starts", "buffer_size", "gamma", "tau")}
SAC_FLAGS = REPLAY_FLAGS | {"target_network_frequency": "target_update_interval"}
TD3_FLAGS = REPLAY_FLAGS | {
    "policy_frequency": "policy_delay",
    "policy_noise": "target_policy_noise",
    "noise_clip": "target_noise_clip",
}
DQN_FLAGS = REPLAY_FLAGS | {
    "target_network_frequency": "target_update_interval",
    "start_e": "exploration_initial_eps",
    "end_e": "exploration_final_eps",
    "exploration_fraction": "exploration_fraction",
}
PPO_FLAGS = {
    "num_steps": "n_steps",
    "update_epochs": "n_epochs",
    "gamma": "gamma",
    "gae_lambda": "gae_lambda",
    "norm_adv": "normalize_advantage",
    "clip_coef": "clip_range",
    "ent_coef": "ent_coef",
    "max_grad_norm": "max_grad_norm",
}

ENTRIES = (
    Algorithm(
        "sac_continuous_action",
        "SAC",
        page="doc/sac.md",
        env_id=CHEETAH,
        env_ids=WALKERS,
        budget=MILLION,
        published={
            "HalfCheetah": "9634.89 ± 1423.73",
            "Walker2d": "3591.45 ± 911.33",
            "Hopper": "2310.46 ± 342.82",
        },
        curves={
            "sac_halfcheetah": "SAC, HalfCheetah-v5: plain and turbo",
            "sac_init_entropy": "SAC, HalfCheetah-v5: entropy of the policy at the start",
        },
        variants=("sac_population_torchcompile",),
        tiny=TINY_REPLAY | {"env_id": "Pendulum-v1"},
        small=SMALL_REPLAY | {"env_id": "Pendulum-v1"},
        emulated=EMULATED_REPLAY | {"env_id": "Pendulum-v1"},
        others={"num_envs": 3, "autotune": False, "policy_frequency": 1, "target_network_frequency": 2},
        generated={"total_timesteps": 39},
        functions={"store_and_act", "update_critics", "update_actor"},
        counted=(COUNTED_REPLAY, 100),
        peers=ALL_PEERS,
        peer_flags=SAC_FLAGS,
        speed=Speed(steps=15_000, quick_steps=9_000, plain=100, compiled=200),
        scaling=Scaling(SCALED_REPLAY, period=2),
        gpu_report=GpuReport(
            1,
            f"{FULL_SOON} --total-timesteps 300000",
            f"{REPORT_REPLAY} --batch-size 8",
            f"{TESTS}sac.py::test_modes_agree[{{device}}-{{mode}}]",
        ),
    ),
    Algorithm(
        "td3_continuous_action",
        "TD3",
        page="doc/td3.md",
        env_id=CHEETAH,
        env_ids=WALKERS,
        budget=MILLION,
        published={
            "HalfCheetah": "9583.22 ± 126.09",
            "Walker2d": "4057.59 ± 658.78",
            "Hopper": "3134.61 ± 360.18",
        },
        curves={"td3_halfcheetah": "TD3, HalfCheetah-v5: plain and turbo"},
        tiny=TINY_REPLAY | {"env_id": "Pendulum-v1"},
        small=SMALL_REPLAY | {"env_id": "Pendulum-v1"},
        emulated=EMULATED_REPLAY | {"env_id": "Pendulum-v1"},
        others={"num_envs": 3, "updates_per_step": 2, "policy_frequency": 3},
        generated={"total_timesteps": 39},
        functions={"store_and_act", "update_critics", "update_actor"},
        counted=(COUNTED_REPLAY, 100),
        peers=ALL_PEERS,
        peer_flags=TD3_FLAGS,
        speed=Speed(steps=45_000, quick_steps=32_000, plain=170, compiled=280),
        scaling=Scaling(SCALED_REPLAY, period=2),
        gpu_report=GpuReport(
            4,
            f"{FULL_SOON} --total-timesteps 300000",
            f"{REPORT_REPLAY} --batch-size 8",
            f"{TESTS}td3.py::test_modes_agree[{{device}}-{{mode}}]",
        ),
    ),
    Algorithm(
        "ppo_continuous_action",
        "PPO",
        page="doc/ppo.md",
        env_id=CHEETAH,
        env_ids=SIX,
        budget=MILLION,
        published={
            "HalfCheetah": "1442.64 ± 46.03",
            "Walker2d": "2287.95 ± 571.78",
            "Hopper": "2382.86 ± 271.74",
            "InvertedPendulum": "963.09 ± 22.20",
            "Humanoid": "716.11 ± 49.08",
            "Pusher": "-40.38 ± 7.15",
        },
        curves={
            "ppo_halfcheetah": "PPO, HalfCheetah-v5: plain, turbo, and without the values of truncated episodes",
            "ppo_init_entropy": "PPO, HalfCheetah-v5: entropy of the policy at the start",
        },
        tiny=TINY_ROLLOUT | {"env_id": "Pendulum-v1"},
        small=SMALL_ROLLOUT | {"env_id": "Pendulum-v1"},
        emulated=EMULATED_ROLLOUT | {"env_id": "Pendulum-v1", "num_envs": 1, "num_steps": 16},
        others={"num_envs": 2, "target_kl": 0.05, "ent_coef": 0.01, "clip_vloss": False},
        generated={"total_timesteps": 48},
        functions={"update_minibatch"},
        counted=({}, 2048),
        peers=ALL_PEERS,
        peer_flags=PPO_FLAGS,
        speed=Speed(steps=150_000, quick_steps=60_000, plain=1300, compiled=7000),
        scaling=Scaling(iteration=2048),
        gpu_report=GpuReport(
            3,
            "--total-timesteps 3000000",
            f"{REPORT_ROLLOUT} --num-steps 64",
            f"{TESTS}ppo.py::test_modes_agree[{{device}}-10-None-{{mode}}]",
        ),
    ),
    Algorithm(
        "ppo",
        "PPO, discrete actions",
        page="doc/ppo_discrete.md",
        env_id=CARTPOLE,
        env_ids=CLASSIC + MASKED,
        budget=MILLION // 2,
        published={"CartPole": "490.04 ± 6.12", "Acrobot": "-86.36 ± 1.32", "MountainCar": "-200.00 ± 0.00"},
        tiny=TINY_ROLLOUT | {"env_id": CARTPOLE},
        small=SMALL_ROLLOUT | {"env_id": CARTPOLE},
        emulated=EMULATED_ROLLOUT | {"env_id": CARTPOLE},
        others={"env_id": "Masked-v0", "num_envs": 2, "target_kl": 0.05, "clip_vloss": False},
        generated={"total_timesteps": 48},
        functions={"update_minibatch"},
        counted=({}, 128),
        peers=("sb3", "sbx", "cleanrl"),
        peer_flags=PPO_FLAGS,
        speed=Speed(steps=400_000, quick_steps=150_000, plain=5000, compiled=25_000),
        scaling=Scaling(iteration=512, batches=(32, 128, 512)),
        left_out={"gpu_report": SHORT_OF_TIME},
    ),
    Algorithm(
        "ppo_lstm",
        "PPO with memory",
        page="doc/ppo_lstm.md",
        env_id=CARTPOLE,
        env_ids=(CARTPOLE,),
        budget=MILLION // 2,
        curves={
            "memory_RepeatPrevious": "PPO, RepeatPreviousEasy: with and without memory",
            "memory_PositionOnlyCartPole": "PPO, PositionOnlyCartPoleEasy: with and without memory",
            "memory_PositionOnlyPendulum": "PPO, PositionOnlyPendulumEasy: with and without memory",
        },
        tiny=TINY_ROLLOUT | {"env_id": CARTPOLE, "num_minibatches": 1},
        small=SMALL_ROLLOUT | {"num_envs": 4, "num_steps": 12, "num_minibatches": 2, "update_epochs": 2},
        emulated=EMULATED_ROLLOUT,
        others={"env_id": "Unequal-v0", "cell": "gru", "target_kl": 1e-4},
        generated={"num_steps": 4, "total_timesteps": 16},
        functions={
            "decide",
            "from_obs",
            "unroll_chunk",
            "loss",
            "from_obs_back",
            "unroll_chunk_back",
            "loss_back",
            "step",
        },
        counted=({}, 128),
        peers=("sb3",),
        peer_flags=PPO_FLAGS,
        speed=Speed(steps=150_000, quick_steps=60_000, plain=3000, compiled=9000),
        scaling=Scaling(iteration=2048, num_envs=(4, 16, 64), batches=(256, 512, 1024)),  # of whole rollouts
        left_out={"gpu_report": SHORT_OF_TIME},
    ),
    Algorithm(
        "ppo_gpu_envs",
        "PPO, GPU environments",
        page="doc/ppo_gpu_envs.md",
        on_device=True,
        env_id=f"{WORLDS}:TorchPendulum-v0",
        curves={
            "ppo_gpu_halfcheetah": "PPO for environments on the GPU, HalfCheetah-v5 on MuJoCo Warp",
        },
        tiny=TINY_ROLLOUT | PENDULUM | {"num_envs": 2},
        small=SMALL_ROLLOUT | {"env_id": f"{WORLDS}:Short-v0"},
        emulated=EMULATED_ROLLOUT | {"env_id": f"{WORLDS}:Short-v0"},
        others={"desired_kl": None, "env_id": f"{WORLDS}:ShortAsymmetric-v0"},
        generated={"num_steps": 4, "total_timesteps": 48},
        functions={"decide", "note", "update_minibatch"},
        counted=(PENDULUM, 16),
        left_out={"speed": NEEDS_CARD, "scaling": NEEDS_CARD, "gpu_report": SHORT_OF_TIME},
    ),
    Algorithm(
        "ppo_atari_envpool",
        "PPO, Atari",
        page="doc/ppo_atari.md",
        atari=True,
        env_id=BREAKOUT,
        env_ids=GAMES,
        budget=10 * MILLION,
        curves={
            "ppo_pong": "PPO, Pong-v5: a million steps",
            "ppo_breakout": "PPO, Breakout-v5: the first steps",
        },
        variants=("ppo_atari_multigpu_torchcompile",),
        tiny=TINY_ROLLOUT | {"env_id": BREAKOUT, "update_epochs": 1},
        small=SMALL_ROLLOUT,
        emulated=EMULATED_GAMES,
        others={"num_envs": 3, "target_kl": 1e-4, "norm_adv": False, "clip_vloss": False} | TF32,
        generated={"num_steps": 4, "update_epochs": 1, "total_timesteps": 8},
        functions={"decide", "update_minibatch"},
        counted=({}, 128),
        peers=ALL_PEERS,
        peer_flags=PPO_FLAGS,
        speed=Speed(steps=40_000, quick_steps=16_000, plain=350, compiled=500),
        scaling=Scaling(iteration=1024),
        gpu_report=GpuReport(
            2,
            "--total-timesteps 2000000",
            f"{REPORT_ROLLOUT} --num-envs 2 --num-steps 8",
            f"{TESTS}ppo_atari.py::test_modes_agree[{{device}}-6-None-{{mode}}]",
        ),
    ),
    Algorithm(
        "dqn",
        "DQN",
        page="doc/dqn.md",
        env_id=CARTPOLE,
        env_ids=CLASSIC,
        budget=MILLION // 2,
        published={"CartPole": "488.69 ± 16.11", "Acrobot": "-91.54 ± 7.20", "MountainCar": "-194.95 ± 8.48"},
        curves={"dqn_cartpole": "DQN, CartPole-v1: plain and turbo"},
        tiny=TINY_REPLAY | {"env_id": CARTPOLE},
        small=SMALL_REPLAY,
        emulated=EMULATED_REPLAY | EXPLORES | {"env_id": CARTPOLE, "train_frequency": 5, "total_timesteps": 300},
        others={"num_envs": 3, "train_frequency": 2, "target_network_frequency": 50, "tau": 0.5},
        generated={"total_timesteps": 80},
        functions={"store_and_learn"},
        counted=(COUNTED_REPLAY | GREEDY, 500),
        peers=ALL_PEERS,
        peer_flags=DQN_FLAGS,
        speed=Speed(steps=400_000, quick_steps=150_000, plain=3700, compiled=11_000),
        scaling=Scaling(SCALED_REPLAY | {"start_e": 0.05, "end_e": 0.05}),
        gpu_report=GpuReport(
            6,
            f"--learning-starts 2000 --total-timesteps 1000000 {SOON_GREEDY}",
            f"{REPORT_REPLAY} --batch-size 8 {SOON_GREEDY}",
            f"{TESTS}dqn.py::test_modes_agree[{{device}}-{{mode}}]",
        ),
    ),
    Algorithm(
        "dqn_atari",
        "DQN, Atari",
        page="doc/dqn.md",
        atari=True,
        env_id=BREAKOUT,
        env_ids=GAMES,
        budget=10 * MILLION,
        curves={"dqn_breakout": "DQN, Breakout-v5: the first steps"},
        tiny=TINY_REPLAY | {"env_id": BREAKOUT, "batch_size": 8},
        small=SMALL_FRAMES,
        emulated=EMULATED_FRAMES | EXPLORES_GAMES,
        others={"num_envs": 3, "train_frequency": 1, "tau": 0.5} | TF32,
        generated={"learning_starts": 16, "total_timesteps": 28},
        generated_others={"total_timesteps": 21},  # with an update in each step
        functions={"store_and_act", "learn"},
        counted=(COUNTED_FRAMES | GREEDY, 100),
        peers=("sb3", "sbx"),
        peer_flags=DQN_FLAGS,
        speed=Speed(steps=14_000, quick_steps=6_000, plain=120, compiled=150, flags=FULL_SOON),
        scaling=Scaling(SCALED_REPLAY | {"start_e": 0.01, "end_e": 0.01}, batches=(32, 64, 256)),
        left_out={"gpu_report": SHORT_OF_TIME},
    ),
    Algorithm(
        "pqn",
        "PQN",
        page="doc/pqn.md",
        env_id=CARTPOLE,
        env_ids=CLASSIC,
        budget=MILLION // 2,
        published={"CartPole": "495.13 ± 6.89", "Acrobot": "-95.63 ± 5.73", "MountainCar": "-200.00 ± 0.00"},
        tiny=TINY_ROLLOUT | {"env_id": CARTPOLE},
        small=SMALL_ROLLOUT,
        emulated=EMULATED_ROLLOUT | EXPLORES | {"env_id": CARTPOLE, "total_timesteps": 168},
        others={"num_envs": 3, "num_steps": 7, "num_minibatches": 3, "update_epochs": 3, "q_lambda": 0.0},
        generated={"total_timesteps": 72},
        functions={"update_minibatch"},
        counted=({}, 128),
        peers=("cleanrl",),
        speed=Speed(steps=350_000, quick_steps=120_000, plain=3000, compiled=9000),
        scaling=Scaling({"start_e": 0.05, "end_e": 0.05}, iteration=512, batches=(32, 128, 512)),
        gpu_report=GpuReport(
            7,
            f"--total-timesteps 3000000 {SOON_GREEDY}",
            f"{REPORT_ROLLOUT} --num-steps 8 {SOON_GREEDY}",
            f"{TESTS}pqn.py::test_modes_agree[{{device}}-pqn-8-{{mode}}]",
        ),
    ),
    Algorithm(
        "pqn_atari_envpool",
        "PQN, Atari",
        page="doc/pqn.md",
        atari=True,
        env_id=BREAKOUT,
        env_ids=GAMES,
        budget=10 * MILLION,
        published={"Breakout": "384.85 ± 12.39", "Pong": "20.49 ± 0.11", "BeamRider": "5753.03 ± 2394.70"},
        curves={"pqn_pong": "PQN and PPO, Pong-v5"},
        tiny=TINY_ROLLOUT | {"env_id": BREAKOUT, "update_epochs": 1},
        small=SMALL_ROLLOUT,
        emulated=EMULATED_GAMES | EXPLORES_GAMES,
        others={"num_envs": 3, "anneal_lr": False, "max_grad_norm": 0.5} | TF32,
        generated={"num_steps": 4, "update_epochs": 3, "total_timesteps": 8},
        functions={"decide", "update_minibatch"},
        counted=(GREEDY, 128),
        peers=("cleanrl",),
        speed=Speed(steps=40_000, quick_steps=16_000, plain=350, compiled=500),
        scaling=Scaling({"start_e": 0.01, "end_e": 0.01}, iteration=1024),
        left_out={"gpu_report": SHORT_OF_TIME},
    ),
    Algorithm(
        "sac_atari",
        "SAC-discrete, Atari",
        page="doc/sac.md",
        atari=True,
        env_id=BEAM_RIDER,
        env_ids=(BEAM_RIDER,),
        budget=5 * MILLION,
        curves={"sac_discrete_entropy": "SAC-discrete, Breakout-v5: entropy of the policy"},
        tiny=TINY_REPLAY | {"env_id": BREAKOUT, "batch_size": 8},
        small=SMALL_FRAMES,
        emulated=EMULATED_FRAMES,
        others={"num_envs": 3, "update_frequency": 3, "autotune": False, "tau": 0.5},
        # of a batch below 8, inductor 2.13 computes the logged alpha_loss with the new log_alpha
        generated={"learning_starts": 16, "total_timesteps": 28, "batch_size": 8},
        generated_others={"total_timesteps": 22},  # with an update in each step
        functions={"store_and_act", "learn"},
        counted=(COUNTED_FRAMES, 100),
        speed=Speed(steps=4_000, quick_steps=2_000, plain=25, compiled=30, flags=FULL_SOON),
        scaling=Scaling(SCALED_REPLAY),
        gpu_report=GpuReport(
            5,
            f"{FULL_SOON} --total-timesteps 200000",
            f"{REPORT_REPLAY} --batch-size 4",
            f"{RUNS_AGREE}sac_atari]",
        ),
    ),
    Algorithm(
        "fast_td3",
        "FastTD3",
        page="doc/fast_td3.md",
        on_device=True,
        env_id=f"{WORLDS}:TorchPendulum-v0",
        curves={"fast_td3_halfcheetah": "FastTD3, HalfCheetah-v5 on MuJoCo Warp"},
        tiny=SMALL_WORLDS | ON_CPU,
        small=SMALL_WORLDS,
        emulated=SMALL_WORLDS | {"total_timesteps": 120, "buffer_size": 12, "batch_size": 8},
        others={"env_id": f"{WORLDS}:ShortAsymmetric-v0", "num_steps": 1, "updates_per_step": 1},
        generated={"total_timesteps": 64},
        generated_others={"total_timesteps": 72},  # each of two graphs of updates is replayed
        functions={"compute_actions", "store_step", "update_critics", "update_actor"},
        counted=(PENDULUM | {"buffer_size": 100}, 100),
        gpu_report=GpuReport(
            8,
            "--total-timesteps 50000000 --buffer-size 5120",
            "--num-envs 4 --batch-size 32 --buffer-size 16 --critic-hidden-dim 32 --actor-hidden-dim 16",
            f"{RUNS_AGREE}fast_td3]",
        ),
        left_out={"speed": NEEDS_CARD, "scaling": NEEDS_CARD},
    ),
)
ALGORITHMS = {entry.script: entry for entry in ENTRIES}
MEASURED = {script: entry for script, entry in ALGORITHMS.items() if entry.speed}


def named(script, env_id=None):
    """The name of an algorithm in an environment (default: its own), for tables and figures."""
    entry = ALGORITHMS[script]
    return f"{entry.name}, {(env_id or entry.env_id).split(':')[-1]}"
