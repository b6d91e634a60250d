"""A game of Catch that replaces envpool's games; a convolutional network learns it in a minute."""

import gymnasium as gym
import numpy as np

SIZE = 84
MIDDLE = 42
FLIGHT = 2  # steps from the throw of a ball to its landing
BALLS = 4  # in a game
LANDING = 32  # columns between the middle and where balls land
PADDLE_STEP = LANDING // FLIGHT
DRIFT = 3  # columns between two frames, before the throw's first step
ALL_FRAMES = np.arange(-1.5, 2)  # when the four frames that show a throw were taken; on average at time 0


class Catch:
    """What envpool's pool is to `AtariEnvs`: games of BALLS balls, each worth 1 if it is caught and -1 if it is missed.

    A ball is thrown somewhere around the middle, drifts left or right, and lands at that side. The paddle starts in the
    middle and has to follow from the first step on. Where the ball is does not say where it drifts: only the order of
    the four frames does. It is drawn as a bar, since its height would give the order away. Random play catches one in
    nine.

    `scrambled`: the four frames are in random order, so that half of the balls is the most that can be caught.
    """

    def __init__(self, num_envs, seed, scrambled=False):
        self.observation_space = gym.spaces.Box(0, 255, (4, SIZE, SIZE), np.uint8)
        self.action_space = gym.spaces.Discrete(3)
        self.generator = np.random.default_rng(seed)
        self.num_envs = num_envs
        self.scrambled = scrambled
        self.frames = np.zeros((num_envs, 4, SIZE, SIZE), np.uint8)
        self.ball = np.zeros(num_envs)
        self.side = np.zeros(num_envs)  # -1 for a ball that drifts to the left, 1 to the right
        self.paddle = np.zeros(num_envs)
        self.remaining = np.zeros(num_envs, int)  # steps until the ball lands
        self.balls = np.zeros(num_envs, int)  # that are left in the game
        self.ended = np.zeros(num_envs, bool)

    def reset(self):
        self.begin(np.ones(self.num_envs, bool))
        return self.observe(), {}

    def begin(self, where):
        """Start a game in the environments `where`, (num_envs,), is true."""
        self.balls[where] = BALLS
        self.throw(where)

    def throw(self, where):
        """Throw a ball in the environments `where`, (num_envs,), is true, and show four frames of it."""
        middle = MIDDLE + self.generator.integers(-18, 19, self.num_envs)
        side = self.generator.choice((-1, 1), self.num_envs)
        self.side[where] = side[where]
        self.paddle[where] = MIDDLE
        self.remaining[where] = FLIGHT
        for i, time in enumerate(ALL_FRAMES):
            self.ball[where] = (middle + DRIFT * time * side)[where]
            self.frames[where, i] = self.draw()[where]

    def draw(self):
        """What is on the screen now, (num_envs, SIZE, SIZE)."""
        columns = np.arange(SIZE)
        ball = np.abs(columns - self.ball[:, None]) < 4
        paddle = np.abs(columns - self.paddle[:, None]) < 10
        screen = np.repeat(ball[:, None], SIZE, axis=1)
        screen[:, -16:] = paddle[:, None]
        return screen * np.uint8(255)

    def observe(self):
        """The newest four frames of each environment, in order unless they are scrambled."""
        order = np.tile(np.arange(4), (self.num_envs, 1))
        if self.scrambled:
            order = self.generator.permuted(order, axis=1)
        return self.frames[np.arange(self.num_envs)[:, None], order]

    def step(self, actions):
        """Both of what follows."""
        self.send(actions)
        return self.recv()

    def send(self, actions):
        """Actions are 0 for left, 1 for staying, 2 for right."""
        self.actions = actions

    def recv(self):
        """A game that has ended ignores its action, and begins anew."""
        begins = self.ended
        landing = MIDDLE + LANDING * self.side
        self.ball += (landing - self.ball) / np.maximum(self.remaining, 1)  # 0 where a game has ended
        self.paddle += PADDLE_STEP * (self.actions - 1)
        self.remaining -= 1
        self.frames = np.concatenate((self.frames[:, 1:], self.draw()[:, None]), axis=1)
        landed = (self.remaining == 0) & ~begins
        caught = np.abs(self.ball - self.paddle) < PADDLE_STEP
        rewards = np.where(landed, np.where(caught, 1.0, -1.0), 0.0)
        self.balls -= landed
        self.ended = landed & (self.balls == 0)
        self.throw(landed & ~self.ended)
        self.begin(begins)
        infos = {"reward": rewards, "terminated": self.ended.astype(np.int32)}
        return self.observe(), rewards, self.ended, np.zeros(self.num_envs, bool), infos


class CatchFrameByFrame(Catch):
    """Catch that shows one new frame in each step, as a game does: in three steps after a throw actions do nothing.

    So the stacks can be put together again from single frames, and a ball takes five steps.
    """

    def reset(self):
        super().reset()
        self.show_throw()
        self.stacks = np.repeat(self.next_frame()[:, None], 4, axis=1)
        return self.stacks, {}

    def show_throw(self):
        """From now on the four frames of the last throw are shown; all environments throw in the same step."""
        self.unseen = [self.frames[:, i].copy() for i in range(4)]

    def next_frame(self):
        return self.unseen.pop(0)

    def recv(self):
        if self.unseen:
            nothing = np.zeros(self.num_envs)
            never = nothing.astype(bool)
            outcome = nothing, never, never, {"reward": nothing, "terminated": nothing.astype(np.int32)}
        else:
            starts_game = self.ended.all()
            _, *outcome = super().recv()
            if (self.remaining == FLIGHT).all():
                self.show_throw()
            else:
                self.unseen = [self.frames[:, -1]]
            if starts_game:
                self.stacks = np.repeat(self.unseen[0][:, None], 4, axis=1)
        self.stacks = np.concatenate((self.stacks[:, 1:], self.next_frame()[:, None]), axis=1)
        return self.stacks, *outcome
