"""The pages lead to things that exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
MODULE = re.compile(r"`([\w-]+/[\w/-]+\.py)`")
TARGET = re.compile(r"(?:`|^[$#] )make ([a-z][a-z-]+)\b(?!-)", re.MULTILINE)
VARIABLE = re.compile(r"`(TIPHYS_[A-Z_]+)(?:=[^`]*)?`")
PATH = re.compile(r"`((?:tests|tiphys|hera_pipelines|plugin|controller|examples|docs)/[\w./-]+)`")


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_pages_are_found() -> None:
    assert {page.name for page in PAGES} >= {"README.md", "architecture.md", "guarantees.md", "CONTRIBUTING.md"}


def test_every_link_resolves() -> None:
    for page in PAGES:
        for target, anchor in LINK.findall(page.read_text()):
            meant = (page.parent / target).resolve() if target else page
            assert meant.exists(), (page, target)
            assert not anchor or anchor in anchors(meant), (page, anchor)


@pytest.mark.parametrize("folder", ["contracts", "decisions"])
def test_the_tour_leads_to_every_contract_and_decision(folder: str) -> None:
    tour = (ROOT / "docs" / "architecture.md").read_text()
    pages = [page.name for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    assert pages
    assert not [name for name in pages if f"({folder}/{name})" not in tour]


def test_every_path_that_is_named_exists() -> None:
    named = [(page, path) for page in PAGES for path in PATH.findall(page.read_text())]
    assert not [(page, path) for page, path in named if not (ROOT / path).exists()]


def tracked(*patterns: str) -> list[str]:
    return subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def test_every_module_that_is_named_by_the_end_of_its_path_exists() -> None:
    modules = tracked("*.py")
    named = {path for page in PAGES if page.name != "CHANGELOG.md" for path in MODULE.findall(page.read_text())}
    assert len(named) > 50
    assert not [path for path in sorted(named) if not any(f"/{module}".endswith(f"/{path}") for module in modules)]


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES if page.name != "CHANGELOG.md" for name in TARGET.findall(page.read_text())}
    assert len(named) > 20
    assert not named - targets


def test_every_variable_that_is_named_is_read_somewhere() -> None:
    text = "".join((ROOT / path).read_text() for path in tracked("*.py", "Makefile", ".ci/*", "charts/*.yaml"))
    named = {name for page in PAGES if page.name != "CHANGELOG.md" for name in VARIABLE.findall(page.read_text())}
    assert len(named) >= 15
    assert not [name for name in sorted(named) if name not in text and re.sub(r"_[A-Z]+$", "_", name) not in text]


def test_every_example_names_a_bucket_that_s3_would_create() -> None:
    places = ("*.md", "examples", "templates", "charts", "hera_pipelines", "tiphys", "plugin", "controller")
    shown = subprocess.run(
        ["git", "grep", "-ohE", "(s3://|arn:aws:s3:::)[^/ `\"'<>)]+", "--", *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names = {re.sub(r"^(s3://|arn:aws:s3:::)", "", url).rstrip(",.;:") for url in shown}
    buckets = {name for name in names if name[:1].isalnum()}  # the others are placeholders, as in s3://{bucket}
    assert "ml-runs" in buckets
    # Source: Amazon S3 User Guide, "General purpose bucket naming rules".
    assert not {name for name in buckets if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", name)}


INSTALLS = re.compile(r"(?:pip3?|uv) (?:install|add|pip install|download)\b[^\n`]*\btiphys\b[^\n`]*")
OF_ONES_OWN = re.compile(r"\.whl|--index-url|--no-index")


def test_pages_install_no_name_that_an_index_does_not_have_from_us() -> None:
    files = tracked("*.md", "*.py", "*.ipynb", "*.yaml", "*.toml", "*Dockerfile", "charts/*")
    told = [
        line
        for file in files
        if not file.startswith("tests/") and file != "CHANGELOG.md"
        for line in INSTALLS.findall((ROOT / file).read_text())
    ]
    assert len(told) >= 3, "the wheel is installed by its file, or from an index of one's own"
    assert not [line for line in told if not OF_ONES_OWN.search(line)]
    texts = ("pip install 'tiphys[otel]'", "uv add tiphys", "pip install x")
    assert [bool(INSTALLS.search(text)) for text in texts] == [True, True, False]
