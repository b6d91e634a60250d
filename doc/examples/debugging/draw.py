"""Make the pictures of doc/debugging.md: train PPO as it is and with each planted bug, and draw what shows the bug.

python doc/examples/debugging/draw.py  # some minutes
"""

import shutil
import subprocess
import sys

from plant import ROOT, planted

RUNS = ROOT / "runs" / "debugging"
ARTIFACTS = ROOT / "doc" / "artifacts"
CONTINUOUS = "--env-id HalfCheetah-v5 --total-timesteps 100000"
ATARI = "--env-id Breakout-v5 --total-timesteps 4096"


def train(name, instruments, flags):
    """Train the script with a bug, or as it is (`healthy`), with instruments; returns the run's folder."""
    script = ROOT / "leanrl" / "ppo_continuous_action_torchcompile.py"
    folder = RUNS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name != "healthy":
        script = folder / "script.py"
        script.write_text(planted(name), encoding="utf-8")
    words = f"-m instruments {instruments} -- {script} {flags} --run-dir {folder}".split()
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    return next(path for path in folder.iterdir() if path.is_dir())


def draw(name, folders, labels, tags):
    """Draw runs side by side."""
    words = [*folders, "--labels", *labels, "--tags", *tags, "--output", ARTIFACTS / f"{name}.png"]
    subprocess.run([sys.executable, "-m", "instruments.plots", *map(str, words)], cwd=ROOT, check=True)


def main():
    healthy = train("healthy", "--random-baseline 20", CONTINUOUS)
    first = train("first", "--random-baseline 20", CONTINUOUS)
    second = train("second", "--random-baseline 20", CONTINUOUS)
    tags = ["losses/entropy", "losses/explained_variance"]
    draw("debugging_first", [healthy, first], ["as it is", "first bug"], tags)
    draw("debugging_second", [healthy, second], ["as it is", "second bug"], tags)
    third = train("third", "--dump-frames 2000", ATARI)
    newest = max(third.glob("frames/*.png"), key=lambda path: int(path.stem))
    shutil.copy(newest, ARTIFACTS / "debugging_third.png")


if __name__ == "__main__":
    main()
