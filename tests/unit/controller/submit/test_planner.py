"""Going on with a run with other code or parameters: what runs, what is recorded, and what may not be.

| changed | resume | fork |
|---|---|---|
| nothing | as ever, nothing more on record | a new run with the results of its parent |
| image, template or code of a step | it and all behind it, with a warning | the same |
| a parameter or the data of a step | refused: fork | the same |
| resources of a step | nothing | nothing |
| what the policy says `refuse` to | refused | refused |
| pipeline or store | refused | refused |
"""

import copy
import json
from typing import Any

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of, plain, ungated
from support.builders.lineage import commit, ref
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import (
    DriftFinding,
    StartResult,
    WorkflowChange,
    describe_run,
    fork_run,
    format_drift,
    plan_run,
    resume_run,
    start_run,
)
from tiphys_controller.plan.drift import find_drift

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.drift_policy import DRIFT_ANNOTATION, DriftClass, DriftPolicy
from tiphys.protocol.step_spec import STEP_ANNOTATION, StepKind
from tiphys.records import Provenance, SubmissionKind
from tiphys.store import RunLayout, Store, read_events, read_run, read_submissions

RUN = "digits-1"
LAYOUT = RunLayout(RUN)
GIVEN = {"arguments": {"parameters": [{"name": "lr", "value": "{{workflow.parameters.lr}}"}]}}
PIPELINE = pipeline_of(
    gated("prep"),
    gated("fit", kind=StepKind.TRAIN, depends="prep", **GIVEN),
    gated("report", depends="fit"),
    gated("aside", depends="prep"),
    parameters={"lr": "0.1"},
)


def edited(step: str, digest: str = "", **container: Any) -> Manifest:
    """The pipeline with another program for one step."""
    manifest = copy.deepcopy(PIPELINE)
    for template in manifest["spec"]["templates"]:
        if template["name"] == f"{step}-run":
            template["container"] |= container
        if template["name"] == step and digest:
            annotations = template["metadata"]["annotations"]
            annotations[STEP_ANNOTATION] = json.dumps(json.loads(annotations[STEP_ANNOTATION]) | {"template": digest})
    return manifest


def with_parameter(value: str) -> Manifest:
    manifest = copy.deepcopy(PIPELINE)
    [lr] = [one for one in manifest["spec"]["arguments"]["parameters"] if one["name"] == "lr"]
    lr["value"] = value
    return manifest


REPAIRED = edited("fit", "n" * 64, image="python:3.13")


@pytest.fixture
def history(store: Store, submitter: FakeSubmitter) -> History:
    """A run whose report failed."""
    start_run(store, submitter, PIPELINE, RUN)
    history = History(store, RUN)
    for step in ("prep", "fit", "aside"):
        history.done(step)
    history.failed("report")
    submitter.end(RUN)
    return history


def image_of(manifest: Manifest, step: str) -> str:
    [found] = [one for one in manifest["spec"]["templates"] if one["name"] == f"{step}-run"]
    return str(found["container"]["image"])


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


def words(found: tuple[DriftFinding, ...]) -> list[str]:
    return [format_drift(one) for one in found]


def test_a_changed_step_runs_with_all_behind_it_and_nothing_else(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    resumed = resume_run(store, submitter, RUN, change=WorkflowChange(REPAIRED))

    assert resumed.plan.running == ("fit", "report")
    assert words(resumed.plan.drift) == ["fit: image image python:3.12 → python:3.13"]
    assert [step.reason for step in resumed.plan.steps if step.name == "fit"] == [
        "its image changed; taken over if it makes no difference"
    ]
    assert image_of(submitter.manifest(f"{RUN}-2"), "fit") == "python:3.13"
    assert read_events(store, RUN)[-1].message.endswith("; changed: image")


def test_a_changed_workflow_is_on_record_and_the_first_one_stays(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    before = store.read(LAYOUT.run_record)

    resume_run(store, submitter, RUN, change=WorkflowChange(REPAIRED))

    claim = read_submissions(store, RUN)[-1].claim
    stored = json.loads(store.read(LAYOUT.workflow(claim.workflow)))
    assert image_of(stored["workflow"], "fit") == "python:3.13"
    assert store.read(LAYOUT.run_record) == before


def test_a_plain_resume_goes_on_with_what_was_changed(store: Store, submitter: FakeSubmitter, history: History) -> None:
    resume_run(store, submitter, RUN, change=WorkflowChange(REPAIRED))
    submitter.end(f"{RUN}-2")

    assert resume_run(store, submitter, RUN).plan.running == ("fit", "report")
    assert image_of(submitter.manifest(f"{RUN}-3"), "fit") == "python:3.13"
    assert resume_with_the_first_again(store, submitter) == "python:3.12"


def resume_with_the_first_again(store: Store, submitter: FakeSubmitter) -> str:
    submitter.end(f"{RUN}-3")
    resume_run(store, submitter, RUN, change=WorkflowChange(PIPELINE))
    return image_of(submitter.manifest(f"{RUN}-4"), "fit")


def test_the_same_workflow_is_no_change(store: Store, submitter: FakeSubmitter, history: History) -> None:
    resumed = resume_run(store, submitter, RUN, change=WorkflowChange(PIPELINE))

    assert (resumed.plan.running, resumed.plan.drift) == (("report",), ())
    assert read_submissions(store, RUN)[-1].claim.workflow == ""
    assert not [key for key in keys(store) if "/workflows/" in key]


def test_the_order_of_named_items_is_no_change(store: Store, submitter: FakeSubmitter) -> None:
    rate, seed = {"name": "RATE", "value": "1"}, {"name": "SEED", "value": "2"}
    start_run(store, submitter, edited("fit", env=[rate, seed]), RUN)

    submitter.end(RUN)

    def drift(env: list[dict[str, str]]) -> list[str]:
        change = WorkflowChange(edited("fit", env=env))
        return words(resume_run(store, submitter, RUN, dry_run=True, change=change).plan.drift)

    assert drift([seed, rate]) == []
    assert drift([seed | {"value": "3"}, rate]) == ["fit: template env.SEED.value 2 → 3"]


def test_the_order_of_the_fields_of_a_sequence_is_no_change() -> None:
    def pipeline(**sequence: str) -> CompiledPipeline:
        manifest = copy.deepcopy(PIPELINE)
        for template in manifest["spec"]["templates"]:
            for task in (template.get("dag") or {}).get("tasks") or []:
                task["withSequence"] = sequence
        return CompiledPipeline.from_manifest(manifest)

    before, policy = pipeline(end="3", start="1"), DriftPolicy()
    assert find_drift(before, pipeline(start="1", end="3"), policy) == ()
    assert find_drift(before, pipeline(start="1", end="4"), policy) != ()


def test_changed_resources_are_reported_and_run_no_step_again(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    change = WorkflowChange(edited("fit", resources={"limits": {"memory": "2Gi"}}))

    resumed = resume_run(store, submitter, RUN, change=change)

    assert words(resumed.plan.drift) == ["fit: template resources.limits.memory nothing → 2Gi"]
    assert resumed.plan.running == ("report",)


def test_memory_that_admit_answers_is_reported_like_any_other(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    manifest = copy.deepcopy(PIPELINE)
    [admit] = [one for one in manifest["spec"]["templates"] if one["name"] == "fit-admit"]
    admit["outputs"] = {"parameters": [{"name": "memory-limit", "valueFrom": {"default": "2Gi", "supplied": {}}}]}
    resumed = resume_run(store, submitter, RUN, dry_run=True, change=WorkflowChange(manifest))
    assert words(resumed.plan.drift) == ["fit: template resources.limits.memory nothing → 2Gi"]


def test_long_values_are_shown_from_where_they_differ(store: Store, submitter: FakeSubmitter, history: History) -> None:
    """A long command ends in what was changed."""
    long = ["python", "-m", "train", "--data", "/mnt/a/very/long/path/to/the/data", "--lr"]
    start_run(store, submitter, edited("fit", command=[*long, "0.1"]), "long")
    submitter.end("long")

    resumed = resume_run(store, submitter, "long", change=WorkflowChange(edited("fit", command=[*long, "0.3"])))

    assert words(resumed.plan.drift) == ['fit: template command …","--lr","0.1"] → …","--lr","0.3"]']


@pytest.mark.parametrize(("length", "shown"), [(60, "x" * 60), (61, "x" * 59 + "…")])
def test_a_value_is_shortened_only_if_it_is_too_long(
    store: Store, submitter: FakeSubmitter, history: History, length: int, shown: str
) -> None:
    change = WorkflowChange(edited("fit", image="x" * length))

    resumed = resume_run(store, submitter, RUN, change=change, dry_run=True)

    assert words(resumed.plan.drift) == [f"fit: image image python:3.12 → {shown}"]


def trained(store: Store, submitter: FakeSubmitter) -> None:
    """A run whose training saved a checkpoint and failed."""
    pipeline = copy.deepcopy(PIPELINE)
    for template in pipeline["spec"]["templates"]:
        if template["name"] == "fit":
            annotations = template["metadata"]["annotations"]
            spec = json.loads(annotations[STEP_ANNOTATION]) | {"checkpoints": {}}
            annotations[STEP_ANNOTATION] = json.dumps(spec)
    start_run(store, submitter, pipeline, RUN)
    History(store, RUN).failed("fit")
    commit(store, ref(1, 10), facts=Provenance(versions={"python": "3.11.7", "torch": "2.7.0"}))
    submitter.end(RUN)


def test_a_training_that_would_meet_other_frameworks_is_reported(store: Store, submitter: FakeSubmitter) -> None:
    trained(store, submitter)
    here = {"python": "3.11.7", "torch": "2.8.0"}

    resumed = resume_run(
        store, submitter, RUN, change=WorkflowChange(installed_version=lambda package: here[package]), dry_run=True
    )

    assert words(resumed.plan.drift) == ["fit: versions torch 2.7.0 → 2.8.0"]
    assert (
        resume_run(
            store, submitter, RUN, change=WorkflowChange(installed_version=lambda _: "1"), rerun=["fit"]
        ).plan.drift
        == ()
    )


def test_other_frameworks_may_be_refused(store: Store, submitter: FakeSubmitter) -> None:
    trained(store, submitter)

    with pytest.raises(ConflictError, match=r"may not go on with this: fit: versions python 3\.11\.7 → nothing"):
        resume_run(store, submitter, RUN, change=WorkflowChange(None, {"versions": "refuse"}, lambda _: ""))


def test_a_changed_parameter_is_another_experiment(store: Store, submitter: FakeSubmitter, history: History) -> None:
    before = keys(store)

    with pytest.raises(ConflictError, match=r"another experiment .*: fit: parameters lr 0\.1 → 0\.5; .*tiphys fork"):
        resume_run(store, submitter, RUN, change=WorkflowChange(with_parameter("0.5")))

    assert keys(store) == before
    dry = resume_run(store, submitter, RUN, change=WorkflowChange(with_parameter("0.5")), dry_run=True)
    assert [(one.drift, one.action) for one in dry.plan.drift] == [(DriftClass.PARAMETERS, "fork")]
    assert dry.plan.refusal is not None
    assert (dry.plan.refusal.exit_code, "another experiment" in dry.plan.refusal.message) == (4, True)


@pytest.mark.parametrize("field", ["default", "value"])
def test_a_changed_default_of_a_template_is_a_changed_parameter(
    field: str, store: Store, submitter: FakeSubmitter
) -> None:
    def with_default(text: str) -> Manifest:
        manifest = copy.deepcopy(PIPELINE)
        for template in manifest["spec"]["templates"]:
            if template["name"] in ("fit", "aside"):  # fit gets lr as an argument, which the default does not change
                template["inputs"] = {"parameters": [{"name": "lr", field: text}]}
        return manifest

    start_run(store, submitter, with_default("1.5"), RUN)
    history = History(store, RUN)
    for step in ("prep", "fit", "aside"):
        history.done(step)
    history.failed("report")
    submitter.end(RUN)

    dry = resume_run(store, submitter, RUN, change=WorkflowChange(with_default("2.5")), dry_run=True)

    assert words(dry.plan.drift) == ["aside: parameters lr 1.5 → 2.5"]
    assert set(dry.plan.running) == {"aside", "report"}
    assert dry.plan.refusal is not None


def test_a_changed_plain_task_takes_the_steps_that_rest_on_it_along(store: Store, submitter: FakeSubmitter) -> None:
    def with_seed(seed: str) -> Manifest:
        given = {"arguments": {"parameters": [{"name": "seed", "value": seed}]}}
        tasks = (plain("fetch", **given), plain("clean", depends="fetch"), gated("fit", depends="clean"))
        return pipeline_of(*tasks, gated("aside"), gated("report", depends="fit"))

    start_run(store, submitter, with_seed("1"), RUN)
    history = History(store, RUN)
    for step in ("fit", "aside"):
        history.done(step)
    history.failed("report")
    submitter.end(RUN)

    dry = resume_run(store, submitter, RUN, change=WorkflowChange(with_seed("2")), dry_run=True)

    assert words(dry.plan.drift) == ["fetch: parameters seed 1 → 2"]
    assert {step.name: step.reason for step in dry.plan.steps if step.name in ("fit", "aside")} == {
        "fit": "clean, which it needs, changed; taken over if it makes no difference",
        "aside": "done in attempt 1",
    }
    assert set(dry.plan.running) == {"fetch", "clean", "fit", "report"}


def test_a_changed_condition_decides_anew(store: Store, submitter: FakeSubmitter) -> None:
    def with_condition(text: str) -> Manifest:
        task = ungated("fit", when=f"{{{{workflow.parameters.epochs}}}} > {text}")
        return pipeline_of(task, gated("report", depends="fit"), parameters={"epochs": "3"})

    start_run(store, submitter, with_condition("1"), RUN)
    history = History(store, RUN)
    history.done("fit")
    history.failed("report")
    submitter.end(RUN)

    dry = resume_run(store, submitter, RUN, change=WorkflowChange(with_condition("5")), dry_run=True)

    assert words(dry.plan.drift) == ["fit: parameters when 3 > 1 → 3 > 5"]
    assert dry.plan.running == ("fit", "report")
    assert dry.plan.refusal is not None


@pytest.mark.parametrize(
    ("kind", "argument", "drift"),
    [
        ("parameters", {"value": "{{inputs.parameters.rate}}"}, "parameters rate"),
        ("parameters", {"value": "{{=asInt(inputs.parameters['rate'])}}"}, "parameters inputs.parameters.rate"),
        ("artifacts", {"from": "{{inputs.artifacts.rate}}"}, "data rate"),
    ],
)
@pytest.mark.parametrize("place", ["the entry point", "the Workflow"])
def test_a_changed_input_of_the_entry_point_is_a_changed_input_of_the_steps_that_take_it(
    place: str, kind: str, argument: Manifest, drift: str, store: Store, submitter: FakeSubmitter
) -> None:
    def with_input(text: str) -> CompiledPipeline:
        manifest = copy.deepcopy(PIPELINE)
        spec = manifest["spec"]
        given = {"value": text} if kind == "parameters" else {"raw": {"data": text}}
        [entry] = [template for template in spec["templates"] if template["name"] == spec["entrypoint"]]
        entry["inputs"] = {kind: [{"name": "rate", **(given if place == "the entry point" else {})}]}
        if place == "the Workflow":
            spec["arguments"].setdefault(kind, []).append({"name": "rate", **given})
        [aside] = [task for task in entry["dag"]["tasks"] if task["name"] == "aside"]
        aside["arguments"] = {kind: [{"name": "rate", **argument}]}
        return CompiledPipeline.from_manifest(manifest)

    found = find_drift(with_input("1.5"), with_input("2.5"), DriftPolicy())

    assert [line.partition(drift)[:2] for line in words(found) if line.startswith("aside")] == [("aside: ", drift)]


def test_an_action_can_be_overridden(store: Store, submitter: FakeSubmitter, history: History) -> None:
    change = WorkflowChange(with_parameter("0.5"), {"parameters": "warn"})

    assert resume_run(store, submitter, RUN, change=change).plan.running == ("fit", "report")
    assert describe_run(RunHistory(store, RUN)).parameters == {"lr": "0.5"}


def test_the_author_says_what_may_not_change_at_all(store: Store, submitter: FakeSubmitter) -> None:
    strict = copy.deepcopy(PIPELINE)
    strict["metadata"]["annotations"][DRIFT_ANNOTATION] = json.dumps({"image": "refuse"})
    start_run(store, submitter, strict, RUN)
    submitter.end(RUN)

    for go_on in (resume_run, fork_run):
        with pytest.raises(ConflictError, match=r"may not go on with this: fit: image .*--drift image=warn"):
            go_on(store, submitter, RUN, change=WorkflowChange(REPAIRED))


@pytest.mark.parametrize("given", [{"colour": "warn"}, {"image": "perhaps"}])
def test_an_unknown_class_or_action_is_refused(
    store: Store, submitter: FakeSubmitter, history: History, given: dict[str, str]
) -> None:
    with pytest.raises(UsageError, match=r"classes are image, template, .*; actions allow, warn, fork, refuse"):
        resume_run(store, submitter, RUN, change=WorkflowChange(REPAIRED, given))


@pytest.mark.parametrize("what", ["pipeline", "store"])
def test_the_workflow_of_another_pipeline_is_refused(
    store: Store, submitter: FakeSubmitter, history: History, what: str
) -> None:
    other = copy.deepcopy(PIPELINE)
    other["metadata"]["annotations"][f"tiphys.dev/{what}"] = "letters"

    for go_on in (resume_run, fork_run):
        with pytest.raises(UsageError, match=f"run {RUN} is of the {what} .* and this Workflow of letters"):
            go_on(store, submitter, RUN, change=WorkflowChange(other))


@pytest.mark.parametrize("point", ["after_fence", "after_workflow", "after_claim", "after_create"])
def test_a_crash_loses_nothing_of_the_change(
    store: Store, submitter: FakeSubmitter, history: History, point: str
) -> None:
    with dying_at(f"resume.{point}"):
        resume_run(store, submitter, RUN, change=WorkflowChange(REPAIRED))

    again = WorkflowChange(REPAIRED) if point in ("after_fence", "after_workflow") else None
    assert resume_run(store, submitter, RUN, change=again).submission == 2
    assert submitter.names() == [RUN, f"{RUN}-2"]
    assert image_of(submitter.manifest(f"{RUN}-2"), "fit") == "python:3.13"


def test_a_claim_that_was_never_sent_is_not_used_for_another_workflow(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    with dying_at("resume.after_claim"):
        resume_run(store, submitter, RUN)

    with pytest.raises(ConflictError, match=r"never sent; .* which this request does not match"):
        resume_run(store, submitter, RUN, change=WorkflowChange(REPAIRED))


def test_a_recorded_workflow_that_is_gone_or_changed_is_reported(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    resume_run(store, submitter, RUN, change=WorkflowChange(REPAIRED))
    key = LAYOUT.workflow(read_submissions(store, RUN)[-1].claim.workflow)
    stored = json.loads(store.read(key))
    stored["workflow"]["spec"]["entrypoint"] = "other"

    for damage in (None, json.dumps(stored).encode()):
        store.delete(key)
        if damage:
            store.create(key, damage)
        with pytest.raises(IntegrityError, match=r"is not the Workflow that submission 2 .* was made of"):
            plan_run(store, RUN)


def test_a_fork_is_a_run_of_its_own_that_names_its_parent(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    before = [key for key in keys(store) if key.startswith(LAYOUT.control)]

    forked = fork_run(store, submitter, RUN, "hot", change=WorkflowChange(with_parameter("0.5")), rerun=["aside"])

    assert forked.started == StartResult("hot", 1, "hot", "uid-of-hot")
    assert fork_run(store, submitter, "hot", suffix=lambda: "bbbbb").started[0] == "digits-bbbbb"
    assert words(forked.drift) == ["fit: parameters lr 0.1 → 0.5"]
    record = read_run(store, "hot")
    assert (record.parent, record.rerun_steps, record.parameters) == (RUN, ("aside",), {"lr": "0.5"})
    [first] = read_submissions(store, "hot")
    assert (first.claim.kind, first.claim.rerun_since) == (SubmissionKind.FORK, {"aside": 1})
    assert [key for key in keys(store) if key.startswith(LAYOUT.control)] == before
    assert (describe_run(RunHistory(store, "hot")).parent, describe_run(RunHistory(store, RUN)).parent) == (RUN, "")
    assert len(submitter.manifest("hot")["spec"]["templates"][0]["dag"]["tasks"]) == 4


def test_a_fork_that_died_is_completed_by_a_resume(store: Store, submitter: FakeSubmitter, history: History) -> None:
    with dying_at("start.after_record"):
        fork_run(store, submitter, RUN, "hot", rerun=["aside"])

    resume_run(store, submitter, "hot")

    [first] = read_submissions(store, "hot")
    assert (first.claim.kind, first.claim.rerun_since) == (SubmissionKind.FORK, {"aside": 1})


def test_a_dry_fork_writes_nothing(store: Store, submitter: FakeSubmitter, history: History) -> None:
    before = keys(store)

    forked = fork_run(store, submitter, RUN, change=WorkflowChange(REPAIRED), dry_run=True)

    assert forked.started is None
    assert forked.plan.running == ("fit", "report")
    assert keys(store) == before


def test_a_fork_of_nothing_is_refused(store: Store, submitter: FakeSubmitter, history: History) -> None:
    with pytest.raises(NotFoundError, match="did you mean digits-1"):
        fork_run(store, submitter, "digits-2")
    with pytest.raises(NotFoundError, match="no step 'fitt'"):
        fork_run(store, submitter, RUN, rerun=["fitt"])
    with pytest.raises(ConflictError, match=f"already has a run '{RUN}'"):
        fork_run(store, submitter, RUN, RUN)
    with pytest.raises(UsageError, match="run name"):
        fork_run(store, submitter, RUN, "../hot")
