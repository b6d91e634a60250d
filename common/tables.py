"""Tables in Markdown pages, written by programs instead of by hand.

A page holds a table NAME between two comments, `<!-- NAME: COMMAND writes this -->` and `<!-- end of NAME -->`.
"""

import html
import re
import statistics
from dataclasses import dataclass
from itertools import pairwise


@dataclass
class Table:
    caption: str
    header: tuple[str, ...]
    rows: list[list[str]]

    def markdown(self):
        """The table as Markdown; a first cell that repeats the one above is left empty."""
        firsts = ["", *(row[0] for row in self.rows)]
        rows = [["" if a == b else b, *row[1:]] for (a, b), row in zip(pairwise(firsts), self.rows, strict=True)]
        lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in (self.header, *rows)]
        lines.insert(1, "|---" * len(self.header) + "|")
        return "\n".join([f"{self.caption}\n"] * bool(self.caption) + lines)

    def html(self):
        def row(tag, cells):
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "\n".join(row("td", cells) for cells in self.rows)
        head = row("th", self.header)
        caption = f"<p>{html.escape(self.caption)}</p>\n" * bool(self.caption)
        return f"{caption}<table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def mean_and_deviation(values):
    """Mean and sample standard deviation, as "8506.1 ± 80.2"; a single value has no deviation."""
    values = list(values)
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def spread(values, form):
    """Median and range, as "2.1 (2.0 to 2.3)"; equal values have no range."""
    values = [value for value in values if value is not None]
    if not values:
        return "none"
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})" if low != high else middle


def with_table(page, name, text):
    """The text of a page with `text` as its table `name`; ValueError unless it has exactly one place for it."""
    pattern = rf"(<!-- {re.escape(name)}: [^\n]*-->\n).*?(<!-- end of {re.escape(name)} -->)"
    page, places = re.subn(pattern, lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page, flags=re.DOTALL)
    if places != 1:
        raise ValueError(f"{places} places, not one, between <!-- {name}: ... --> and <!-- end of {name} -->")
    return page
