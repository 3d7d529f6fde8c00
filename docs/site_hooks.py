"""What the site needs beside its pages: files of the repository that pages link to, and a check of what was built.

Pages are written for reading in the repository: links to results and scripts lead out of docs/. Here those files become
pages too, so that the site is whole without the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
ADDED = ("CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(\]\()((?:\.\./)?(?:docs|benchmarks|examples|CHANGELOG|CONTRIBUTING|README)[^)\s]*)(\))")
LOADED = re.compile(r"<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc=[\"']?((?:https?:)?//[^\"' >]+)", re.I)
STYLED = re.compile(
    r"<link\b(?=[^>]*rel=[\"']?(?:stylesheet|preconnect|icon|preload))[^>]*href=[\"']?(https?:[^\"' >]+)"
)
RECORD = re.compile(r"^```json\n.*?^```\n", re.M | re.S)
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.S)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
RAW = re.compile(r"<p>(?:```|\| |- |#{1,4} )|\n\|[^\n]*\|\n")


def on_files(files: Files, config: Any) -> Files:
    """Add results, the scripts that pages link to, and the texts at the root."""
    pages = [Path(file.abs_src_path).read_text() for file in files if file.src_uri.endswith(".md")]
    for name in ADDED:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    results = sorted((ROOT / RESULTS).iterdir())
    for path in results:
        uri = f"{RESULTS}/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, f"{RESULTS}/index.md", content=results_page(results)))
    for target in sorted({site_path(link[1]) for text in pages for link in LINK.findall(text)}):
        if target.endswith((".py.md", ".sh.md")):
            files.append(File.generated(config, target, content=script_page(target.removesuffix(".md"))))
    return files


def results_page(results: list[Path]) -> str:
    """A list of all measurements, the newest first."""
    lines = [
        "# Measured",
        "",
        "Every figure in these pages is from one of these runs; each names machine and versions.",
        "",
    ]
    for path in reversed([path for path in results if path.suffix == ".md"]):
        title = path.read_text().splitlines()[0].lstrip("# ")
        lines.append(f"- [{path.stem[:10]} {path.stem[11:]}]({path.name}): {title}")
    return "\n".join(lines) + "\n"


def script_page(name: str) -> str:
    """A script, as a page."""
    kind = "python" if name.endswith(".py") else "sh"
    return f"# {name}\n\n```{kind}\n{(ROOT / name).read_text()}```\n"


def site_path(link: str) -> str:
    """Where the site has a file of the repository, from its root."""
    path = link.removeprefix("../").removeprefix("docs/")
    return f"{path}.md" if path.split("#")[0].endswith((".py", ".sh")) else path


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links that leave docs/, or that come from outside it, to the site's own pages."""
    if page.file.src_uri.startswith(RESULTS):
        page.meta["search"] = {"exclude": True}  # tables of numbers would bury the pages that explain them
        return RECORD.sub("(The numbers as JSON are at the end of this file in the repository.)\n", markdown)
    return LINK.sub(lambda found: found[1] + site_path(found[2]) + found[3], markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Fail where a page would load something from elsewhere, or shows Markdown instead of what it means."""
    foreign = [*LOADED.findall(output), *STYLED.findall(output)]
    if foreign:
        raise PluginError(f"{page.file.src_uri} loads {foreign[0]}: the site must not load anything from other hosts")
    raw = RAW.search(re.sub(r"<(pre|code)\b.*?</\1>", "", output, flags=re.S))
    if raw:
        raise PluginError(f"{page.file.src_uri}: Markdown that was not understood: {raw[0]!r}")
    return CELL.sub(lambda cell: CODE.sub(lambda code: with_breaks(code[0]), cell[0]), output)


def with_breaks(name: str) -> str:
    """A name in a table's cell, which may go on in the next line after a dot, a comma or an underscore."""
    return re.sub(r"(?<=[._,/])(?=\w)", "<wbr>", name)
