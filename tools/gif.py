"""Make an animated GIF of the beginning of a video, such as those of `python -m instruments evaluate RUN --video`.

python tools/gif.py runs/RUN/videos/evaluation-episode-0.mp4 cheetah.gif
"""

from pathlib import Path

import tyro
from moviepy import VideoFileClip


def gif(
    video: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    start: float = 0.0,
    seconds: float = 5.0,
    width: int = 320,
    fps: int = 20,
):
    """Write `seconds` of a video, from second `start` on, as a GIF of `width` pixels."""
    with VideoFileClip(str(video.expanduser())) as clip:
        part = clip.subclipped(start, min(start + seconds, clip.duration))
        part.resized(width=width).write_gif(str(output.expanduser()), fps=fps, logger=None)


if __name__ == "__main__":
    tyro.cli(gif)
