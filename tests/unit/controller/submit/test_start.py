"""Starting a run: one record, one claim, one Workflow, one binding, each before the next.

| run name | run exists | Workflow of that name exists | outcome |
|---|---|---|---|
| given | no | no | started under it |
| given | yes | – | refused: resume it |
| given | no | yes | refused: a stranger's |
| the author's, `run_name` | no | no | started under it; another name is refused |
| none | no | no | started under pipeline and five characters |
| none | first try taken | no | started under the next |
"""

import pytest
from support.builders.compiled_workflows import gated, pipeline_of
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import StartResult, TenantSubmitter, start_run
from tiphys_controller.submit.start import random_suffix

from tiphys.errors import ConflictError, UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION
from tiphys.records import SubmissionBinding, SubmissionKind, check_run_name
from tiphys.store import RunLayout, Store, list_runs, read_run, read_submissions

PIPELINE = pipeline_of(gated("prep"), parameters={"lr": "0.1"})


def test_a_started_run_is_recorded_claimed_created_and_bound(store: Store, submitter: FakeSubmitter) -> None:
    metadata = PIPELINE["metadata"]
    annotations = {**metadata["annotations"], CODE_VERSION_ANNOTATION: "0fb1"}
    pipeline = {**PIPELINE, "metadata": {**metadata, "annotations": annotations}}

    started = start_run(store, submitter, pipeline, "digits-1", "ml")

    assert started == StartResult("digits-1", 1, "digits-1", "uid-of-digits-1")
    record = read_run(store, "digits-1")
    assert record.code_version == "0fb1"
    assert record.pipeline == "digits"
    assert record.parameters == {"lr": "0.1"}
    [submission] = read_submissions(store, "digits-1")
    assert submission.claim.kind is SubmissionKind.ORIGINAL
    assert submission.claim.namespace == "ml"
    assert submission.binding is not None
    assert (submission.binding.cluster, submission.binding.uid) == ("west", "uid-of-digits-1")
    assert submitter.manifest("digits-1", "ml") == record.workflow


def test_a_workflow_is_announced_before_it_is_created(store: Store, submitter: FakeSubmitter) -> None:
    announced: list[tuple[str, list[str]]] = []
    tenant = TenantSubmitter(
        submitter, "ml", lambda manifest: announced.append((manifest["metadata"]["name"], submitter.names()))
    )

    started = start_run(store, tenant, PIPELINE, "digits-1", "ml")

    assert announced == [("digits-1", [])]
    assert started.uid == "uid-of-digits-1"


def test_the_workflow_knows_its_run_and_submission(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, "digits-1")

    manifest = submitter.manifest("digits-1")
    values = {p["name"]: p["value"] for p in manifest["spec"]["arguments"]["parameters"]}
    assert values == {"lr": "0.1", "tiphys-run": "digits-1", "tiphys-submission": "1"}
    assert manifest["metadata"]["name"] == "digits-1"
    assert "generateName" not in manifest["metadata"]
    assert manifest["metadata"]["labels"] == {"tiphys.dev/run": "digits-1"}


def test_the_given_manifest_is_left_alone(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, "digits-1")

    assert pipeline_of(gated("prep"), parameters={"lr": "0.1"}) == PIPELINE


def test_a_run_without_a_name_gets_one(store: Store, submitter: FakeSubmitter) -> None:
    suffixes = iter(["bbbbb", "bbbbb", "ccccc"])

    first = start_run(store, submitter, PIPELINE, suffix=lambda: next(suffixes))
    submitter.delete(first.workflow_name)
    second = start_run(store, submitter, PIPELINE, suffix=lambda: next(suffixes))

    assert (first.run, second.run) == ("digits-bbbbb", "digits-ccccc")


def test_random_names_do_not_run_out_silently(store: Store, submitter: FakeSubmitter) -> None:
    submitter.delete(start_run(store, submitter, PIPELINE, "digits-bbbbb").workflow_name)

    with pytest.raises(ConflictError, match="already has a run 'digits-bbbbb'"):
        start_run(store, submitter, PIPELINE, suffix=lambda: "bbbbb")


def test_an_existing_run_is_not_started_again(store: Store, submitter: FakeSubmitter) -> None:
    submitter.delete(start_run(store, submitter, PIPELINE, "digits-1").workflow_name)

    with pytest.raises(ConflictError, match="tiphys resume digits-1"):
        start_run(store, submitter, PIPELINE, "digits-1")

    assert submitter.names() == []


def test_an_existing_run_is_distinguished_from_a_stranger_while_its_workflow_lives(
    store: Store, submitter: FakeSubmitter
) -> None:
    start_run(store, submitter, PIPELINE, "digits-1")

    with pytest.raises(ConflictError, match=r"already has a run 'digits-1'; .*`tiphys resume digits-1"):
        start_run(store, submitter, PIPELINE, "digits-1")


def named_by_author(text: str, **parameters: str) -> Manifest:
    """A pipeline whose operations are told ``text`` as their run."""
    manifest = pipeline_of(gated("prep"), parameters=parameters)
    manifest["spec"]["templates"][-1]["plugin"]["tiphys"]["run"] = text
    return manifest


def test_a_run_that_its_author_names_is_one_run_under_that_name(store: Store, submitter: FakeSubmitter) -> None:
    pipeline = named_by_author("digits-LR{{workflow.parameters.lr}}", lr="0.1")

    assert start_run(store, submitter, pipeline).run == "digits-lr0.1"

    assert list(list_runs(store)) == ["digits-lr0.1"]
    with pytest.raises(ConflictError, match=r"tiphys resume digits-lr0\.1"):
        start_run(store, submitter, pipeline)


def test_a_name_that_the_author_gave_is_not_overruled(store: Store, submitter: FakeSubmitter) -> None:
    pipeline = named_by_author("digits-lr{{workflow.parameters.lr}}", lr="0.1")

    with pytest.raises(UsageError, match=r"names its runs itself, and this one 'digits-lr0\.1', not 'hot'"):
        start_run(store, submitter, pipeline, "hot")

    assert list(store.list("")) == []
    assert start_run(store, submitter, pipeline, "digits-lr0.1").run == "digits-lr0.1"


def test_a_run_name_without_its_parameter_is_refused(store: Store, submitter: FakeSubmitter) -> None:
    with pytest.raises(UsageError, match="a parameter in it has no value"):
        start_run(store, submitter, named_by_author("digits-{{workflow.parameters.lr}}"))

    assert list(store.list("")) == []


def test_a_run_that_the_parameter_names_goes_by_any_name(store: Store, submitter: FakeSubmitter) -> None:
    pipeline = named_by_author("{{workflow.parameters.tiphys-run}}")

    assert start_run(store, submitter, pipeline, "hot").run == "hot"


def test_a_stranger_with_the_runs_name_is_not_taken_for_it(store: Store, submitter: FakeSubmitter) -> None:
    submitter.create({"metadata": {"name": "digits-1", "namespace": "default"}})

    with pytest.raises(ConflictError, match=r"already has a Workflow default/digits-1 .* choose another run name"):
        start_run(store, submitter, PIPELINE, "digits-1")

    assert list(store.list("")) == []


@pytest.mark.parametrize("run", ["Digits", "a" * 64, "a/b", "-a"])
def test_a_name_that_cannot_be_a_key_is_refused(store: Store, submitter: FakeSubmitter, run: str) -> None:
    with pytest.raises(UsageError, match="run name"):
        start_run(store, submitter, PIPELINE, run)

    assert list(store.list("")) == []


def test_a_foreign_workflow_is_refused(store: Store, submitter: FakeSubmitter) -> None:
    with pytest.raises(UsageError, match="Tiphys did not compile it"):
        start_run(store, submitter, {"metadata": {"name": "x"}, "spec": {"entrypoint": "main", "templates": []}})

    assert list(store.list("")) == []


def test_random_suffixes_may_end_a_run_name() -> None:
    suffixes = {random_suffix() for _ in range(50)}

    assert len(suffixes) > 40
    assert all(check_run_name(f"digits-{suffix}") and len(suffix) == 5 for suffix in suffixes)


def test_a_workflow_bound_to_the_first_submission_by_another_is_named(store: Store, submitter: FakeSubmitter) -> None:
    taken = SubmissionBinding(
        run="digits-1", submission=1, cluster="east", namespace="default", workflow_name="other", uid="another"
    )
    store.create(RunLayout("digits-1").submission_binding(1), taken.to_bytes())

    with pytest.raises(ConflictError, match=r"is Workflow other \(uid another\) in cluster east; .* delete it"):
        start_run(store, submitter, PIPELINE, "digits-1")


def test_a_first_submission_that_another_claimed_is_named(store: Store, submitter: FakeSubmitter) -> None:
    with dying_at("start.after_claim"):
        start_run(store, submitter, PIPELINE, "digits-1")
    store.delete(RunLayout("digits-1").run_record)

    with pytest.raises(ConflictError, match="another process submitted run digits-1 at the same time"):
        start_run(store, submitter, PIPELINE, "digits-1")

    assert submitter.names() == []
