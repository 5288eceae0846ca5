"""The shape of the repository: what a stranger relies on to find a rule in one guess.

Which package may import which is held by import-linter (`make lint`); this is about sizes and names.
"""

import ast
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import tiphys_controller
import tiphys_plugin
from support.checks import pictures, storeys

ROOT = storeys.ROOT
PACKAGES = [
    folder
    for top in storeys.FOLDERS.values()
    for folder in (top, *sorted(path for path in top.rglob("*") if (path / "__init__.py").exists()))
]
MODULES = [path for top in storeys.FOLDERS.values() for path in sorted(top.rglob("*.py"))]
MAX_ENTRIES, MAX_LINES = 16, 500
GLOSSARY = ROOT / "docs" / "glossary.md"
TOUR = (ROOT / "docs" / "architecture.md").read_text()


def entries(folder: Path) -> list[str]:
    """Modules and packages of a folder, without its ``__init__`` and without data."""
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    return [*modules, *(path.parent.name for path in folder.glob("*/__init__.py"))]


def public_classes() -> Iterator[str]:
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name


def test_a_folder_has_no_more_entries_than_a_reader_takes_in() -> None:
    found = {folder: sorted(entries(folder)) for folder in PACKAGES}
    assert not {folder: names for folder, names in found.items() if len(names) > MAX_ENTRIES}


def test_a_folder_says_in_a_sentence_what_it_is_for() -> None:
    docs = {folder: ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) for folder in PACKAGES}
    assert not {folder: doc for folder, doc in docs.items() if not (doc and doc.split("\n\n")[0].endswith("."))}


def test_no_module_is_longer_than_one_idea() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_a_public_class_name_means_one_thing() -> None:
    assert not {name: count for name, count in Counter(public_classes()).items() if count > 1}


@pytest.mark.parametrize("package", [tiphys_controller, tiphys_plugin], ids=lambda package: package.__name__)
def test_the_types_of_names_that_are_imported_on_first_use_are_those_of_their_modules(package: ModuleType) -> None:
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(package))) if isinstance(node, ast.ImportFrom)]
    typed = {str(node.module): tuple(alias.name for alias in node.names) for node in imports}
    offered = {f"{package.__name__}.{module}": names for module, names in package._HOMES.items()}
    assert offered == {module: names for module, names in typed.items() if module.startswith(package.__name__)}
    assert all(getattr(package, name) is not None for names in offered.values() for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Trian'"):
        package.Trian  # noqa: B018


def test_the_picture_of_the_storeys_is_current() -> None:
    assert storeys.PICTURE.read_text() == storeys.svg(), "run `make golden`"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_of_the_pages_is_current_and_one_of_them_shows_it(name: str) -> None:
    assert (pictures.IMAGES / name).read_text() == pictures.PICTURES[name](), "run `make golden`"
    assert any(f"images/{name})" in page.read_text() for page in (ROOT / "docs").rglob("*.md"))


WAYS = TOUR.split("\n## Ways through the code\n")[1].split("\n## ")[0].split("\n### ")[1:]


def test_the_tour_gives_the_number_of_entries_that_is_checked() -> None:
    assert f"holds at most {MAX_ENTRIES} entries" in TOUR


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.partition(":")[0])
def test_a_way_through_the_code_names_modules_and_functions_that_exist(way: str) -> None:
    code = re.findall(r"`([^`]+)`", way.partition("\n")[2])
    places = {path: [module for module in MODULES if module.match(path)] for path in code if path.endswith(".py")}
    assert not {path: found for path, found in places.items() if len(found) != 1}

    text = "".join(found[0].read_text() for found in places.values())
    named = re.compile(r"(?:\w+\.)?(\w+)\(\)|([A-Z]\w*[a-z]\w+)")
    names = [match[1] or match[2] for word in code if (match := named.fullmatch(word))]
    assert names
    assert not [name for name in names if not re.search(rf"\b(def|class) {name}\b", text)]


def glossary() -> list[tuple[str, str]]:
    """Words of the glossary, each with the path that it gives."""
    return re.findall(r"^\| \*\*([^*]+)\*\* \|.*\| `([\w/.]+)` \|$", GLOSSARY.read_text(), re.MULTILINE)


def test_a_word_of_the_glossary_is_found_by_file_name_alone() -> None:
    found = glossary()
    assert len(found) >= 30
    lost = {}
    for word, path in found:
        named = re.sub(r"[^a-z]", "", path.lower())
        stem = re.sub(r"[^a-z]", "", word.lower())
        if not (ROOT / path).exists() or stem.removesuffix("s") not in named:
            lost[word] = path
    assert not lost


def test_a_question_of_a_stranger_is_answered_by_file_name_alone() -> None:
    rows = re.findall(
        r"^\| (.*\*\*.*) \| `([\w/.]+)` \|$", GLOSSARY.read_text().split("\n## Questions\n")[1], re.MULTILINE
    )
    assert len(rows) >= 10
    wrong = [
        (question, path)
        for question, path in rows
        if not (ROOT / path).exists() or not all(word in path for word in re.findall(r"\*\*(\w+)\*\*", question))
    ]
    assert not wrong


NO_SUBJECT = re.compile(
    r"test_(?:it|its|this|that|these|those|they|there|what|whatever|who|whom|whose|whoever|which|where|how|"
    r"one|ones|two|another|others|such|some|each|both|all|none|nothing|nobody|somebody|something|someone|"
    r"anybody|anything|anyone|everybody|everything|everyone)(?:_|$)"
)
"""Beginnings of the name of a test that say of what it speaks only later, or never."""

DEFINED_TEST = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)


def named_tests() -> Iterator[tuple[str, str]]:
    """Every test, with the module that has it."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in DEFINED_TEST.findall(path.read_text()):
            yield name, str(path.relative_to(ROOT))


def test_names_of_tests_begin_with_their_subject() -> None:
    found = list(named_tests())
    assert len(found) > 1000
    assert not [f"{path}::{name}" for name, path in found if NO_SUBJECT.match(name)], "begin with a noun of the product"


def test_names_without_a_subject_are_noticed() -> None:
    assert NO_SUBJECT.match("test_who_has_no_room_takes_it_from_nobody")
    assert NO_SUBJECT.match("test_what_is_wrong_is_named")
    assert not NO_SUBJECT.match("test_a_fenced_attempt_deletes_nothing")
    assert not NO_SUBJECT.match("test_items_keep_their_order")


BUDGETS = ROOT / "docs" / "line_budgets.toml"
MOST_SPARE_LINES, MOST_SPARE_SHARE = 60, 0.02


def capability(path: Path) -> str:
    """The folder of a package that a module is in; the package itself for a module beside these folders."""
    package = next(top for top in storeys.FOLDERS.values() if path.is_relative_to(top))
    inner = path.relative_to(package).parts
    return "/".join((package.name, *inner[:1])) if len(inner) > 1 else package.name


def lines_of_capabilities() -> Counter[str]:
    lines: Counter[str] = Counter()
    for path in MODULES:
        lines[capability(path)] += len(path.read_text().splitlines())
    return lines


def test_capabilities_keep_their_budgets_of_lines() -> None:
    budgets, lines = tomllib.loads(BUDGETS.read_text())["lines"], lines_of_capabilities()
    assert budgets.keys() == lines.keys()
    assert not {name: (count, budgets[name]) for name, count in lines.items() if count > budgets[name]}, (
        "what comes pushes something out: make room in the capability, or move its budget from another one and say why"
    )


def test_a_budget_that_a_cut_has_made_too_large_is_lowered() -> None:
    budgets, lines = tomllib.loads(BUDGETS.read_text())["lines"], lines_of_capabilities()
    spare = {name: max(MOST_SPARE_LINES, MOST_SPARE_SHARE * count) for name, count in lines.items()}
    assert not {name: count for name, count in lines.items() if budgets[name] - count > spare[name]}
