# SPDX-License-Identifier: Apache-2.0
"""Pages that are made from the code, or quote it: they say what it says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import twinflow
from twinflow.config.fields import HONOURED, dotted
from twinflow.config.schema import keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def resolve(name: str) -> Any:
    """What a dotted name stands for."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:i]))
        found = getattr(found, part)
    return found


def load(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`(twinflow(?:\.[a-zA-Z_]\w*)+)", page.read_text()):
        resolve(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_fits_its_column(page: Path) -> None:
    """Output of commands may be wider. It has no language, or "text"."""
    code = re.findall(r"^```(?:python|py|sh|bash|json|yaml)\n(.*?)^```", page.read_text(), re.S | re.M)
    assert [line for block in code for line in block.splitlines() if len(line) > 90] == []


tables = load(DOCS / "tables.py")


@pytest.mark.parametrize("kind", ["TABLES", pytest.param("SLOW_TABLES", marks=pytest.mark.matrix)])
def test_tables_say_what_the_declarations_say(kind: str) -> None:
    for (page, name), table in getattr(tables, kind).items():
        text = (DOCS / page).read_text()
        assert tables.with_table(text, name, table()) == text, f"{page} is old. Run: python docs/tables.py"


def test_every_key_of_deepspeeds_is_there_once_with_a_status() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", tables.migration_tables(), re.M)
    names = [name for name, _ in rows]
    for key in keys():
        assert names.count(dotted(key.path)) == (0 if key.rule.ours else 1), key.path
    assert {tables.status(key) for key in tables.deepspeed_keys()} == set(tables.STATUSES)
    assert {found for _, found in rows} == {*tables.STATUSES, "refused"}  # the last: of optimizers that are not here


def test_differences_are_of_keys_that_work() -> None:
    working = {dotted(key.path) for key in tables.deepspeed_keys() if key.rule.kind == HONOURED}
    assert set(tables.DIFFERENCES) <= working


def texts(source: str) -> set[str]:
    """The constant parts of all strings of a module."""
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and node.value.__class__ is str
    }


@cache  # and not when tests are collected, which every worker does
def constants() -> set[str]:
    return {text for path in (ROOT / "src").rglob("*.py") for text in texts(path.read_text())}


QUOTED = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.M)


def missing_parts(message: str) -> list[str]:
    """Parts of a quoted message that no string of ours has; `...` stands for what differs."""
    for joint in (" is ..., but must be ", ", because "):  # errors.py puts these between two texts
        message = message.replace(joint, "...")
    parts = [part.strip() for part in message.replace(". ", "....").split("...")]
    parts = [part.strip(".:; ") for part in parts if part.strip(".:; ")]
    assert max(map(len, parts)) >= 10, f"{message}: too little to be known by"
    return [part for part in parts if not any(part in text for text in constants())]


@pytest.mark.parametrize("message", QUOTED)
def test_messages_are_still_ours(message: str) -> None:
    assert not missing_parts(message)


def test_messages_that_are_not_ours_are_found() -> None:
    assert len(QUOTED) > 30
    assert missing_parts("batch sizes do not fit, alas: ...") == ["batch sizes do not fit, alas"]


def test_the_api_reference_names_what_is_public() -> None:
    named = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text() + (DOCS / "api-parts.md").read_text(), re.M)
    assert len(named) == len(set(named))
    for name in named:
        assert resolve(name).__doc__
    public = [name for name in twinflow.__all__ if callable(getattr(twinflow, name))]
    assert {f"twinflow.{name}" for name in public} <= set(named)


def test_members_in_the_api_reference_exist() -> None:
    pages = (DOCS / "api.md").read_text() + (DOCS / "api-parts.md").read_text()
    listed = re.findall(r"^::: ([\w.]+)\n    options:\n((?:      .*\n)+)", pages, re.M)
    assert listed
    for name, options in listed:
        for member in yaml.safe_load(options).get("members", []):
            assert hasattr(resolve(name), member), f"{name}.{member}"


def test_the_picture_is_of_the_trace_beside_it() -> None:
    drawing = load(ROOT / "benchmarks" / "trace_picture.py")
    found = re.search(
        r"\.\./(benchmarks/results/[\w.-]+-trace-[\w.-]+)\.svg", (DOCS / "how-overlap-works.md").read_text()
    )
    assert found is not None
    trace = ROOT / f"{found[1]}.json"
    assert trace.with_suffix(".svg").read_text() == drawing.picture(*drawing.from_json(trace.read_text()))


def test_a_trace_is_recorded_and_drawn(tmp_path: Path) -> None:
    drawing = load(ROOT / "benchmarks" / "trace_picture.py")
    config = drawing.GPTConfig(vocab_size=16, context=4, num_layers=2, hidden=16, num_heads=1)
    spans, num_params = drawing.record(config, batch=1, bucket_numel=1024)
    facts = drawing.facts_of(config, 1, num_params, spans)
    text = drawing.to_json(spans, facts)
    again, told = drawing.from_json(text)
    assert told == facts
    assert len(again) == len(spans)
    svg = drawing.picture(again, told)
    for kind in ("forward", "backward", "out, bucket 0", "in, bucket 0"):
        assert f"<title>{kind}" in svg
    assert f"| updates | {sum(span.track == 'host' for span in spans)} |" in drawing.page(facts, "x")


def test_the_site_loads_nothing_from_elsewhere() -> None:
    errors = pytest.importorskip("mkdocs.exceptions")
    hooks = load(DOCS / "site_hooks.py")
    page = type("Page", (), {"file": type("File", (), {"src_uri": "a.md"})})
    fine = '<a href="https://example.org">x</a><script src="a.js"></script><p>a | b</p>'
    assert hooks.on_post_page(fine, page, None) == fine
    for bad in (
        '<script src="https://example.org/a.js">',
        "<img alt=x src=//example.org/a.png>",
        '<link rel="stylesheet" href="https://example.org/a.css">',
        "<p>| a | b |</p>",
        "<p>```python",
    ):
        with pytest.raises(errors.PluginError):
            hooks.on_post_page(bad, page, None)


def test_names_in_tables_break_where_a_part_ends() -> None:
    pytest.importorskip("mkdocs")
    hooks = load(DOCS / "site_hooks.py")
    page = type("Page", (), {"file": type("File", (), {"src_uri": "a.md"})})
    found = hooks.on_post_page("<code>a.b_c</code><td><code>a.b_c</code> a.b</td>", page, None)
    assert found == "<code>a.b_c</code><td><code>a.<wbr>b_<wbr>c</code> a.b</td>"


def test_links_out_of_the_docs_lead_to_pages_of_the_site() -> None:
    pytest.importorskip("mkdocs")
    hooks = load(DOCS / "site_hooks.py")
    assert hooks.site_path("../benchmarks/results/x.md") == "benchmarks/results/x.md"
    assert hooks.site_path("../examples/engine.py") == "examples/engine.py.md"
    assert hooks.site_path("docs/zero.md#checkpoints") == "zero.md#checkpoints"
    (found,) = hooks.LINK.findall("see [results](../benchmarks/results/x.md) and [y](y.md)")
    assert found[1] == "../benchmarks/results/x.md"


def test_every_benchmark_is_listed_and_every_result_is_cited() -> None:
    folder = ROOT / "benchmarks"
    overview = (folder / "README.md").read_text()
    assert not [path for path in folder.iterdir() if path.suffix in (".py", ".sh") and f"`{path.name}`" not in overview]
    for target in re.findall(r"\]\(([^)#]+)", overview):
        assert (folder / target).exists(), target
    text = "".join(page.read_text() for page in PAGES) + overview
    results = list((folder / "results").iterdir())
    cited = {path.stem for path in results if path.name in text}  # data and pictures have the stem of their page
    assert not [path.name for path in results if path.stem not in cited]
