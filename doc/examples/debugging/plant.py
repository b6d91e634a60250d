"""Write a copy of a script with a bug in it, to practice on: doc/debugging.md finds them.

    python doc/examples/debugging/plant.py first runs/first.py

The bugs are `first`, `second` and `third`: two in PPO for continuous actions, one in PPO for Atari. They are below in
plain text: do not look before you have found them.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUGS = {  # the script, a text that is there once, and what becomes of it
    "first": (
        "ppo_continuous_action_torchcompile.py",
        "policy_loss = -torch.min(",
        "policy_loss = torch.min(",
    ),
    "second": (
        "ppo_continuous_action_torchcompile.py",
        'errors = (values - batch["returns"]).square()',
        'errors = (values - batch["returns"].squeeze(-1)).square()',
    ),
    "third": (
        "ppo_atari_envpool_torchcompile.py",
        "        obs, rewards, terminated, truncated, infos = self.pool.step(actions.astype(np.int32))\n",
        """\
        obs, rewards, terminated, truncated, infos = self.pool.step(actions.astype(np.int32))
        self.newest = (getattr(self, "newest", 0) + 1) % 4
        obs = np.roll(obs, self.newest, axis=1)
""",
    ),
}


def planted(name):
    """The text of the script with the bug `name`."""
    script, old, new = BUGS[name]
    source = (ROOT / "leanrl" / script).read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise ValueError(f"{script}: {source.count(old)} places, not one, with this text: {old}")
    return source.replace(old, new)


def main(name="", path=""):
    if name not in BUGS or not path:
        print(f"error: {name or 'no name'}: give one of {', '.join(BUGS)}, and a file to write", file=sys.stderr)
        raise SystemExit(2)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(planted(name), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
