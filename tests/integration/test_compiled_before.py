"""A Workflow that an earlier version compiled, to groups of steps, runs to its end and is resumed.

``compiled_to_groups.yaml`` is the tiny pipeline as that version compiled it; it is never made anew.
"""

from pathlib import Path

import pytest
import yaml
from support import tiny
from tiphys_controller import resume_run, start_run

from hera_pipelines.local.run_session import LocalSession
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import DirectoryStore, read_all_attempts

_COMPILED = Path(__file__).with_name("compiled_to_groups.yaml")


def manifest(code: Path, store: DirectoryStore, fail: str) -> Manifest:
    text = _COMPILED.read_text().replace("@CODE@", str(code)).replace("@STORE@", store.url)
    found: Manifest = yaml.safe_load(text)
    assert any("steps" in template for template in found["spec"]["templates"]), "the test is about groups of steps"
    for parameter in found["spec"]["arguments"]["parameters"]:
        if parameter["name"] == "fail":
            parameter["value"] = fail
    return found


def outcomes(store: DirectoryStore) -> dict[str, list[str]]:
    attempts = read_all_attempts(store, "r")
    return {step: [str(one.end and one.end.outcome) for one in tries] for step, tries in attempts.items()}


@pytest.mark.parametrize(("fail", "phase", "outcome"), [("no", "Succeeded", "done"), ("yes", "Failed", "failed")])
def test_a_workflow_of_groups_finishes_and_is_resumed(tmp_path: Path, fail: str, phase: str, outcome: str) -> None:
    code, store = tmp_path / "code", DirectoryStore(tmp_path / "store")
    tiny.write(code)

    with LocalSession(store, tmp_path / "state", speed=50.0, code=code) as session:
        started = start_run(store, session, manifest(code, store, fail), "r")
        assert session.run(started.workflow_name) == phase
        assert outcomes(store) == {"prepare": ["done"], "fit": ["done"], "report": [outcome]}
        if fail == "yes":
            resumed = resume_run(store, session, "r")
            assert session.run(resumed.workflow_name) == phase, "its parameter still says so"
            assert outcomes(store) == {"prepare": ["done"], "fit": ["done"], "report": [outcome, outcome]}
            assert tiny.ran(code) == ["prepare", "fit", "report", "report"]
