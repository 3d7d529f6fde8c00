# SPDX-License-Identifier: Apache-2.0
"""Pictures of the pages: they are what docs/pictures.py draws from the code, and every concept page shows one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"
CONCEPTS = [
    "how-overlap-works",
    "as-torch",
    "twin-flow",
    "offload",
    "weights-on-host",
    "zero",
    "3d",
    "sparse-attention",
    "onebit",
    "formats",
    "activations",
    "long-sequences",
    "checkpoints",
    "choosing",
    "plan",
]


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_what_the_code_draws(pictures: ModuleType) -> None:
    drawn = {pictures.file_name(draw): pictures.Picture(draw).svg() for draw in pictures.PAGES}
    assert set(drawn) == {path.name for path in pictures.FOLDER.iterdir()}
    for name, svg in drawn.items():
        assert (pictures.FOLDER / name).read_text() == svg, f"{name} is old. Run: python docs/pictures.py"


def test_every_concept_page_shows_its_pictures_and_says_what_is_in_them(pictures: ModuleType) -> None:
    assert {f"{page}.md" for page in CONCEPTS} == set(pictures.PAGES.values())
    for draw, page in pictures.PAGES.items():
        image = f"![{pictures.Picture(draw).description}](assets/pictures/{pictures.file_name(draw)})"
        assert f"\n{image}\n" in (DOCS / page).read_text(), f"{page} does not have the line {image}"


def test_every_picture_has_a_title_and_a_description(pictures: ModuleType) -> None:
    titles = set()
    for path in pictures.FOLDER.iterdir():
        root = ElementTree.fromstring(path.read_text())
        title, description = root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")
        assert title, path.name
        assert description, path.name
        titles.add(title)
    assert len(titles) == len(pictures.PAGES)


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_text_is_legible_in_both_themes(pictures: ModuleType) -> None:
    for theme in re.findall(r":root\{(.*?)\}", pictures.STYLE):
        colours = dict(re.findall(r"--(\w+):(#\w{6})", theme))
        assert min(contrast(colours["panel"], colours[text]) for text in ("ink", "soft")) >= 4.5
    fills = {fill for path in pictures.FOLDER.iterdir() for fill in re.findall(r'fill="(#\w+)"', path.read_text())}
    assert min(contrast("#ffffff", fill) for fill in fills) >= 4.5


def test_text_that_does_not_fit_is_an_error(pictures: ModuleType) -> None:
    def too_long(p: object) -> None:
        """A title

        A description
        """
        p.box(0, 0, 50, 20, pictures.BLUE, "does not fit in here")  # type: ignore[attr-defined]

    with pytest.raises(AssertionError, match="does not fit in"):
        pictures.Picture(too_long)


def test_search_works_without_a_server_and_without_a_network() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    config = yaml.safe_load(text)
    assert "offline" in config["plugins"]
    (script,) = config["extra"]["polyfills"]
    assert "iframe-worker" in script  # by this name the plugin knows that it need not load its own from a network
    assert (DOCS / script).is_file()
