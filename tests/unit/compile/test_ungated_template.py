"""The shape of a `Step` without a gate: the author's template, with places for its outputs.

| of the author | becomes |
|---|---|
| task, with all its fields | the same; a fan-out passes its item on |
| template that several tasks call | one template |
| output artifact | the same below the uid of the Workflow and the name of the pod |
| output parameter, references to it | the same |
| input artifact | the same, readable for all users |
| `retryStrategy` | the same; without one, one where the policy repeats anything |
| any other field of the template | the same |
"""

import copy
import json
from typing import Any

import pytest
from support.builders.authored_workflows import (
    STORE,
    artifact,
    by_name,
    gated,
    output_parameter,
    parameters,
    plain,
    settings,
    step,
    task,
    train,
    workflow,
)

from hera_pipelines import GKE_SPOT, Mlflow, Wandb
from hera_pipelines.compile import CompileOptions, StepSettings, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.step_spec import STEP_ANNOTATION, RetryPolicy, StepKind
from tiphys.records.tracking import ModelRegistration

OPTIONS = CompileOptions(store=STORE)
NOTHING_REPEATED = RetryPolicy(preemption=0, infrastructure=0, out_of_memory=0, unknown=0)
FOLDER = "data/workflows/{{workflow.uid}}/{{pod.name}}/"
OUTPUTS = {"parameters": [output_parameter("loss")], "artifacts": [artifact("model", globalName="best", mode=0o600)]}


def compiled(*templates: Manifest, store: str = STORE, **fields: Any) -> dict[str, Manifest]:
    return by_name(compile_workflow(workflow(*templates, **fields), CompileOptions(store=store)))


def entry_tasks(made: dict[str, Manifest]) -> dict[str, Manifest]:
    return {entry["name"]: entry for entry in made["main"]["dag"]["tasks"]}


def passed(call: Manifest) -> dict[str, Any]:
    return {one["name"]: one["value"] for one in (call.get("arguments") or {}).get("parameters") or []}


def test_a_step_is_its_authors_template_and_nothing_stands_around_it() -> None:
    authored = step("prep", asked={"retry": NOTHING_REPEATED}, inputs=parameters("lr"), outputs=OUTPUTS)
    made = compiled(authored)

    assert set(made) == {"main", "prep", "tiphys-exit", "tiphys-finalize", "tiphys-wake"}
    spec = json.loads(made["prep"]["metadata"]["annotations"].pop(STEP_ANNOTATION))
    assert made["prep"] == {
        "name": "prep",
        "metadata": {"annotations": {}},
        "inputs": authored["inputs"],
        "outputs": {
            "parameters": [{"name": "loss", "valueFrom": {"path": "/tmp/loss"}}],
            "artifacts": [
                {
                    "name": "model",
                    "path": "/tmp/model",
                    "globalName": "best",
                    "mode": 0o600,
                    "archive": {"none": {}},
                    "s3": {"key": f"tiphys/{FOLDER}model"},
                }
            ],
        },
        "container": {
            "image": "prep:1",
            "command": ["prep"],
            "env": [
                {"name": "TIPHYS_OUTPUT_LOSS", "value": "/tmp/loss"},
                {"name": "TIPHYS_OUTPUT_MODEL", "value": "/tmp/model"},
            ],
            "terminationMessagePolicy": "FallbackToLogsOnError",
        },
    }
    assert (spec["name"], spec["kind"], spec["parameters"], spec["artifacts"]) == ("prep", "step", ["loss"], ["model"])
    assert "gate" not in spec
    assert made["main"]["dag"]["tasks"] == workflow(authored)["spec"]["templates"][0]["dag"]["tasks"]


def test_a_step_without_inputs_and_outputs_gets_no_empty_fields() -> None:
    made = compiled(step("prep", asked={"retry": NOTHING_REPEATED}))["prep"]

    assert set(made) == {"name", "metadata", "container"}
    assert set(made["container"]) == {"image", "command", "terminationMessagePolicy"}


@pytest.mark.parametrize(
    ("store", "prefix"),
    [
        ("s3://ml-runs/tiphys", "tiphys/"),
        ("s3://ml-runs/team/a/", "team/a/"),
        ("s3://ml-runs", ""),
        ("az://account/container/team", "team/"),
        ("file:///srv/store", ""),
        ("", ""),
    ],
)
def test_outputs_lie_in_a_folder_of_their_pod_behind_the_prefix_of_the_store(store: str, prefix: str) -> None:
    [model] = compiled(step("prep", outputs=OUTPUTS), store=store)["prep"]["outputs"]["artifacts"]
    assert model["s3"] == {"key": f"{prefix}{FOLDER}model"}


@pytest.mark.parametrize(
    ("name", "path", "file"),
    [
        ("report", "/tmp/out.html", "report.html"),
        ("model", "/tmp/model.tar.gz", "model.tar.gz"),
        ("x", "/tmp/v1.2", "x"),
    ],
)
def test_an_output_file_keeps_the_suffix_by_which_viewers_know_it(name: str, path: str, file: str) -> None:
    manifest = compile_workflow(workflow(step("prep", outputs={"artifacts": [{"name": name, "path": path}]})), OPTIONS)
    [output] = by_name(manifest)["prep"]["outputs"]["artifacts"]
    assert output["s3"]["key"] == f"tiphys/{FOLDER}{file}"
    assert CompiledPipeline.from_manifest(manifest).steps["prep"].artifact_file(name) == file


def test_references_to_a_step_stay_as_they_were_written() -> None:
    used = [
        "{{tasks.a.outputs.parameters.loss}}",
        "{{tasks.a.outputs.result}} {{=tasks['a'].outputs.result + '!'}}",
        "{{tasks.a.exitCode}} {{=tasks.a.exitCode}} {{tasks.a.ip}} {{tasks.a.status}}",
    ]
    given = {"parameters": [{"name": f"x{number}", "value": value} for number, value in enumerate(used)]}
    reader = task("b", arguments=given, when="{{tasks.a.outputs.result}} == heads")
    made = compiled(
        step("a", outputs=OUTPUTS), plain("b", inputs=parameters("x0", "x1", "x2")), tasks=[task("a"), reader]
    )

    assert entry_tasks(made)["b"] == {**reader, "depends": "a"}
    assert made["a"]["outputs"]["parameters"] == OUTPUTS["parameters"]


def test_tasks_that_call_one_template_share_it_and_each_is_a_step() -> None:
    names = [f"prep-{number}" for number in range(100)]
    manifest = compile_workflow(workflow(step("prep"), tasks=[task(name, "prep") for name in names]), OPTIONS)
    made = by_name(manifest)

    assert set(made) == {"main", "prep", "tiphys-exit", "tiphys-finalize", "tiphys-wake"}
    assert {call["template"] for call in made["main"]["dag"]["tasks"]} == {"prep"}
    steps = CompiledPipeline.from_manifest(manifest).steps
    assert [spec.name for spec in steps.values()] == list(steps) == names


def test_a_pipeline_of_many_functions_stays_below_the_limit_of_argos_full_crds() -> None:
    functions = [step(f"s{number}") for number in range(140)] + [train(f"t{number}") for number in range(10)]
    manifest = compile_workflow(workflow(*functions), OPTIONS)

    assert len(CompiledPipeline.from_manifest(manifest).steps) == 150
    assert len(manifest["spec"]["templates"]) <= 200


def test_a_fan_out_passes_its_item_on_to_a_template_that_other_tasks_call_without() -> None:
    given = {"parameters": [{"name": "lr", "value": "{{item}}"}]}
    once = {"parameters": [{"name": "lr", "value": "1"}]}
    names = ("one", "sweep", "two")  # neither the first nor the last call is the fan-out
    calls = [task(name, "prep", arguments=once) for name in names]
    calls[1] = task("sweep", "prep", withItems=[1, 2], arguments=given)
    manifest = compile_workflow(workflow(step("prep", inputs=parameters("lr")), tasks=calls), OPTIONS)
    made = by_name(manifest)

    assert made["prep"]["inputs"]["parameters"] == [{"name": "lr"}, {"name": "tiphys-item", "default": ""}]
    one, sweep, _ = entry_tasks(made).values()
    assert passed(sweep) == {"lr": "{{item}}", "tiphys-item": "{{item}}"}
    assert passed(one) == {"lr": "1"}
    steps = CompiledPipeline.from_manifest(manifest).steps
    assert {name: spec.fan_out for name, spec in steps.items()} == {name: name == "sweep" for name in names}


def test_a_template_of_no_fan_out_has_no_item() -> None:
    assert "tiphys-item" not in json.dumps(compiled(step("prep", inputs=parameters("lr"))))


@pytest.mark.parametrize(
    ("asked", "own", "strategy"),
    [
        ({"retry": NOTHING_REPEATED}, {}, None),
        ({}, {"retryStrategy": {"limit": 3}}, {"limit": 3}),
        ({}, {"retryStrategy": {}}, {}),
    ],
    ids=["nothing is repeated", "the author's", "the author's without limit"],
)
def test_the_authors_retry_strategy_stays_and_none_is_added_where_nothing_is_repeated(
    asked: Manifest, own: Manifest, strategy: Manifest | None
) -> None:
    assert compiled(step("prep", asked=asked, **own))["prep"].get("retryStrategy") == strategy


@pytest.mark.parametrize("cause", ["preemption", "user_error", "deadline"])
def test_a_budget_for_a_single_cause_makes_a_retry_strategy(cause: str) -> None:
    retry = NOTHING_REPEATED.model_copy(update={cause: 2})
    made = compiled(step("prep", asked={"retry": retry}))["prep"]["retryStrategy"]
    assert made["limit"] == "2"
    assert "expression" in made


def test_the_default_repeats_and_so_does_a_strategy_that_is_null() -> None:
    default = compiled(step("prep"))
    assert default["prep"]["retryStrategy"]["retryPolicy"] == "Always"
    assert compiled(step("prep", retryStrategy=None)) == default


KEPT: dict[str, Any] = {
    "activeDeadlineSeconds": 600,
    "affinity": {},
    "archiveLocation": {"archiveLogs": True},
    "automountServiceAccountToken": True,
    "executor": {"serviceAccountName": "mine"},
    "failFast": True,
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
    "initContainers": [{"name": "fetch", "image": "fetch:1"}],
    "metrics": {"prometheus": [{"name": "runs", "help": "h", "counter": {"value": "1"}}]},
    "nodeSelector": {"disk": "ssd"},
    "podSpecPatch": '{"priority": 1}',
    "priorityClassName": "high",
    "schedulerName": "own",
    "securityContext": {},
    "serviceAccountName": "trainer",
    "sidecars": [{"name": "proxy", "image": "proxy:1"}],
    "synchronization": {"mutexes": [{"name": "one"}]},
    "timeout": "1h",
    "tolerations": [{"key": "mine"}],
    "volumes": [{"name": "work", "emptyDir": {}}],
}
CONTAINER: Manifest = {
    "imagePullPolicy": "Always",
    "lifecycle": {"preStop": {"exec": {"command": ["save"]}}},
    "resources": {"limits": {"cpu": 1}},
    "terminationMessagePolicy": "File",
    "volumeMounts": [{"name": "work", "mountPath": "/w"}],
    "workingDir": "/w",
}


@pytest.mark.parametrize("field", KEPT)
def test_a_field_of_the_template_stays(field: str) -> None:
    assert compiled(step("prep", **{field: KEPT[field]}))["prep"][field] == KEPT[field]


def test_labels_and_annotations_of_the_author_stay_and_no_others_are_added() -> None:
    authored = step("prep")
    authored["metadata"]["labels"] = {"team": "vision"}
    authored["metadata"]["annotations"]["why"] = "because"
    metadata = compiled(authored)["prep"]["metadata"]
    assert metadata["labels"] == {"team": "vision"}
    assert set(metadata["annotations"]) == {"why", STEP_ANNOTATION}


@pytest.mark.parametrize("kind", ["container", "script"])
def test_the_program_stays_and_its_variables_come_first(kind: str) -> None:
    authored = step("prep", container={**CONTAINER, "env": [{"name": "SEED", "value": "1"}]}, outputs=OUTPUTS)
    if kind == "script":
        authored["script"] = {**authored.pop("container"), "source": "print(1)"}
    before = copy.deepcopy(authored[kind])
    program = compiled(authored)["prep"][kind]
    own, *added = program.pop("env")
    assert program == {name: value for name, value in before.items() if name != "env"}
    assert own == {"name": "SEED", "value": "1"}
    assert [one["name"] for one in added] == ["TIPHYS_OUTPUT_LOSS", "TIPHYS_OUTPUT_MODEL"]


TASK_FIELDS: dict[str, Any] = {
    "continueOn": {"failed": True},
    "hooks": {"exit": {"template": "bye"}, "running": {"template": "bye", "expression": "true"}},
    "onExit": "bye",
    "when": "{{workflow.parameters.lr}} > 1",
    "withSequence": {"count": "3"},
    "withParam": "{{workflow.parameters.list}}",
}


@pytest.mark.parametrize("field", TASK_FIELDS)
def test_a_field_of_the_task_stays(field: str) -> None:
    call = task("prep", **{field: TASK_FIELDS[field]})
    after = task("after", "prep", dependencies=["prep"])
    given = parameters("lr", "list")
    made = entry_tasks(compiled(step("prep"), plain("bye"), tasks=[call, after], arguments=given))
    assert made["prep"][field] == TASK_FIELDS[field]
    assert made["after"]["dependencies"] == ["prep"]


SOURCES: tuple[Manifest, ...] = (
    {"s3": {"key": "raw"}},
    {"http": {"url": "https://x/y"}},
    {"git": {"repo": "https://x/y", "revision": "c" * 40}},
    {"raw": {"data": "a"}, "archive": {"none": {}}},
    {"s3": {"key": "raw"}, "optional": True, "subPath": "a"},
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: "-".join(source))
def test_an_input_artifact_keeps_its_location_and_can_be_read_by_a_program_that_is_not_root(source: Manifest) -> None:
    declared = {"artifacts": [artifact("data", **source)]}
    [found] = compiled(step("prep", inputs=declared), tasks=[task("prep")])["prep"]["inputs"]["artifacts"]
    assert found == {**artifact("data", **source), "mode": 0o755, "recurseMode": True}


def test_a_mode_that_the_author_chose_for_an_input_artifact_stays() -> None:
    [found] = compiled(step("prep", inputs={"artifacts": [artifact("data", mode=0o600)]}))["prep"]["inputs"][
        "artifacts"
    ]
    assert found == artifact("data", mode=0o600)


def test_an_input_parameter_keeps_what_its_author_wrote() -> None:
    declared = {"parameters": [{"name": "lr", "default": "0.1", "enum": ["0.1", "1"], "description": "rate"}]}
    assert compiled(step("prep", inputs=declared))["prep"]["inputs"] == declared


def test_the_program_learns_the_paths_of_its_files_and_gets_neither_identity_nor_credentials() -> None:
    declared = {"artifacts": [{"name": "raw-data", "path": "/in"}]}
    outputs = {"parameters": [output_parameter("val-loss")], "artifacts": [artifact("model")]}
    container = compiled(step("prep", inputs=declared, outputs=outputs))["prep"]["container"]
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "TIPHYS_INPUT_RAW_DATA": "/in",
        "TIPHYS_OUTPUT_VAL_LOSS": "/tmp/val-loss",
        "TIPHYS_OUTPUT_MODEL": "/tmp/model",
    }
    assert "envFrom" not in container


def test_options_of_the_step_reach_its_pod() -> None:
    asked = {"deadline_seconds": 3600, "grace_seconds": 45.2, "spot": (GKE_SPOT,)}
    made = compiled(step("prep", asked=asked))["prep"]

    assert made["activeDeadlineSeconds"] == 3600
    assert json.loads(made["podSpecPatch"]) == {"terminationGracePeriodSeconds": 46}
    assert made["nodeSelector"] == {GKE_SPOT.label: "true"}
    assert [one["key"] for one in made["tolerations"]] == [GKE_SPOT.label]


@pytest.mark.parametrize("field", ["podSpecPatch", "activeDeadlineSeconds", "nodeSelector", "tolerations", "volumes"])
def test_field_that_was_not_asked_for_is_absent(field: str) -> None:
    assert field not in compiled(step("prep"))["prep"]


@pytest.mark.parametrize(
    ("asked", "is_gated"),
    [
        ({}, False),
        ({"cache": False, "share": True, "grace_seconds": 60, "deadline_seconds": 60}, False),
        ({"gate": True}, True),
        ({"tracking": Mlflow(uri="http://mlflow").settings()}, True),
        ({"tracking": Wandb(project="p").settings()}, True),
        ({"registration": ModelRegistration(model="m")}, True),
        ({"kind": StepKind.TRAIN}, True),
    ],
    ids=["plain", "options", "gate", "mlflow", "wandb", "registration", "training"],
)
def test_a_gate_is_for_what_is_granted(asked: Manifest, is_gated: bool) -> None:
    assert StepSettings(**{"kind": StepKind.STEP, **asked}).is_gated is is_gated
    authored = {**step("prep"), "metadata": settings(**{"kind": StepKind.STEP, **asked})}
    manifest = compile_workflow(workflow(authored), OPTIONS)
    assert CompiledPipeline.from_manifest(manifest).steps["prep"].is_gated is is_gated
    assert ("dag" in by_name(manifest)["prep"]) is is_gated


def test_a_gate_makes_no_other_program() -> None:
    digests = [
        CompiledPipeline.from_manifest(compile_workflow(workflow(kind("prep", outputs=OUTPUTS)), OPTIONS)).steps["prep"]
        for kind in (step, gated)
    ]
    assert digests[0].template == digests[1].template
    assert digests[0].output_parameters == digests[1].output_parameters


def test_the_policy_of_a_step_is_in_the_annotation_of_its_template() -> None:
    asked = {"cache": False, "share": True, "grace_seconds": 90.5, "retry": NOTHING_REPEATED}
    manifest = compile_workflow(
        workflow(step("prep", asked=asked), tasks=[task("again", "prep", withParam="[1]")]), OPTIONS
    )
    spec = CompiledPipeline.from_manifest(manifest).step("again")
    assert (spec.name, spec.kind, spec.fan_out, spec.is_gated) == ("again", StepKind.STEP, True, False)
    assert (spec.cache, spec.share, spec.grace_seconds, spec.retry) == (False, True, 91.0, NOTHING_REPEATED)
    assert "{{" not in by_name(manifest)["prep"]["metadata"]["annotations"][STEP_ANNOTATION]


def test_the_given_document_is_not_changed() -> None:
    call = task("prep", withItems=[1])
    manifest = workflow(
        step("prep", inputs={"artifacts": [artifact("data", raw={"data": ""})]}, outputs=OUTPUTS), tasks=[call]
    )
    before = json.dumps(manifest)

    compile_workflow(manifest, OPTIONS)

    assert json.dumps(manifest) == before


@pytest.mark.parametrize("taken", ["fit", "fit-run", "fit-admit", "fit-conclude"])
def test_the_template_of_a_step_cannot_have_a_name_that_a_gated_step_takes(taken: str) -> None:
    calls = [task("fit", "program"), task("other", taken)]
    with pytest.raises(UsageError, match=f"compiles to a template '{taken}', which is a template already"):
        compile_workflow(workflow(gated("program"), step(taken), tasks=calls), OPTIONS)
    compile_workflow(
        workflow(gated("program"), step("free"), tasks=[task("fit", "program"), task("other", "free")]), OPTIONS
    )


def test_the_task_of_a_step_may_have_the_name_of_another_template() -> None:
    calls = [task("hello", "prep"), task("prep", "hello")]
    made = compiled(step("prep"), plain("hello"), tasks=calls)
    assert [call["template"] for call in made["main"]["dag"]["tasks"]] == ["prep", "hello"]
    assert made["hello"] == plain("hello")
