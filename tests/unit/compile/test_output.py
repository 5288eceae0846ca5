"""The compiled Workflow as CronWorkflow and WorkflowTemplate, and as text."""

import pytest
import yaml
from support.builders.authored_workflows import step, workflow

from hera_pipelines.compile import CompileOptions, compile_workflow, cron_workflow, to_workflow_yaml, workflow_template
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest


@pytest.fixture
def compiled() -> Manifest:
    return compile_workflow(workflow(step()), CompileOptions(store="s3://ml-runs/tiphys"))


def test_workflows_of_a_schedule_have_the_annotations_of_the_plugin(compiled: Manifest) -> None:
    cron = cron_workflow(compiled, "nightly", {"schedules": ["0 2 * * *"], "timezone": "UTC"})

    assert cron["metadata"]["name"] == "nightly"
    assert "generateName" not in cron["metadata"]
    handed_on = cron["spec"]["workflowMetadata"]
    assert handed_on["labels"] == {"tiphys.dev/pipeline": "digits"}
    assert handed_on["annotations"] == compiled["metadata"]["annotations"]
    assert handed_on["annotations"]["tiphys.dev/store"] == "s3://ml-runs/tiphys"
    assert cron["spec"]["workflowSpec"] == compiled["spec"]
    assert (cron["spec"]["concurrencyPolicy"], cron["spec"]["timezone"]) == ("Forbid", "UTC")


def test_the_author_may_let_runs_overlap(compiled: Manifest) -> None:
    cron = cron_workflow(compiled, "nightly", {"schedules": ["0 2 * * *"], "concurrencyPolicy": "Allow"})

    assert cron["spec"]["concurrencyPolicy"] == "Allow"


def test_a_schedule_is_required(compiled: Manifest) -> None:
    with pytest.raises(UsageError, match="'nightly' has no schedule"):
        cron_workflow(compiled, "nightly", {})


def test_a_name_that_leaves_no_room_for_a_time_is_refused(compiled: Manifest) -> None:
    schedule = {"schedules": ["@daily"]}
    assert cron_workflow(compiled, "n" * 52, schedule)["metadata"]["name"] == "n" * 52
    with pytest.raises(UsageError, match="name of 53 characters, and Argo starts none with more than 52"):
        cron_workflow(compiled, "n" * 53, schedule)


def test_a_workflow_template_hands_its_description_on(compiled: Manifest) -> None:
    template = workflow_template(compiled, "digits")

    assert (template["kind"], template["metadata"]["name"]) == ("WorkflowTemplate", "digits")
    assert template["spec"]["workflowMetadata"]["annotations"] == compiled["metadata"]["annotations"]
    assert template["spec"]["templates"] == compiled["spec"]["templates"]
    assert "workflowMetadata" not in compiled["spec"], "the Workflow itself is not changed"


def test_text_is_the_same_document(compiled: Manifest) -> None:
    assert yaml.safe_load(to_workflow_yaml(compiled)) == compiled


def test_text_does_not_depend_on_the_order_of_keys(compiled: Manifest) -> None:
    turned = dict(reversed(compiled.items()))

    assert to_workflow_yaml(turned) == to_workflow_yaml(compiled)


def test_text_begins_with_identity_and_ends_with_templates() -> None:
    manifest = {"spec": {"templates": [], "entrypoint": "main"}, "kind": "Workflow", "apiVersion": "v1"}

    assert to_workflow_yaml(manifest) == "apiVersion: v1\nkind: Workflow\nspec:\n  entrypoint: main\n  templates: []\n"


@pytest.mark.parametrize("value", ["y", "N", "on", "2024-01-01", "1e3", "~", "{{item}}", "a: b", "line\nline\n"])
def test_values_survive_readers_of_either_yaml(value: str) -> None:
    text = to_workflow_yaml({"value": value})

    assert yaml.safe_load(text) == {"value": value}
    assert value not in ("y", "N") or f"'{value}'" in text


def test_a_program_is_readable_in_the_text() -> None:
    assert to_workflow_yaml({"source": "import os\nprint(os)\n"}) == "source: |\n  import os\n  print(os)\n"
