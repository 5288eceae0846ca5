"""`tiphys compile --as`: one pipeline as Workflow, template or schedule, each of which the services can read.

| `--as`                                     | name       | service account | schedule       |
|--------------------------------------------|------------|-----------------|----------------|
| left out, workflow                         | refused    | refused         | refused        |
| workflowtemplate, clusterworkflowtemplate  | `--name`   | given, chart's  | refused        |
| cronworkflow                               | `--name`   | given, chart's  | given, its own |
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hera_pipelines.cli import main
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, read_workflow_parameters
from tiphys.recording.run_binding import submitted_manifest

ROOT = Path(__file__).parents[4]
READY, NIGHTLY = str(ROOT / "examples" / "07-ready-pipeline.py"), str(ROOT / "examples" / "05-cron.py")
FUNCTIONS = str(ROOT / "examples" / "02-script-functions.py")
AT_TWO = ("--schedule", "0 2 * * *")

Compile = Callable[..., Manifest]


@pytest.fixture
def compiled(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compile:
    """The document that the command prints outside of a git checkout."""
    monkeypatch.setattr("hera_pipelines.cli.author.compile.read_git_commit", lambda _: "")

    def run(*arguments: str) -> Manifest:
        assert main(["compile", *arguments]) == 0
        manifest: Manifest = yaml.safe_load(capsys.readouterr().out)
        return manifest

    return run


def as_argo_starts(document: Manifest) -> Manifest:
    """The Workflow that Argo makes of a template or schedule, as the services read it."""
    spec = document["spec"]
    inherited = {"name": "made", "uid": "u1", **spec.get("workflowMetadata", {})}
    if document["kind"] == "CronWorkflow":
        return submitted_manifest({"metadata": inherited, "spec": spec["workflowSpec"]})
    live = {"spec": {"workflowTemplateRef": {}}, "status": {"storedWorkflowTemplateSpec": spec}}
    return submitted_manifest({"metadata": inherited, **live})


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("--as", "workflowtemplate"), "WorkflowTemplate"),
        (("--as", "clusterworkflowtemplate"), "ClusterWorkflowTemplate"),
        (("--as", "cronworkflow", *AT_TWO), "CronWorkflow"),
    ],
)
def test_the_services_read_a_workflow_of_each_kind(compiled: Compile, arguments: tuple[str, ...], kind: str) -> None:
    workflow = compiled(FUNCTIONS)
    document = compiled(FUNCTIONS, *arguments, "-p", "lr=0.3")
    started = as_argo_starts(document)

    assert (document["kind"], document["metadata"]["name"]) == (kind, "functions")
    pipeline = CompiledPipeline.from_manifest(started)
    assert pipeline.steps == CompiledPipeline.from_manifest(workflow).steps
    assert (pipeline.name, pipeline.store) == ("functions", "s3://ml-runs/tiphys")
    assert read_workflow_parameters(started)["lr"] == "0.3"
    assert started["spec"]["serviceAccountName"] == "tiphys-workflow", "a schedule starts without `argo submit`"
    assert "serviceAccountName" not in workflow["spec"]


def test_the_command_makes_the_committed_template(compiled: Compile) -> None:
    committed = yaml.safe_load((ROOT / "templates" / "train.yaml").read_text())
    assert compiled(READY, "--as", "workflowtemplate", "--name", "train") == committed


def test_the_command_makes_the_committed_schedule(compiled: Compile) -> None:
    committed = yaml.safe_load((ROOT / "templates" / "train-nightly.yaml").read_text())
    assert compiled(READY, "--as", "cronworkflow", "--name", "train-nightly", *AT_TWO) == committed


def test_a_cron_pipeline_keeps_what_no_option_changes(compiled: Compile) -> None:
    own = compiled(NIGHTLY)["spec"]
    moved = compiled(NIGHTLY, "--as", "cronworkflow", "--timezone", "UTC", "--service-account", "trainer")["spec"]

    assert (moved["schedules"], moved["timezone"]) == (own["schedules"], "UTC")
    assert moved["concurrencyPolicy"] == "Forbid"
    assert moved["workflowSpec"] == {**own["workflowSpec"], "serviceAccountName": "trainer"}
    assert compiled(NIGHTLY, "--as", "workflow")["kind"] == "Workflow"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--as", "cronworkflow"), "CronWorkflow 'train' has no schedule; give one, such as '0 2 * * *'"),
        (AT_TWO, "--schedule: it is for a template or schedule; add --as"),
        (("--as", "workflow", "--name", "x"), "--name: it is for a template or schedule"),
        (("--as", "workflowtemplate", "--timezone", "UTC"), "--timezone: it is for a schedule; add --as cronworkflow"),
        (("--as", "cronworkflow", "--schedule", "0 25 * * *"), "schedule '0 25 * * *' is not one that Argo runs"),
        (("--as", "cronworkflow", *AT_TWO, "--timezone", "Europe/Berln"), "did you mean 'Europe/Berlin'?"),
    ],
)
def test_an_option_that_cannot_take_effect_is_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", READY, *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("items", "is_warned"), [(10000, True), (100, False)])
def test_a_pipeline_that_argo_cannot_store_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], items: int, is_warned: bool
) -> None:
    file = tmp_path / "many.py"
    file.write_text(
        "from hera_pipelines import Pipeline, Step\n"
        "prep = Step(name='prep', image='alpine', command=['true'])\n"
        "with Pipeline('many', store='s3://ml-runs/tiphys') as pipeline:\n"
        f"    prep(with_sequence={{'count': '{items}'}})\n"
    )

    assert main(["compile", str(file)]) == 0

    shown = capsys.readouterr()
    assert ("warning: the Workflow will have some 20,006 nodes" in shown.err) == is_warned
    assert yaml.safe_load(shown.out)["kind"] == "Workflow"
