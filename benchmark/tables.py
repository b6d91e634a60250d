"""Tables in Markdown pages that programs write, so that nobody types their figures.

A page holds a table NAME between two comments, `<!-- NAME: COMMAND writes this -->` and `<!-- end of NAME -->`.
"""

import re


def with_table(page, name, text):
    """The text of a page with `text` as its table `name`; ValueError if it has no place for it, or several."""
    pattern = rf"(<!-- {re.escape(name)}: [^\n]*-->\n).*?(<!-- end of {re.escape(name)} -->)"
    page, places = re.subn(pattern, lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page, flags=re.DOTALL)
    if places != 1:
        raise ValueError(f"{places} places, not one, between <!-- {name}: ... --> and <!-- end of {name} -->")
    return page
