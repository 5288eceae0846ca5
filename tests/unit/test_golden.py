"""What compile emits for the examples, held by committed files.

A change that is meant is accepted by ``make golden``, and reviewed as a diff of
what users will submit.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from hera_pipelines import Pipeline, load_pipeline
from hera_pipelines.compile import cron_workflow, to_workflow_yaml, workflow_template
from hera_pipelines.pipelines.resume_on_alert import resume_binding, resume_template
from hera_pipelines.pipelines.start_on_object import object_event_source, object_sensor
from tiphys.protocol.compiled_workflow import Manifest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
GOLDEN = ROOT / "examples" / "golden"
TEMPLATES = ROOT / "templates"
ACCEPT = os.environ.get("TIPHYS_GOLDEN") == "1"


def hold(golden: Path, text: str) -> None:
    """Compare ``text`` with the committed file as documents, or accept it."""
    if ACCEPT:
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert golden.exists(), f"{golden.relative_to(ROOT)} is missing; run `make golden` and review it"
    assert _parsed(text) == _parsed(golden.read_text()), "if this is meant, run `make golden` and read the diff"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_compiles_to_its_golden_file(example: Path) -> None:
    hold(GOLDEN / f"{example.stem}.yaml", load_pipeline(example).to_yaml())


def test_the_ready_pipeline_is_committed_as_a_workflow_template() -> None:
    hold(TEMPLATES / "train.yaml", to_workflow_yaml(workflow_template(_ready(), "train")))


def test_the_ready_pipeline_is_committed_as_a_cron_workflow() -> None:
    nightly = cron_workflow(_ready(), "train-nightly", {"schedules": ["0 2 * * *"]})
    hold(TEMPLATES / "train-nightly.yaml", to_workflow_yaml(nightly))


def test_the_ready_sweep_is_committed_as_a_workflow_template() -> None:
    hold(TEMPLATES / "sweep.yaml", to_workflow_yaml(workflow_template(_ready("11-ready-sweep"), "sweep")))


def test_resuming_by_events_of_argo_is_committed() -> None:
    template = resume_template("registry.example.com/tiphys:0.1.0", "s3://ml-runs/tiphys")
    hold(TEMPLATES / "events" / "resume.yaml", to_workflow_yaml(template))
    hold(TEMPLATES / "events" / "resume-on-alert.yaml", to_workflow_yaml(resume_binding("RunFailed")))


def test_notifications_by_argo_events_are_committed() -> None:
    url = "http://tiphys-controller.tiphys.svc:7243/v1/storage-events"
    hold(TEMPLATES / "events" / "objects-source.yaml", to_workflow_yaml(object_event_source("tiphys-objects")))
    hold(TEMPLATES / "events" / "objects-sensor.yaml", to_workflow_yaml(object_sensor(url, "tiphys-storage-events")))


def test_a_pipeline_with_a_trigger_is_committed_as_a_workflow_template() -> None:
    compiled = workflow_template(_ready("20-start-on-object"), "on-object")
    hold(TEMPLATES / "events" / "start-on-object.yaml", to_workflow_yaml(compiled))


def test_every_golden_file_belongs_to_an_example() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == {path.stem for path in EXAMPLES}


def _ready(example: str = "07-ready-pipeline") -> Manifest:
    pipeline = load_pipeline(ROOT / "examples" / f"{example}.py")
    assert isinstance(pipeline, Pipeline)
    return pipeline.compile()


def _parsed(text: str) -> Any:
    return yaml.load(text, yaml.CSafeLoader)
