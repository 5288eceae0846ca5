"""The versions of Argo that the guide names are those that ``tests/argo`` passed on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.checks.argo_versions import (
    GUIDE,
    VERSIONS,
    ModeOutcome,
    add_outcomes,
    guide_with_versions,
    read_versions,
    versions_table,
    write_versions,
)
from support.checks.chart import ROOT
from tiphys_controller.doctor.checks_argo import FIRST_AGENT_VERSION, FIRST_VERSIONS, is_supported
from tiphys_controller.doctor.observed import ArgoVersion, PluginMode

WHOLE_RUN = "test_whole_run"
COMPILED = sorted([*(ROOT / "examples" / "golden").glob("*.yaml"), *(ROOT / "templates").rglob("*.yaml")])
SINCE_4_1 = {"executorPlugins", "pendingTimeout", "podResources", "resourceClaims"}
"""Fields of Workflows and templates that Argo 3.7 and 4.0 do not know (``workflow_types.go`` of each)."""
UNTIL_3_7 = {"mutex", "podPriority", "schedule", "semaphore"}
"""Fields that Argo 4.0 removed."""


def fields(document: object) -> Iterator[str]:
    """Names of all fields of a document."""
    children = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    yield from document if isinstance(document, dict) else ()
    for child in children:
        yield from fields(child)


def passed(module: str, mode: str = "sidecar", tests: int = 2) -> dict[ModeOutcome, int]:
    return {ModeOutcome(mode, module, "passed"): tests}


def test_the_guide_has_the_versions_that_were_tested() -> None:
    text = guide_with_versions(read_versions(VERSIONS))
    if os.environ.get("TIPHYS_GOLDEN") == "1":
        GUIDE.write_text(text)
    assert GUIDE.read_text() == text, "run `make golden`"


def test_supported_minor_versions_were_tested_in_each_of_their_modes() -> None:
    tested = {
        (ArgoVersion(*map(int, version.split("."))), PluginMode(mode))
        for version, modes in read_versions(VERSIONS).items()
        for mode, modules in modes.items()
        if WHOLE_RUN in modules
    }
    supported = {(first[:2], mode) for first in FIRST_VERSIONS for mode in PluginMode if is_supported(first, mode)}
    assert {(version[:2], mode) for version, mode in tested} == supported
    assert all(is_supported(version, mode) for version, mode in tested)
    assert (FIRST_AGENT_VERSION[:2], PluginMode.AGENT) in supported


@pytest.mark.parametrize("file", COMPILED, ids=lambda file: file.stem)
def test_no_compiled_field_is_missing_in_a_supported_version(file: Path) -> None:
    assert not set(fields(list(yaml.load_all(file.read_text(), yaml.CSafeLoader)))) & (SINCE_4_1 | UNTIL_3_7)


def test_a_field_deep_in_a_document_is_seen() -> None:
    assert "executorPlugins" in fields({"spec": {"executorPlugins": [{"metadata": {"name": "tiphys"}}]}})


def test_a_further_run_adds_its_modules_and_replaces_older_ones() -> None:
    first = add_outcomes({}, "4.1.2", passed("test_one") | passed("test_two"))
    again = add_outcomes(first, "4.1.2", passed("test_two", tests=3) | passed("test_one", "agent"))
    assert again == {
        "4.1.2": {
            "agent": {"test_one": {"passed": 2, "skipped": 0}},
            "sidecar": {"test_one": {"passed": 2, "skipped": 0}, "test_two": {"passed": 3, "skipped": 0}},
        }
    }


def test_a_newer_patch_takes_the_place_of_the_earlier_one() -> None:
    versions = add_outcomes(add_outcomes({}, "4.1.2", passed("test_one")), "4.0.10", passed("test_one"))
    assert set(add_outcomes(versions, "4.1.3", passed("test_two"))) == {"4.0.10", "4.1.3"}


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_module_that_did_not_pass_is_left_out(outcome: str) -> None:
    before = add_outcomes({}, "4.1.2", passed("test_one") | passed("test_two"))
    ended = {ModeOutcome("sidecar", "test_two", outcome): 1} | (passed("test_two") if outcome == "failed" else {})
    assert set(add_outcomes(before, "4.1.2", ended)["4.1.2"]["sidecar"]) == {"test_one"}


def test_a_version_on_which_nothing_passed_is_left_out() -> None:
    before = add_outcomes({}, "4.1.2", passed("test_one"))
    assert add_outcomes(before, "4.0.10", {ModeOutcome("sidecar", "test_one", "failed"): 1}) == before


def test_the_table_counts_tests_and_names_modules_newest_version_first(tmp_path: Path) -> None:
    skipped = {ModeOutcome("sidecar", "test_resume", "skipped"): 1}
    versions = add_outcomes({}, "4.0.10", passed("test_resume", tests=5) | skipped | passed(WHOLE_RUN))
    versions = add_outcomes(versions, "4.1.2", passed(WHOLE_RUN, "agent"))
    write_versions(tmp_path / "versions.json", versions)
    assert read_versions(tmp_path / "versions.json") == versions
    assert versions_table(versions).splitlines()[2:] == [
        "| 4.1.2 | `agent` | 2 | 0 | `whole_run` |",
        "| 4.0.10 | `sidecar` | 7 | 1 | `resume`, `whole_run` |",
    ]
