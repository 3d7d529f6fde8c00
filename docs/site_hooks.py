# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs. They add the results and scripts that pages link to as pages of the site, and check each built page.

Links of the pages lead to files of the repository outside docs/. The hooks replace them by links inside the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
ADDED = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(\]\()((?:\.\./)?(?:docs|benchmarks|examples|CHANGELOG|CONTRIBUTING|SECURITY|README)[^)\s]*)(\))")
LOADED = re.compile(r"<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc=[\"']?((?:https?:)?//[^\"' >]+)", re.I)
STYLED = re.compile(
    r"<link\b(?=[^>]*rel=[\"']?(?:stylesheet|preconnect|icon|preload))[^>]*href=[\"']?(https?:[^\"' >]+)"
)
RECORD = re.compile(r"^```json\n.*?^```\n", re.M | re.S)
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.S)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
RAW = re.compile(r"<p>(?:```|\| |- |#{1,4} )|\n\|[^\n]*\|\n")


def on_files(files: Files, config: Any) -> Files:
    """Add the files in `ADDED`, all results, and the scripts that pages link to."""
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
        "Every figure of the docs is from one of these runs. Each run names its machine and its versions.",
        "",
    ]
    for path in reversed([path for path in results if path.suffix == ".md"]):
        title = path.read_text().splitlines()[0].lstrip("# ")
        lines.append(f"- [{path.stem[:10]} {path.stem[11:]}]({path.name}): {title}")
    return "\n".join(lines) + "\n"


def script_page(name: str) -> str:
    """A page that shows the script."""
    kind = "python" if name.endswith(".py") else "sh"
    return f"# {name}\n\n```{kind}\n{(ROOT / name).read_text()}```\n"


def site_path(link: str) -> str:
    """The path, from the root of the site, of a file of the repository."""
    path = link.removeprefix("../").removeprefix("docs/")
    return f"{path}.md" if path.split("#")[0].endswith((".py", ".sh")) else path


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links to files outside docs/ by links to pages of the site."""
    if page.file.src_uri.startswith(RESULTS):
        page.meta["search"] = {"exclude": True}  # a search should find the pages that explain the numbers
        return RECORD.sub("(The numbers as JSON are at the end of this file in the repository.)\n", markdown)
    return LINK.sub(lambda found: found[1] + site_path(found[2]) + found[3], markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Fail if a page loads something from another host, or contains Markdown that was not converted to HTML."""
    foreign = [*LOADED.findall(output), *STYLED.findall(output)]
    if foreign:
        raise PluginError(
            f"{page.file.src_uri} loads {foreign[0]}. Remove it: the site must not load from other hosts."
        )
    raw = RAW.search(re.sub(r"<(pre|code)\b.*?</\1>", "", output, flags=re.S))
    if raw:
        raise PluginError(f"{page.file.src_uri} has Markdown that was not converted. Correct its syntax: {raw[0]!r}")
    return CELL.sub(lambda cell: CODE.sub(lambda code: with_breaks(code[0]), cell[0]), output)


def with_breaks(name: str) -> str:
    """Allows line breaks in a name after a dot, a comma, a slash or an underscore."""
    return re.sub(r"(?<=[._,/])(?=\w)", "<wbr>", name)
