"""What can be told of the chart without rendering it: that it says the same as the code and as its own papers."""

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.checks import chart_values
from support.checks.chart import CHART, CI_VALUES, DASHBOARDS, ROOT, dashboard_expressions

import tiphys

ACCEPT = os.environ.get("TIPHYS_GOLDEN") == "1"
_METRIC = re.compile(r"\btiphys_[a-z0-9_]+")
_DECLARED = re.compile(r"\"(tiphys_[a-z0-9_]+)\"")
_SUFFIX = re.compile(r"_(total|bucket|count|sum)$")


def test_chart_and_program_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == tiphys.__version__ == project["version"]


def test_the_chart_holds_the_compiled_templates() -> None:
    """A chart holds all its files: links out of it do not survive being fetched from git or packaged elsewhere."""
    packaged = CHART / "files" / "workflows"
    compiled = {path.name: path.read_text() for path in (ROOT / "templates").glob("*.yaml")}
    if ACCEPT:
        for name, text in compiled.items():
            (packaged / name).write_text(text)
    assert {path.name: path.read_text() for path in packaged.iterdir()} == compiled, "run `make golden`, twice"


def test_every_value_says_what_it_is_for() -> None:
    documented = chart_values.documented()
    for leaf in chart_values.leaves(chart_values.defaults()):
        assert any(leaf == path or leaf.startswith(f"{path}.") for path in documented), f"{leaf} has no `# --` comment"


def test_the_readme_of_the_chart_lists_every_value() -> None:
    readme = CHART / "README.md"
    expected = chart_values.with_table(readme.read_text())
    if ACCEPT:
        readme.write_text(expected)
    assert readme.read_text() == expected, "if this is meant, run `make golden` and read the diff"


def test_the_schema_and_the_defaults_have_the_same_keys() -> None:
    """A key without schema is refused, and one that only the schema knows has no default and no word about it."""
    assert set(_paths(_schema(), chart_values.defaults())) - {"global"} == set(_keys(chart_values.defaults()))


def test_the_schema_lets_no_typo_pass() -> None:
    for path, node in _objects(_schema()):
        assert "additionalProperties" in node, f"{path} takes anything"
        if "properties" in node:
            assert node["additionalProperties"] is False, path


def test_alerts_and_dashboard_use_only_metrics_that_exist() -> None:
    used = set(_METRIC.findall((CHART / "templates" / "alerts.yaml").read_text()))
    used |= {name for expression in dashboard_expressions() for name in _METRIC.findall(expression)}
    declared = {name for file in _sources() for name in _DECLARED.findall(file.read_text())}
    assert used
    assert {_SUFFIX.sub("", name) for name in used} <= {_SUFFIX.sub("", name) for name in declared}


def test_every_alert_has_a_runbook_and_the_other_way_round() -> None:
    alerts = re.findall(r"- alert: (\w+)", (CHART / "templates" / "alerts.yaml").read_text())
    pages = re.findall(r"^### (\w+)$", (CHART.parents[1] / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert sorted(pages) == sorted(alerts)


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_asks_questions_of_a_chosen_data_source(file: Path) -> None:
    panels = json.loads(file.read_text())["panels"]
    assert all(panel["title"].endswith("?") for panel in panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {target["datasource"]["uid"] for panel in panels for target in panel["targets"]} == {"${datasource}"}


@pytest.mark.parametrize("file", CI_VALUES, ids=lambda file: file.stem)
def test_values_for_the_tests_say_why_they_are_there(file: Path) -> None:
    assert file.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("url", "is_valid"),
    [
        ("", True),
        ("s3://ml-runs/{namespace}/tiphys", True),
        ("gs://ml_runs-{namespace}/tiphys", True),
        ("az://mlruns/runs-{namespace}/tiphys", True),
        ("az://mlruns/runs", True),
        ("az://mlruns", False),
        ("az://mlruns/", False),
        ("gs://", False),
        ("https://mlruns.blob.core.windows.net/runs", False),
        ("file:///runs", False),
    ],
)
def test_the_store_is_in_a_bucket_of_a_cloud(url: str, is_valid: bool) -> None:
    pattern = _schema()["properties"]["store"]["properties"]["url"]["pattern"]

    assert bool(re.search(pattern, url)) is is_valid


def _schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return loaded


def _sources() -> Iterator[Path]:
    for package in ("plugin", "controller", "tiphys"):
        yield from (ROOT / package).rglob("*.py")


def _keys(values: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of all keys."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{path}.{key}".lstrip(".")
            yield from _keys(value, f"{path}.{key}")


def _paths(node: dict[str, Any], values: Any, path: str = "") -> Iterator[str]:
    """The same of a schema; where it leaves the keys to the user, those of the defaults."""
    node = _resolved(node)
    for key in node.get("properties") or (values if isinstance(values, dict) else {}):
        if isinstance(values, dict) and not values:
            return  # nothing by default: what a user may write is not spelled out there
        below = (node.get("properties") or {}).get(key) or node.get("additionalProperties")
        yield f"{path}.{key}".lstrip(".")
        yield from _paths(below, (values or {}).get(key), f"{path}.{key}")


def _resolved(node: Any) -> dict[str, Any]:
    if not isinstance(node, dict):
        return {}
    reference = node.get("$ref", "").rpartition("/")[2]
    resolved: dict[str, Any] = _schema()["definitions"][reference] if reference else node
    return resolved


def _objects(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All parts of a schema that describe objects."""
    if isinstance(node, dict):
        if node.get("type") == "object" or "properties" in node:
            yield path, node
        for key, below in node.items():
            yield from _objects(below, f"{path}/{key}")
    elif isinstance(node, list):
        for below in node:
            yield from _objects(below, path)
