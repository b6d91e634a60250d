"""Hooks of mkdocs.yml: pages under doc/, written for GitHub, become a site.

The first page is README.md, and doc/report.html is a page in the site's layout. A link to a file that is no page leads
to `extra.source` in mkdocs.yml or, while that is empty, to a page that shows the file. A link whose text is a page's
file name shows the title that the navigation gives that page.
"""

import os
import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.S | re.M)
LINK = re.compile(r"(\]\(|(?:src|href)=\")([^)\"#\s:]+)(?=[)\"#])")
LABEL = re.compile(r"\[(?:doc/)?(\w+)\.(?:md|html)\](?=\()")
BADGE = re.compile(r"^(\[!\[|.*shields\.io).*\n", re.M)  # from another server
ALERT = re.compile(r"^> \[!(\w+)\]\n((?:>.*\n)+)", re.M)  # a box on GitHub
PAGES = {
    "README.md": "index.md",
    "doc/README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "doc/report.html": "report.md",
}
IMAGES = (".png", ".svg", ".gif", ".jpg", ".webp")
LANGUAGES = {".py": "python", ".cpp": "cpp", ".sbatch": "bash", ".sh": "bash", ".toml": "toml"}


def on_files(files, config):
    """Add the first page, the report's, and those of the files that pages link to."""
    for file in [*files.documentation_pages()]:
        moved(file.content_string, file.src_uri, dirname(f"doc/{file.src_uri}"), config, files)
    readme = BADGE.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    add(files, config, "index.md", f"---\nhide: [navigation]\n---\n{moved(readme, 'index.md', '', config, files)}")
    add(files, config, "contributing.md", moved(contributing, "contributing.md", "", config, files))
    add(files, config, "report.md", "---\nhide: [navigation, toc]\n---\n# Report\n")
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    return markdown if page.file.generated_by else moved(markdown, uri, dirname(f"doc/{uri}"), config, files)


def on_page_content(html, page, config, files):
    """The report with its own styles, which apply to nothing else."""
    if page.file.src_uri != "report.md":
        return html
    report = (ROOT / "doc" / "report.html").read_text(encoding="utf-8")
    style, body = re.search(r"<style>(.*?)</style>.*?<body>\s*<h1>.*?</h1>(.*)</body>", report, re.S).groups()
    return f'{html}<div class="report"><style>.report {{{style}}}</style>{body}</div>'


def moved(markdown, uri, folder, config, files):
    """A page's text with links as they are in the site, where it is `uri`; its own links start from `folder`."""

    def replaced(match):
        before, target = match.groups()
        to = place(normpath(f"{folder}/{target}".lstrip("/")), config, files)
        if ":" in to:
            return before + to
        to = relpath(to, dirname(uri) or ".")
        if before != "](" and to.endswith(".md"):  # HTML, which mkdocs leaves as it is
            to = to.removesuffix("index.md").removesuffix(".md") + "/"
        return before + to

    markdown = ALERT.sub(admonition, markdown)
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(replaced, text) for text in parts[::2]]
    names = titles(config.nav)
    return LABEL.sub(lambda match: f"[{names.get(f'{match[1]}.md', match[1])}]", "".join(parts))


def admonition(match):
    kind, lines = match.groups()
    return f"!!! {kind.lower()}\n" + re.sub("^> ?", "    ", lines, flags=re.M)


def titles(entries):
    """What the navigation calls the pages."""
    found = {}
    for entry in entries:
        for title, below in entry.items():
            found |= titles(below) if isinstance(below, list) else {below: title}
    return found


def place(path, config, files):
    """Where a file of the repository is in the site, or its address outside of it."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("doc/") and path.endswith((".md", *IMAGES)):
        return path.removeprefix("doc/")
    if config.extra["source"]:
        return f"{config.extra['source']}/{path}"
    file = ROOT / path
    if path.endswith(IMAGES):
        return add(files, config, f"files/{path}", file.read_bytes())
    text = file.read_text(encoding="utf-8") if file.is_file() else "\n".join(sorted(os.listdir(file)))
    language = LANGUAGES.get(file.suffix, "text")
    page = f"---\nhide: [navigation, toc]\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{text}\n````\n"
    return add(files, config, f"files/{path}.md", page)


def add(files, config, uri, content):
    if not files.get_file_from_path(uri):
        files.append(File.generated(config, uri, content=content))
    return uri
