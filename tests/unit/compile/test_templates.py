"""The shapes of a gated `Step` and a `Train`.

| template | calls | timers |
|---|---|---|
| `Step` | admit, conclude | two beside each, none in items of a fan-out |
| `Train`, once for each attempt | admit, conclude | the same |
| exit handler | finalize | two |

`test_ungated_template.py` has the shape of a `Step` without a gate.
"""

import json

import pytest
from support.builders.authored_workflows import (
    STORE,
    artifact,
    by_name,
    gated,
    output_parameter,
    parameters,
    plain,
    step,
    task,
    train,
    workflow,
)

from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.operations import (
    ADMIT_OUTPUTS,
    AdmitOperation,
    ConcludeOperation,
    FinalizeOperation,
)
from tiphys.protocol.step_spec import StepKind

OPTIONS = CompileOptions(store=STORE)


def compiled(*templates: Manifest, options: CompileOptions = OPTIONS, **fields: object) -> dict[str, Manifest]:
    return by_name(compile_workflow(workflow(*templates, **fields), options))  # type: ignore[arg-type]


def tasks(template: Manifest) -> dict[str, Manifest]:
    return {entry["name"]: entry for entry in template["dag"]["tasks"]}


def outline(template: Manifest) -> list[tuple[str, str, str]]:
    return [(t["name"], t["template"], t.get("depends", "")) for t in template["dag"]["tasks"]]


def value(task_: Manifest, name: str) -> str:
    return {p["name"]: p["value"] for p in task_["arguments"]["parameters"]}[name]  # type: ignore[no-any-return]


AFTER_RUN = "run.Succeeded || run.Failed || run.Errored || run.Skipped"
EXPORTING = {"parameters": [output_parameter("loss")], "artifacts": [artifact("model", globalName="best")]}


def timers(name: str, depends: str = "") -> list[tuple[str, str, str]]:
    return [(name, "tiphys-wake", depends), (f"{name}-again", "tiphys-wake", name)]


def test_a_gated_step_is_admitted_run_and_concluded_with_two_timers_beside_each_call() -> None:
    made = compiled(gated("prep", outputs=EXPORTING))

    assert outline(made["prep"]) == [
        ("admit", "prep-admit", ""),
        *timers("wake"),
        ("run", "prep-run", "admit"),
        ("conclude", "prep-conclude", AFTER_RUN),
        *timers("wake-conclude", AFTER_RUN),
    ]
    assert "retryStrategy" in made["prep-run"]
    assert set(made) == {
        *("main", "prep", "prep-admit", "prep-run", "prep-conclude"),
        *("tiphys-exit", "tiphys-finalize", "tiphys-wake"),
    }
    assert made["tiphys-wake"]["suspend"] == {"duration": "300ms"}


def test_finalize_has_two_timers_beside_it_and_the_authors_handler() -> None:
    made = compiled(step("prep"), plain("bye"), tasks=[task("prep")], onExit="bye")

    assert outline(made["tiphys-exit"]) == [
        ("handler", "bye", ""),
        ("finalize", "tiphys-finalize", ""),
        *timers("wake"),
    ]


def test_items_of_a_gated_step_have_no_timers() -> None:
    made = compiled(gated("prep"), tasks=[task("prep", withItems=[1, 2])])

    assert list(tasks(made["prep"])) == ["admit", "run", "conclude"]


@pytest.mark.parametrize("field", ["retryStrategy", "securityContext", "affinity"])
def test_an_empty_field_of_the_author_stays_because_it_means_something_to_argo(field: str) -> None:
    assert compiled(gated("prep", **{field: {}}))["prep-run"][field] == {}


def test_a_retry_strategy_without_content_is_none_so_that_the_step_has_its_own() -> None:
    assert compiled(gated("prep", retryStrategy=None)) == compiled(gated("prep"))


def test_outputs_of_a_gated_step_are_those_of_its_conclude() -> None:
    made = compiled(gated("prep", outputs=EXPORTING))

    assert made["prep"]["outputs"] == {
        "parameters": [{"name": "loss", "valueFrom": {"parameter": "{{tasks.conclude.outputs.parameters.loss}}"}}],
        "artifacts": [{"name": "model", "globalName": "best", "from": "{{tasks.conclude.outputs.artifacts.model}}"}],
    }
    assert made["prep-conclude"]["outputs"] == {
        "parameters": [{"name": "loss", "valueFrom": {"default": "", "supplied": {}}}],
        "artifacts": [{"name": "model", "path": "/unused/model", "optional": True}],
    }


def test_standard_output_that_another_task_reads_is_an_output_of_the_step() -> None:
    reads = {"parameters": [{"name": "x", "value": "{{tasks.a.outputs.result}} {{=tasks['a'].outputs.result + '!'}}"}]}
    main = [task("a"), task("b", arguments=reads, when="{{tasks.a.outputs.result}} == heads"), task("c")]
    found = compiled(gated("a"), plain("b", inputs=parameters("x")), plain("c"), tasks=main)
    conclude = tasks(found["a"])["conclude"]
    assert (
        value(conclude, "result") == "{{=tasks['run'].status == 'Succeeded' ? tasks['run'].outputs.result ?? '' : ''}}"
    )
    assert found["a-conclude"]["plugin"]["tiphys"]["result"] == "{{inputs.parameters.result}}"
    assert found["a-conclude"]["outputs"]["parameters"] == [
        {"name": "result", "valueFrom": {"default": "", "supplied": {}}}
    ]
    assert found["a"]["outputs"]["parameters"] == [
        {"name": "result", "valueFrom": {"parameter": "{{tasks.conclude.outputs.parameters.result}}"}}
    ]
    reader = tasks(found["main"])["b"]
    assert value(reader, "x") == "{{tasks.a.outputs.parameters.result}} {{=tasks['a'].outputs.parameters.result + '!'}}"
    assert (reader["when"], reader["depends"]) == ("{{tasks.a.outputs.parameters.result}} == heads", "a")


def test_a_training_is_a_gated_step_that_argo_repeats_for_each_attempt() -> None:
    made = compiled(train("fit"))

    assert outline(made["fit"]) == [
        ("admit", "fit-admit", ""),
        *timers("wake"),
        ("run", "fit-run", "admit"),
        ("conclude", "fit-conclude", AFTER_RUN),
        *timers("wake-conclude", AFTER_RUN),
    ]
    assert made["fit"]["retryStrategy"] == {
        "limit": "1000",
        "retryPolicy": "OnError",
        "backoff": {"duration": "0.3s", "factor": "2", "cap": "30s"},
    }
    assert "retryStrategy" not in made["fit-run"], "a retry of the pod alone would not ask for admission"
    assert made["fit-run"]["podSpecPatch"] == "{{inputs.parameters.tiphys-pod-patch}}"
    assert set(made) == {
        *("main", "fit", "fit-admit", "fit-run", "fit-conclude"),
        *("tiphys-exit", "tiphys-finalize", "tiphys-wake"),
    }


def test_a_gated_step_is_not_repeated_through_admission() -> None:
    assert "retryStrategy" not in compiled(gated("prep"))["prep"]


def test_items_of_a_training_have_no_timers() -> None:
    made = compiled(train("fit"), tasks=[task("fit", withItems=[1, 2])])

    assert list(tasks(made["fit"])) == ["admit", "run", "conclude"]


def test_outputs_of_a_training_are_those_of_the_conclude_of_its_last_attempt() -> None:
    made = compiled(train("fit", outputs=EXPORTING))

    assert made["fit"]["outputs"] == {
        "parameters": [{"name": "loss", "valueFrom": {"parameter": "{{tasks.conclude.outputs.parameters.loss}}"}}],
        "artifacts": [{"name": "model", "globalName": "best", "from": "{{tasks.conclude.outputs.artifacts.model}}"}],
    }


def test_programs_run_only_when_admitted() -> None:
    made = compiled(gated("prep"), train("fit"))

    for run in (tasks(made["prep"])["run"], tasks(made["fit"])["run"]):
        assert run["when"] == "{{tasks.admit.outputs.parameters.run}} == true"


def test_an_exit_code_that_was_not_observed_cannot_hang_the_workflow() -> None:
    made = compiled(gated("prep"), train("fit"))

    for name in ("prep", "fit"):
        conclude = tasks(made[name])["conclude"]
        assert value(conclude, "exit-code") == "{{=tasks['run'].exitCode ?? '-1'}}"
        assert value(conclude, "status") == "{{tasks.run.status}}"


def test_bodies_are_operations_that_carry_identity() -> None:
    made = compiled(train("fit", inputs=parameters("lr")))
    bodies = {name: template["plugin"]["tiphys"] for name, template in made.items() if "plugin" in template}

    admit = AdmitOperation.model_validate(bodies["fit-admit"])
    conclude = ConcludeOperation.model_validate(bodies["fit-conclude"])
    finalize = FinalizeOperation.model_validate(bodies["tiphys-finalize"])

    for body in (admit, conclude, finalize):
        assert body.run == "{{workflow.parameters.tiphys-run}}"
        assert body.submission == "{{workflow.parameters.tiphys-submission}}"
        assert (body.uid, body.node) == ("{{workflow.uid}}", "{{node.name}}")
    assert {admit.step, conclude.step} == {"fit"}
    assert conclude.status == "{{inputs.parameters.status}}"
    assert conclude.exit_code == "{{inputs.parameters.exit-code}}"
    assert admit.inputs == {"lr": "{{inputs.parameters.lr}}"}
    assert (finalize.status, finalize.failures) == ("{{workflow.status}}", "{{workflow.failures}}")


def test_admit_declares_what_the_program_needs() -> None:
    made = compiled(gated("prep"), train("fit", asked={"checkpoints": {}}))
    answers = made["prep-admit"]["outputs"]["parameters"]

    assert [answer["name"] for answer in answers] == ["run", "run-id", "attempt", "outputs"]
    assert {answer["name"] for answer in made["fit-admit"]["outputs"]["parameters"]} == set(ADMIT_OUTPUTS) - {"step"}
    assert all(answer["valueFrom"] == {"default": "", "supplied": {}} for answer in answers)


def test_workflow_parameters_that_the_program_uses_decide_its_key_too() -> None:
    container = {"args": ["{{workflow.parameters.lr}}", "{{=workflow.parameters['batch-size']}}", "{{workflow.name}}"]}

    made = compiled(gated("prep", container=container), arguments=parameters("lr", "batch-size"))
    body = made["prep-admit"]["plugin"]["tiphys"]

    assert body["inputs"] == {
        "workflow.parameters.batch-size": "{{workflow.parameters.batch-size}}",
        "workflow.parameters.lr": "{{workflow.parameters.lr}}",
    }


def test_a_run_name_is_made_from_parameters() -> None:
    manifest = workflow(gated(), arguments=parameters("lr"))

    made = by_name(compile_workflow(manifest, CompileOptions(run_name="digits-lr{lr}")))

    assert made["prep-admit"]["plugin"]["tiphys"]["run"] == "digits-lr{{workflow.parameters.lr}}"
    assert made["tiphys-finalize"]["plugin"]["tiphys"]["run"] == "digits-lr{{workflow.parameters.lr}}"


def test_inputs_are_handed_down_to_admission_and_to_the_program() -> None:
    given = {
        "parameters": [{"name": "lr", "default": "0.1"}],
        "artifacts": [{"name": "data", "path": "/tmp/data", "optional": True}],
    }
    made = compiled(train("fit", inputs=given))

    assert made["fit"]["inputs"]["parameters"] == [{"name": "lr", "default": "0.1"}]
    assert made["fit"]["inputs"]["artifacts"] == [{"name": "data", "optional": True}], "paths are for leaves only"
    assert made["fit-admit"]["inputs"]["artifacts"] == [{"name": "data", "path": "/tmp/data", "optional": True}]
    [of_program] = made["fit-run"]["inputs"]["artifacts"]
    assert {"name": "data", "path": "/tmp/data", "optional": True}.items() <= of_program.items()
    attempt = tasks(made["fit"])
    for caller in (attempt["admit"], attempt["run"]):
        assert value(caller, "lr") == "{{inputs.parameters.lr}}"
        assert caller["arguments"]["artifacts"] == [
            {"name": "data", "from": "{{inputs.artifacts.data}}", "optional": True}
        ]


def test_an_input_with_a_location_of_its_own_is_resolved_once() -> None:
    made = compiled(gated("prep", inputs={"artifacts": [{"name": "raw", "path": "/raw", "s3": {"key": "raw"}}]}))

    assert made["prep"]["inputs"]["artifacts"] == [{"name": "raw", "s3": {"key": "raw"}}]
    [of_program] = made["prep-run"]["inputs"]["artifacts"]
    assert (of_program["name"], of_program["path"], "s3" in of_program) == ("raw", "/raw", False)


def test_an_item_is_handed_down_to_every_operation() -> None:
    made = compiled(
        train("fit", inputs=parameters("lr")),
        tasks=[task("sweep", "fit", withItems=[1, 2], arguments={"parameters": [{"name": "lr", "value": "{{item}}"}]})],
    )

    sweep = made["main"]["dag"]["tasks"][0]
    assert {"name": "tiphys-item", "value": "{{item}}"} in sweep["arguments"]["parameters"]
    for name in ("sweep-admit", "sweep-conclude"):
        assert made[name]["plugin"]["tiphys"]["item"] == "{{inputs.parameters.tiphys-item}}"
        assert {"name": "tiphys-item"} in made[name]["inputs"]["parameters"]
    assert {"name": "tiphys-item"} not in made["sweep-run"]["inputs"]["parameters"]


@pytest.mark.parametrize(
    ("taken", "declared", "default"),
    [
        ("{{tasks.each.outputs.parameters.loss}}", {}, "[]"),
        ("{{ tasks.each.outputs.parameters.loss }}", {}, "[]"),
        ("{{tasks.each.outputs.parameters.loss}}", {"default": "[1]"}, "[1]"),
        ("{{tasks.each.outputs.parameters.loss}} of all", {}, None),
        ("{{tasks.prep.outputs.parameters.loss}}", {}, None),
    ],
)
def test_a_step_behind_a_fan_out_without_items_takes_an_empty_list(
    taken: str, declared: Manifest, default: str | None
) -> None:
    outputs = {"parameters": [output_parameter("loss")]}
    arguments = {"parameters": [{"name": "losses", "value": taken}]}
    made = compiled(
        step("prep", outputs=outputs),
        step("each", outputs=outputs),
        step("total", inputs={"parameters": [{"name": "losses", **declared}]}),
        tasks=[
            task("prep"),
            task("each", withParam="{{tasks.prep.outputs.parameters.loss}}", depends="prep"),
            task("total", arguments=arguments, depends="each"),
        ],
    )
    [losses] = [one for one in made["total"]["inputs"]["parameters"] if one["name"] == "losses"]
    assert losses.get("default") == default


def test_a_step_without_a_fan_out_has_no_item() -> None:
    made = compiled(step("prep"), gated("check"))

    assert "tiphys-item" not in json.dumps(made)


def test_outputs_are_keyed_without_archive_and_answered_by_conclude() -> None:
    outputs = {"parameters": [output_parameter("loss")], "artifacts": [artifact("model", globalName="best")]}
    made = compiled(train("fit", outputs=outputs))

    assert made["fit-run"]["outputs"] == {
        "artifacts": [
            {
                "name": "model",
                "path": "/tmp/model",
                "optional": True,
                "archive": {"none": {}},
                "s3": {"key": "{{inputs.parameters.tiphys-outputs}}/artifacts/model"},
            },
            {
                "name": "tiphys-parameter-loss",
                "path": "/tmp/loss",
                "optional": True,
                "archive": {"none": {}},
                "s3": {"key": "{{inputs.parameters.tiphys-outputs}}/parameters/loss"},
            },
        ]
    }
    assert made["fit-conclude"]["outputs"] == {
        "parameters": [{"name": "loss", "valueFrom": {"default": "", "supplied": {}}}],
        "artifacts": [{"name": "model", "path": "/unused/model", "optional": True}],
    }
    assert made["fit"]["outputs"] == {
        "parameters": [{"name": "loss", "valueFrom": {"parameter": "{{tasks.conclude.outputs.parameters.loss}}"}}],
        "artifacts": [{"name": "model", "globalName": "best", "from": "{{tasks.conclude.outputs.artifacts.model}}"}],
    }


def test_outputs_of_a_step_lie_below_the_number_of_the_retry() -> None:
    made = compiled(gated("prep", outputs={"artifacts": [artifact("data")]}))

    key = made["prep-run"]["outputs"]["artifacts"][0]["s3"]["key"]
    assert key == "{{inputs.parameters.tiphys-outputs}}/{{retries}}/artifacts/data"


@pytest.mark.parametrize(
    ("name", "path", "file"),
    [
        ("report", "/tmp/out.html", "report.html"),
        ("report.html", "/tmp/out.html", "report.html"),
        ("model", "/tmp/model.tar.gz", "model.tar.gz"),
        ("model", "/tmp/.cache", "model"),
        ("model", "/tmp/model", "model"),
        ("model", "/tmp/v1.2", "model"),
        ("model", "/tmp/a.b c", "model"),
        ("model", "/tmp/{{workflow.uid}}.x{{workflow.name}}", "model"),
    ],
)
def test_an_output_file_keeps_the_suffix_by_which_viewers_know_it(name: str, path: str, file: str) -> None:
    manifest = compile_workflow(workflow(gated("prep", outputs={"artifacts": [{"name": name, "path": path}]})), OPTIONS)
    key = by_name(manifest)["prep-run"]["outputs"]["artifacts"][0]["s3"]["key"]
    assert key == f"{{{{inputs.parameters.tiphys-outputs}}}}/{{{{retries}}}}/artifacts/{file}"
    assert CompiledPipeline.from_manifest(manifest).steps["prep"].artifact_file(name) == file


def test_pods_bear_the_labels_by_which_they_are_found() -> None:
    template = train("fit")
    template["metadata"]["labels"] = {"team": "vision"}

    metadata = compiled(template)["fit-run"]["metadata"]

    assert metadata == {
        "labels": {
            "team": "vision",
            "tiphys.dev/run": "{{inputs.parameters.tiphys-run-id}}",
            "tiphys.dev/step": "fit",
            "tiphys.dev/attempt": "{{inputs.parameters.tiphys-attempt}}",
        }
    }


def test_a_gated_template_used_by_two_tasks_makes_two_steps() -> None:
    manifest = compile_workflow(workflow(gated("prep"), tasks=[task("one", "prep"), task("two", "prep")]), OPTIONS)

    assert list(CompiledPipeline.from_manifest(manifest).steps) == ["one", "two"]
    assert [t["template"] for t in by_name(manifest)["main"]["dag"]["tasks"]] == ["one", "two"]
    assert "prep" not in by_name(manifest)


def test_a_plain_task_and_its_template_are_left_alone() -> None:
    hello = plain("hello", retryStrategy={"limit": 2})

    made = compiled(hello, step("prep"))

    assert made["hello"] == hello
    assert made["main"]["dag"]["tasks"][0] == {"name": "hello", "template": "hello"}


def test_the_policy_travels_once_in_the_annotation_of_the_wrapper() -> None:
    manifest = compile_workflow(
        workflow(
            train(
                "fit",
                asked={"grace_seconds": 90.5, "cache": False, "share": True},
                outputs={"parameters": [output_parameter("loss")], "artifacts": [artifact("model")]},
            ),
            tasks=[task("sweep", "fit", withParam="[1]")],
        ),
        OPTIONS,
    )

    pipeline = CompiledPipeline.from_manifest(manifest)
    spec = pipeline.step("sweep")
    assert (pipeline.name, pipeline.store) == ("digits", STORE)
    assert (spec.name, spec.kind, spec.fan_out) == ("sweep", StepKind.TRAIN, True)
    assert (spec.parameters, spec.artifacts) == (("loss",), ("model",))
    assert (spec.cache, spec.share, spec.grace_seconds) == (False, True, 91.0)
    assert "{{" not in by_name(manifest)["sweep"]["metadata"]["annotations"]["tiphys.dev/step"]


def test_fields_that_decide_the_outputs_decide_the_digest() -> None:
    def digest(template: Manifest) -> str:
        manifest = compile_workflow(workflow(template), OPTIONS)
        return CompiledPipeline.from_manifest(manifest).step("prep").template

    before = digest(step())
    changed = [
        step(container={"image": "prep:2"}),
        step(container={"command": ["prep", "-v"]}),
        step(container={"env": [{"name": "SEED", "value": "1"}]}),
        step(outputs={"artifacts": [artifact("data")]}),
    ]
    same = [
        step(container={"resources": {"limits": {"cpu": 4}}}),
        step(nodeSelector={"disk": "ssd"}, activeDeadlineSeconds=60),
        step(asked={"grace_seconds": 60, "cache": False}),
    ]

    assert len({before, *(digest(template) for template in changed)}) == 1 + len(changed)
    assert {digest(template) for template in same} == {before}


def test_the_given_document_is_not_changed() -> None:
    manifest = workflow(train("fit"), tasks=[task("fit", withItems=[1])])
    before = json.dumps(manifest)

    compile_workflow(manifest, OPTIONS)

    assert json.dumps(manifest) == before


@pytest.mark.parametrize(
    ("own", "account", "has_token"),
    [
        ({}, "tiphys-executor", False),
        ({"executor": {"serviceAccountName": "mine"}}, "mine", False),
        ({"automountServiceAccountToken": True}, "tiphys-executor", True),
    ],
)
def test_programs_get_the_token_of_an_account_only_if_the_author_says_so(
    own: Manifest, account: str, has_token: bool
) -> None:
    spec = compile_workflow(workflow(step(), **own), OPTIONS)["spec"]
    assert spec["executor"] == {"serviceAccountName": account}
    assert spec["automountServiceAccountToken"] is has_token


def test_labels_and_annotations_of_the_authors_workflow_stay() -> None:
    manifest = workflow(step())
    manifest["metadata"] |= {
        "labels": {"team": "vision", "tiphys.dev/pipeline": "other"},
        "annotations": {"why": "because", "tiphys.dev/store": "s3://other"},
    }
    metadata = compile_workflow(manifest, OPTIONS)["metadata"]
    assert metadata["labels"] == {"team": "vision", "tiphys.dev/pipeline": "digits"}
    assert (metadata["annotations"]["why"], metadata["annotations"]["tiphys.dev/store"]) == ("because", STORE)


def test_the_workflow_gets_its_parameters_and_its_description() -> None:
    manifest = compile_workflow(workflow(step(), arguments={"parameters": [{"name": "lr", "value": "1"}]}), OPTIONS)

    assert manifest["spec"]["arguments"]["parameters"] == [
        {"name": "lr", "value": "1"},
        {"name": "tiphys-run", "value": ""},
        {"name": "tiphys-submission", "value": ""},
    ]
    assert manifest["metadata"] == {
        "generateName": "digits-",
        "annotations": {
            "tiphys.dev/pipeline": "digits",
            "tiphys.dev/store": STORE,
            "tiphys.dev/narrated": "title,description",
            "workflows.argoproj.io/title": "digits",
            "workflows.argoproj.io/description": f"Pipeline `digits`. Its steps and checkpoints are kept in `{STORE}`.",
        },
        "labels": {"tiphys.dev/pipeline": "digits"},
    }
