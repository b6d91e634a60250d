"""Results of finished runs: a table, learning curves, and a page with both."""

import html
import json
import statistics
from collections import defaultdict
from itertools import cycle, product

from common import curves
from common.tables import Table, mean_and_deviation
from launch.orders import folder_name
from launch.worker import done_step, summaries

HEADER = ("environment", "setting", "return", "of each seed", "steps", "steps/s", "minutes")
ABOUT = """Returns are means over the last tenth of a run's steps, with the standard deviation over seeds. Thin lines
are seeds, and thick ones are their means. Steps/s are the median of the logs in the second half of the last attempt.
Minutes are those of training, added up over attempts, without those that were killed."""
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; line-height: 1.45; max-width: 70em; margin: 2em auto; padding: 0 1em; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.2em 0.6em; text-align: left; border-bottom: 1px solid #bbb; }}
svg {{ max-width: 100%; height: auto; margin: 1em 0; }}
pre {{ white-space: pre-wrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
<pre>{command}</pre>
{body}
</body>
</html>
"""


def result(order):
    """A finished run's curve and the combined summaries of its attempts; None if it is not finished."""
    attempts = summaries(order.folder)
    if done_step(order.folder) < order.steps or not attempts:
        return None
    folders = {path.parent for path in order.folder.glob("*/events.*")}
    folders = sorted(folders, key=lambda folder: folder.name.rsplit("__", 1)[-1])
    return {
        "seed": order.seed,
        "curve": curves.learning_curve(folders),
        "steps_per_second": curves.late_speed(folders[-1]) if folders else None,
        "wall_seconds": sum(attempt["wall_seconds"] for attempt in attempts),
        "global_step": attempts[-1]["global_step"],
        "episodic_return": attempts[-1]["episodic_return"],
    }


def grouped(orders):
    """The available results, as {env_id: {setting: [result of each seed]}}."""
    groups = defaultdict(lambda: defaultdict(list))
    for order in orders:
        own = result(order)
        if own:
            groups[order.env_id][order.label].append(own)
    return groups


def table(groups):
    rows = []
    for env_id, settings in groups.items():
        for setting, results in settings.items():
            ends = {own["seed"]: curves.end_of(own["curve"]) for own in results if own["curve"]}
            seeds = [own["seed"] for own in results]
            each = [f"{seed}: {ends[seed]:.1f}" if seed in ends else f"{seed}: no episode" for seed in seeds]
            speeds = [own["steps_per_second"] for own in results if own["steps_per_second"]]
            rows.append(
                [
                    env_id,
                    setting,
                    mean_and_deviation(ends.values()) if ends else "no episode has ended",
                    ", ".join(each),
                    f"{min(own['global_step'] for own in results)}",
                    f"{statistics.median(speeds):.0f}" if speeds else "",
                    f"{statistics.mean(own['wall_seconds'] for own in results) / 60:.1f}",
                ]
            )
    return Table("", HEADER, rows)


def write(orders, out, title, command):
    """Write results.md, results.html, results.json and a figure per environment to `out`; returns the table."""
    groups = grouped(orders)
    shown = table(groups)
    parts = [f"<p>{ABOUT}</p>", f'<div class="wide">{shown.html()}</div>']
    with curves.settings():
        for env_id, settings in groups.items():
            looks = cycle(product(curves.LINES, curves.COLORS))
            styles = {name: (color, line) for name, (line, color) in zip(settings, looks, strict=False)}
            picture = curves.svg(curves.learning_figure(f"{title}, {env_id}", settings, "", styles))
            (out / f"curves_{folder_name(env_id)}.svg").write_bytes(picture)
            parts.append(inline(picture))
    (out / "results.md").write_text(f"{shown.markdown()}\n", encoding="utf-8")
    (out / "results.json").write_text(json.dumps(groups, indent=1), encoding="utf-8")
    write_page(out / "results.html", title, command, parts)
    return shown.markdown()


def write_page(path, title, command, parts):
    """Write a self-contained page; `parts` are HTML."""
    path.write_text(
        PAGE.format(title=html.escape(title), command=html.escape(command), body="\n".join(parts)), encoding="utf-8"
    )


def inline(svg):
    """A figure as part of a page."""
    text = svg.decode()
    return text[text.index("<svg") :]
