"""The stock alternative to the controller's webhook, as it is committed below `templates/events`."""

from pathlib import Path

import yaml
from hera.workflows import models
from tiphys_controller.kubernetes import resume_once

from hera_pipelines.pipelines.resume_on_alert import RESUME_OBJECT_NAME
from tiphys.protocol.compiled_workflow import Manifest

FOLDER = Path(__file__).parents[3] / "templates" / "events"


def committed(name: str) -> Manifest:
    loaded: Manifest = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def test_heras_models_of_argo_know_every_field() -> None:
    binding, template = committed("resume-on-alert.yaml"), committed("resume.yaml")
    read = models.WorkflowEventBinding.model_validate(binding)
    assert read.model_dump(mode="json", by_alias=True, exclude_none=True) == binding
    kept = models.WorkflowTemplate.model_validate(template)
    assert kept.model_dump(mode="json", by_alias=True, exclude_none=True) == template


def test_the_binding_gives_the_template_what_it_asks_for() -> None:
    binding, template = committed("resume-on-alert.yaml"), committed("resume.yaml")
    assert (
        binding["spec"]["submit"]["workflowTemplateRef"]["name"] == template["metadata"]["name"] == RESUME_OBJECT_NAME
    )
    declared = {one["name"]: one for one in template["spec"]["arguments"]["parameters"]}
    given = {one["name"] for one in binding["spec"]["submit"]["arguments"]["parameters"]}
    assert given <= declared.keys()
    assert {name for name, one in declared.items() if "value" not in one} <= given


def test_the_template_writes_records_with_credentials_that_no_training_program_has() -> None:
    [container] = [one["container"] for one in committed("resume.yaml")["spec"]["templates"]]
    assert container["envFrom"] == [{"secretRef": {"name": "tiphys-control", "optional": True}}]
    runs, home = "ml", "tiphys-events"
    account = list(yaml.safe_load_all((FOLDER / "account.yaml").read_text()))
    assert {one["metadata"]["namespace"] for one in account} == {runs, home}
    assert {subject["namespace"] for one in account for subject in one.get("subjects", [])} == {home}


def test_the_template_runs_a_command_that_accepts_its_arguments() -> None:
    [container] = [one["container"] for one in committed("resume.yaml")["spec"]["templates"]]
    assert container["command"] == ["python", "-m", resume_once.__name__]
    options = resume_once._parser().parse_args(container["args"])
    assert (options.run, options.store) == ("{{workflow.parameters.run}}", "{{workflow.parameters.store}}")
