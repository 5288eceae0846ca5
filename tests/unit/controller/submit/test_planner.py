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
from support.compiled import History, gated, pipeline_of
from support.faults import dying_at
from support.lineage import commit, ref
from support.submitter import FakeSubmitter
from tiphys_controller import Change, Difference, describe, fork, in_words, plan_run, resume, start

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.drift_policy import DRIFT_ANNOTATION, Drift
from tiphys.protocol.step_spec import STEP_ANNOTATION, Kind
from tiphys.records import Facts, SubmissionKind
from tiphys.store import RunLayout, Store, read_run, submissions

RUN = "digits-1"
LAYOUT = RunLayout(RUN)
GIVEN = {"arguments": {"parameters": [{"name": "lr", "value": "{{workflow.parameters.lr}}"}]}}
PIPELINE = pipeline_of(
    gated("prep"),
    gated("fit", kind=Kind.TRAIN, depends="prep", **GIVEN),
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
    start(store, submitter, PIPELINE, RUN)
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


def words(found: tuple[Difference, ...]) -> list[str]:
    return [in_words(one) for one in found]


def test_a_changed_step_runs_with_all_behind_it_and_nothing_else(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    resumed = resume(store, submitter, RUN, change=Change(REPAIRED))

    assert resumed.plan.running == ("fit", "report")
    assert words(resumed.plan.drift) == ["fit: image image python:3.12 → python:3.13"]
    assert [step.reason for step in resumed.plan.steps if step.name == "fit"] == [
        "its image changed; taken over if it makes no difference"
    ]
    assert image_of(submitter.manifest(f"{RUN}-2"), "fit") == "python:3.13"


def test_what_it_was_made_of_is_on_record_and_the_first_workflow_stays(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    before = store.read(LAYOUT.record)

    resume(store, submitter, RUN, change=Change(REPAIRED))

    claim = submissions(store, RUN)[-1].claim
    stored = json.loads(store.read(LAYOUT.workflow(claim.workflow)))
    assert image_of(stored["workflow"], "fit") == "python:3.13"
    assert store.read(LAYOUT.record) == before


def test_a_plain_resume_goes_on_with_what_was_changed(store: Store, submitter: FakeSubmitter, history: History) -> None:
    resume(store, submitter, RUN, change=Change(REPAIRED))
    submitter.end(f"{RUN}-2")

    assert resume(store, submitter, RUN).plan.running == ("fit", "report")
    assert image_of(submitter.manifest(f"{RUN}-3"), "fit") == "python:3.13"
    assert resume_with_the_first_again(store, submitter) == "python:3.12"


def resume_with_the_first_again(store: Store, submitter: FakeSubmitter) -> str:
    submitter.end(f"{RUN}-3")
    resume(store, submitter, RUN, change=Change(PIPELINE))
    return image_of(submitter.manifest(f"{RUN}-4"), "fit")


def test_the_same_workflow_is_no_change(store: Store, submitter: FakeSubmitter, history: History) -> None:
    resumed = resume(store, submitter, RUN, change=Change(PIPELINE))

    assert (resumed.plan.running, resumed.plan.drift) == (("report",), ())
    assert submissions(store, RUN)[-1].claim.workflow == ""
    assert not [key for key in keys(store) if "/workflows/" in key]


def test_resources_are_told_and_run_nothing_again(store: Store, submitter: FakeSubmitter, history: History) -> None:
    change = Change(edited("fit", resources={"limits": {"memory": "2Gi"}}))

    resumed = resume(store, submitter, RUN, change=change)

    assert words(resumed.plan.drift) == ["fit: template resources.limits.memory nothing → 2Gi"]
    assert resumed.plan.running == ("report",)


def test_memory_that_admit_answers_is_told_like_any_other(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    manifest = copy.deepcopy(PIPELINE)
    [admit] = [one for one in manifest["spec"]["templates"] if one["name"] == "fit-admit"]
    admit["outputs"] = {"parameters": [{"name": "memory-limit", "valueFrom": {"default": "2Gi", "supplied": {}}}]}
    resumed = resume(store, submitter, RUN, dry_run=True, change=Change(manifest))
    assert words(resumed.plan.drift) == ["fit: template resources.limits.memory nothing → 2Gi"]


def test_long_values_are_told_from_where_they_differ(store: Store, submitter: FakeSubmitter, history: History) -> None:
    """A long command ends in what was changed."""
    long = ["python", "-m", "train", "--data", "/mnt/a/very/long/path/to/the/data", "--lr"]
    start(store, submitter, edited("fit", command=[*long, "0.1"]), "long")
    submitter.end("long")

    resumed = resume(store, submitter, "long", change=Change(edited("fit", command=[*long, "0.3"])))

    assert words(resumed.plan.drift) == ["fit: template command … '--lr', '0.1'] → … '--lr', '0.3']"]


def trained(store: Store, submitter: FakeSubmitter) -> None:
    """A run whose training saved a checkpoint and failed."""
    pipeline = copy.deepcopy(PIPELINE)
    for template in pipeline["spec"]["templates"]:
        if template["name"] == "fit":
            annotations = template["metadata"]["annotations"]
            spec = json.loads(annotations[STEP_ANNOTATION]) | {"checkpoints": {}}
            annotations[STEP_ANNOTATION] = json.dumps(spec)
    start(store, submitter, pipeline, RUN)
    History(store, RUN).failed("fit")
    commit(store, ref(1, 10), facts=Facts(versions={"python": "3.11.7", "torch": "2.7.0"}))
    submitter.end(RUN)


def test_a_training_that_would_meet_other_frameworks_is_told(store: Store, submitter: FakeSubmitter) -> None:
    trained(store, submitter)
    here = {"python": "3.11.7", "torch": "2.8.0"}

    resumed = resume(store, submitter, RUN, change=Change(installed=lambda package: here[package]), dry_run=True)

    assert words(resumed.plan.drift) == ["fit: versions torch 2.7.0 → 2.8.0"]
    assert resume(store, submitter, RUN, change=Change(installed=lambda _: "1"), again=["fit"]).plan.drift == ()


def test_other_frameworks_may_be_refused(store: Store, submitter: FakeSubmitter) -> None:
    trained(store, submitter)

    with pytest.raises(ConflictError, match=r"may not go on with this: fit: versions python 3\.11\.7 → nothing"):
        resume(store, submitter, RUN, change=Change(None, {"versions": "refuse"}, lambda _: ""))


def test_another_parameter_is_another_experiment(store: Store, submitter: FakeSubmitter, history: History) -> None:
    before = keys(store)

    with pytest.raises(ConflictError, match=r"another experiment .*: fit: parameters lr 0\.1 → 0\.5; .*tiphys fork"):
        resume(store, submitter, RUN, change=Change(with_parameter("0.5")))

    assert keys(store) == before
    dry = resume(store, submitter, RUN, change=Change(with_parameter("0.5")), dry_run=True)
    assert [(one.drift, one.action) for one in dry.plan.drift] == [(Drift.PARAMETERS, "fork")]


def test_an_action_can_be_overridden(store: Store, submitter: FakeSubmitter, history: History) -> None:
    change = Change(with_parameter("0.5"), {"parameters": "warn"})

    assert resume(store, submitter, RUN, change=change).plan.running == ("fit", "report")
    assert describe(store, RUN).parameters == {"lr": "0.5"}


def test_the_author_says_what_may_not_change_at_all(store: Store, submitter: FakeSubmitter) -> None:
    strict = copy.deepcopy(PIPELINE)
    strict["metadata"]["annotations"][DRIFT_ANNOTATION] = json.dumps({"image": "refuse"})
    start(store, submitter, strict, RUN)
    submitter.end(RUN)

    for go_on in (resume, fork):
        with pytest.raises(ConflictError, match=r"may not go on with this: fit: image .*--drift image=warn"):
            go_on(store, submitter, RUN, change=Change(REPAIRED))


@pytest.mark.parametrize("given", [{"colour": "warn"}, {"image": "perhaps"}])
def test_an_unknown_class_or_action_is_refused(
    store: Store, submitter: FakeSubmitter, history: History, given: dict[str, str]
) -> None:
    with pytest.raises(UsageError, match=r"classes are image, template, .*; actions allow, warn, fork, refuse"):
        resume(store, submitter, RUN, change=Change(REPAIRED, given))


@pytest.mark.parametrize("what", ["pipeline", "store"])
def test_the_workflow_of_another_pipeline_is_refused(
    store: Store, submitter: FakeSubmitter, history: History, what: str
) -> None:
    other = copy.deepcopy(PIPELINE)
    other["metadata"]["annotations"][f"tiphys.dev/{what}"] = "letters"

    for go_on in (resume, fork):
        with pytest.raises(UsageError, match=f"run {RUN} is of the {what} .* and this Workflow of letters"):
            go_on(store, submitter, RUN, change=Change(other))


@pytest.mark.parametrize("point", ["after_fence", "after_workflow", "after_claim", "after_create"])
def test_a_crash_loses_nothing_of_the_change(
    store: Store, submitter: FakeSubmitter, history: History, point: str
) -> None:
    with dying_at(f"resume.{point}"):
        resume(store, submitter, RUN, change=Change(REPAIRED))

    again = Change(REPAIRED) if point in ("after_fence", "after_workflow") else None
    assert resume(store, submitter, RUN, change=again).submission == 2
    assert submitter.names() == [RUN, f"{RUN}-2"]
    assert image_of(submitter.manifest(f"{RUN}-2"), "fit") == "python:3.13"


def test_a_claim_that_was_never_sent_is_not_used_for_another_workflow(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    with dying_at("resume.after_claim"):
        resume(store, submitter, RUN)

    with pytest.raises(ConflictError, match=r"never sent, .* not what is asked now"):
        resume(store, submitter, RUN, change=Change(REPAIRED))


def test_a_recorded_workflow_that_is_gone_or_changed_is_told(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    resume(store, submitter, RUN, change=Change(REPAIRED))
    key = LAYOUT.workflow(submissions(store, RUN)[-1].claim.workflow)
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
    before = keys(store)

    forked = fork(store, submitter, RUN, "hot", change=Change(with_parameter("0.5")), again=["aside"])

    assert forked.started == ("hot", 1, "hot", "uid-of-hot", True)
    assert fork(store, submitter, "hot", suffix=lambda: "bbbbb").started[0] == "digits-bbbbb"
    assert words(forked.drift) == ["fit: parameters lr 0.1 → 0.5"]
    record = read_run(store, "hot")
    assert (record.parent, record.fresh, record.parameters) == (RUN, ("aside",), {"lr": "0.5"})
    [first] = submissions(store, "hot")
    assert (first.claim.kind, first.claim.fresh_since) == (SubmissionKind.FORK, {"aside": 1})
    assert [key for key in keys(store) if key.startswith(LAYOUT.prefix)] == before
    assert (describe(store, "hot").parent, describe(store, RUN).parent) == (RUN, "")
    assert len(submitter.manifest("hot")["spec"]["templates"][0]["dag"]["tasks"]) == 4


def test_a_fork_that_died_is_completed_by_a_resume(store: Store, submitter: FakeSubmitter, history: History) -> None:
    with dying_at("start.after_record"):
        fork(store, submitter, RUN, "hot", again=["aside"])

    resume(store, submitter, "hot")

    [first] = submissions(store, "hot")
    assert (first.claim.kind, first.claim.fresh_since) == (SubmissionKind.FORK, {"aside": 1})


def test_a_dry_fork_writes_nothing(store: Store, submitter: FakeSubmitter, history: History) -> None:
    before = keys(store)

    forked = fork(store, submitter, RUN, change=Change(REPAIRED), dry_run=True)

    assert forked.started is None
    assert forked.plan.running == ("fit", "report")
    assert keys(store) == before


def test_a_fork_of_nothing_is_refused(store: Store, submitter: FakeSubmitter, history: History) -> None:
    with pytest.raises(NotFoundError, match="did you mean digits-1"):
        fork(store, submitter, "digits-2")
    with pytest.raises(UsageError, match="no step 'fitt'"):
        fork(store, submitter, RUN, again=["fitt"])
    with pytest.raises(ConflictError, match=f"already has a run '{RUN}'"):
        fork(store, submitter, RUN, RUN)
    with pytest.raises(UsageError, match="run name"):
        fork(store, submitter, RUN, "../hot")
