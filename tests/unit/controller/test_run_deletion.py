"""Deleting a run: what keeps it, what goes, and what a deletion that was killed leaves.

| state of the run | outcome |
|---|---|
| ended, nothing rests on it | deleted |
| its Workflow runs | kept, also with --force |
| its Workflow is in another cluster, without an end | kept; --force deletes |
| claimed and not sent | kept; --force deletes |
| recorded, never submitted | deleted |
| a fork of it stays | kept |
| a run that stays shares its result | kept |
| its forks are deleted with it | deleted, the forks first |
| a checkpoint is pinned | kept |
| its deletion was begun | deleted, whatever was left |
"""

from collections.abc import Callable
from datetime import timedelta

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of, ungated
from support.builders.lineage import claim_of, commit, write_claim
from support.fakes.memory_store import MemoryStore
from support.fakes.submitted_workflow import SubmittedWorkflow
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import fork_run, list_run_summaries, resume_run, run_deletion, start_run
from tiphys_controller.cleanup import WorkflowPresence, find_stalled_runs
from tiphys_controller.run_deletion import RunDeletion, delete_runs, plan_deletions

from tiphys.errors import ConflictError, NotFoundError, StoreError, TiphysError
from tiphys.lineage.retention.policy import list_pins, pin_checkpoint, unpin_checkpoint
from tiphys.protocol.step_spec import StepKind
from tiphys.records import CheckpointRef, MemoRecord, ReuseRecord, SubmissionClaim, SubmissionKind, json_digest, utc_now
from tiphys.store import (
    RunLayout,
    Store,
    claim_record,
    lineage_name,
    list_newest_runs,
    list_open_submissions,
    list_runs,
    memo_key,
    read_run,
    read_submissions,
)
from tiphys.store.layout import FORMAT_MARKER
from tiphys.store.run_markers import OPEN
from tiphys.store.workflow_layout import OutputOrigin, output_origin, output_origins, pod_outputs, workflow_outputs

RUN = "digits-1"
PIPELINE = pipeline_of(gated("prep"), gated("fit", kind=StepKind.TRAIN, depends="prep"))


def ended(store: Store, submitter: FakeSubmitter, run: str = RUN) -> History:
    """A run that has a result and checkpoints, and whose Workflow failed."""
    start_run(store, submitter, PIPELINE, run)
    return with_records(store, submitter, run)


def with_records(store: Store, submitter: FakeSubmitter, run: str) -> History:
    history = History(store, run)
    history.done("prep", artifacts={"data": b"xyz"})
    lineage = lineage_name(run, "fit")
    write_claim(store, claim_of(1, step="fit").model_copy(update={"run": run, "lineage": lineage}))
    for step in (10, 20):
        commit(store, CheckpointRef(lineage=lineage, attempt=1, global_step=step))
    uid, pod = submitter.uid(run), f"{run}-check-1"
    store.create(f"{pod_outputs(uid, pod)}report.html", b"<p>")
    store.create(output_origin(uid, OutputOrigin(pod, run, "check", 1)), b"")
    submitter.end(run)
    return history


def keys_of(store: Store, run: str) -> list[str]:
    layout = RunLayout(run)
    prefixes = [layout.control, layout.data, layout.lineages]
    for uid in (f"uid-of-{run}", f"uid-of-{run}-2"):
        prefixes += [workflow_outputs(uid), output_origins(uid)]
    return [info.key for prefix in prefixes for info in store.list(prefix)]


def reasons(deletions: list[RunDeletion]) -> dict[str, str]:
    return {one.run: "; ".join(one.kept_because) for one in deletions}


def test_a_plan_counts_everything_and_writes_nothing(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    before = list(store.list(""))
    [planned] = plan_deletions(store, submitter, [RUN])
    own = [info for info in before if info.key in keys_of(store, RUN)]
    assert planned == RunDeletion(RUN, len(own), sum(info.size for info in own))
    assert list(store.list("")) == before


def test_a_deletion_removes_every_object_of_the_run_and_of_no_other(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter, "digits-10")
    other = keys_of(store, "digits-10")
    ended(store, submitter)
    assert reasons(delete_runs(store, submitter, [RUN])) == {RUN: ""}
    assert keys_of(store, RUN) == []
    assert keys_of(store, "digits-10") == other
    assert list(list_runs(store)) == list(list_newest_runs(store)) == ["digits-10"]
    assert [opened.run for opened in list_open_submissions(store)] == ["digits-10"]
    with pytest.raises(NotFoundError, match="has no run 'digits-1'; did you mean digits-10"):
        delete_runs(store, submitter, [RUN])


def test_outputs_below_the_workflows_of_all_submissions_go(store: Store, submitter: FakeSubmitter) -> None:
    prep, check = ungated("prep", artifacts=("data",)), ungated("check", artifacts=("report",))
    start_run(store, submitter, pipeline_of(prep, check), RUN)
    SubmittedWorkflow.of(store, submitter, RUN).run_task("prep", artifacts={"data": b"1,2"})
    submitter.end(RUN)
    resume_run(store, submitter, RUN)
    SubmittedWorkflow.of(store, submitter, f"{RUN}-2").run_task("check", artifacts={"report": b"<p>"})
    submitter.end(f"{RUN}-2")
    folders = {info.key.split("/")[2] for info in store.list("data/workflows/")}
    assert folders == {f"uid-of-{RUN}", f"uid-of-{RUN}-2"}
    assert len(list(store.list("control/workflows/"))) == 2

    delete_runs(store, submitter, [RUN])

    assert [info.key for info in store.list("")] == [FORMAT_MARKER]


def test_long_work_goes_in_batches_and_is_reported(
    store: Store, submitter: FakeSubmitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_deletion, "_BATCH", 2)
    ended(store, submitter)
    said: list[str] = []
    [deletion] = delete_runs(store, submitter, [RUN], progress=said.append)
    assert f"deleting {deletion.objects} objects of run {RUN}" in said
    assert f"deleted 2 objects of run {RUN}" in said
    assert keys_of(store, RUN) == []


def test_the_name_is_free_afterwards(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    delete_runs(store, submitter, [RUN])
    submitter.delete(RUN)
    start_run(store, submitter, PIPELINE, RUN)
    submitter.end(RUN)
    assert resume_run(store, submitter, RUN).plan.running == ("prep", "fit")


@pytest.mark.parametrize("force", [False, True])
def test_a_running_run_is_kept(store: Store, submitter: FakeSubmitter, force: bool) -> None:
    start_run(store, submitter, PIPELINE, RUN)
    before = list(store.list(""))
    assert "it is running" in reasons(delete_runs(store, submitter, [RUN], force))[RUN]
    assert list(store.list("")) == before


def test_a_run_that_may_run_elsewhere_is_kept_without_force(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    east = FakeSubmitter(submitter.folder.with_name("east"), "east")
    assert "it may be running" in reasons(delete_runs(store, east, [RUN]))[RUN]
    assert reasons(delete_runs(store, east, [RUN], force=True)) == {RUN: ""}
    assert keys_of(store, RUN) == []


def test_a_claim_that_is_about_to_be_sent_keeps_the_run_without_force(store: Store, submitter: FakeSubmitter) -> None:
    with dying_at("start.after_claim"):
        start_run(store, submitter, PIPELINE, RUN)
    assert "submission 1 was claimed and not sent" in reasons(delete_runs(store, submitter, [RUN]))[RUN]
    assert reasons(delete_runs(store, submitter, [RUN], force=True)) == {RUN: ""}
    assert keys_of(store, RUN) == []


def test_a_run_that_was_only_recorded_goes(store: Store, submitter: FakeSubmitter) -> None:
    with dying_at("start.after_record"):
        start_run(store, submitter, PIPELINE, RUN)
    delete_runs(store, submitter, [RUN])
    assert keys_of(store, RUN) == []


def test_a_pinned_checkpoint_keeps_the_run(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    ref = CheckpointRef(lineage=lineage_name(RUN, "fit"), attempt=1, global_step=10)
    pin_checkpoint(store, ref, "release")
    before = list(store.list(""))
    assert "is pinned as release" in reasons(delete_runs(store, submitter, [RUN]))[RUN]
    assert list(store.list("")) == before
    unpin_checkpoint(store, ref, "release")
    assert reasons(delete_runs(store, submitter, [RUN])) == {RUN: ""}


def test_a_fork_keeps_its_parent_until_it_is_deleted_too(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    fork_run(store, submitter, RUN, "child")
    fork_run(store, submitter, "child", "grandchild")
    for run in ("child", "grandchild"):
        submitter.end(run)
    assert reasons(delete_runs(store, submitter, [RUN, "child"])) == {
        "child": "run grandchild is a fork of it",
        RUN: "run child is a fork of it",
    }
    deleted = delete_runs(store, submitter, [RUN, "child", "grandchild"])
    assert [(one.run, one.kept_because) for one in deleted] == [("grandchild", ()), ("child", ()), (RUN, ())]
    assert list(list_runs(store)) == []


def test_a_deleted_fork_leaves_no_pin_in_its_parent(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    start = CheckpointRef(lineage=lineage_name(RUN, "fit"), attempt=1, global_step=20)
    fork_run(store, submitter, RUN, "child")
    pin_checkpoint(store, start, "fork-child", by="admit")
    lineage = lineage_name("child", "fit")
    write_claim(store, claim_of(1, start, step="fit").model_copy(update={"run": "child", "lineage": lineage}))
    submitter.end("child")
    delete_runs(store, submitter, ["child"])
    assert list_pins(store, start.lineage) == {}
    assert reasons(delete_runs(store, submitter, [RUN])) == {RUN: ""}


def reuse(store: Store, run: str, source: str) -> None:
    record = ReuseRecord(
        run=run,
        submission=1,
        step="prep",
        step_key=json_digest("prep"),
        source_run=source,
        source_step="prep",
        source_attempt=1,
    )
    claim_record(store, RunLayout(run).reused(1, "prep"), record)


def test_a_run_that_shares_a_result_keeps_its_source(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    start_run(store, submitter, PIPELINE, "sharing")
    submitter.end("sharing")
    reuse(store, "sharing", RUN)
    assert reasons(delete_runs(store, submitter, [RUN])) == {RUN: "run sharing shares the result of step prep of it"}
    assert reasons(delete_runs(store, submitter, [RUN, "sharing"])) == {"sharing": "", RUN: ""}


def test_runs_that_share_results_of_each_other_can_be_deleted_together(store: Store, submitter: FakeSubmitter) -> None:
    for run, source in (("one", "two"), ("two", "one")):
        ended(store, submitter, run)
        reuse(store, run, source)
    assert reasons(delete_runs(store, submitter, ["one", "two"])) == {"one": "", "two": ""}
    assert list(list_runs(store)) == []


def test_a_run_that_cannot_be_read_may_rest_on_any_other(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    store.create(RunLayout("torn").run_record, b"{")
    assert "run torn cannot be read, and may rest on it" in reasons(delete_runs(store, submitter, [RUN]))[RUN]
    delete_runs(store, submitter, ["torn"])
    assert reasons(delete_runs(store, submitter, [RUN])) == {RUN: ""}


def test_shared_results_of_the_run_are_no_longer_offered(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    own, other = memo_key(json_digest("prep")), memo_key(json_digest("other"))
    claim_record(store, own, MemoRecord(run=RUN, step="prep", attempt=1))
    claim_record(store, other, MemoRecord(run="another", step="prep", attempt=1))
    delete_runs(store, submitter, [RUN])
    assert [info.key for info in store.list("control/memo/")] == [other]


def test_the_idempotency_key_of_a_deleted_run_can_be_used_again(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, RUN, key="nightly")
    submitter.end(RUN)
    delete_runs(store, submitter, [RUN])
    submitter.delete(RUN)
    assert start_run(store, submitter, PIPELINE, RUN, key="nightly").created


def test_of_a_deletion_and_a_resume_only_one_begins(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    with dying_at("resume.after_fence"):
        resume_run(store, submitter, RUN)
    with dying_at("delete_run.after_claim"):
        delete_runs(store, submitter, [RUN])
    for call in (resume_run, fork_run):
        with pytest.raises(NotFoundError, match="was partly deleted; `tiphys runs rm digits-1 --yes` deletes the rest"):
            call(store, submitter, RUN)
    assert submitter.names() == [RUN]


class _Interleaved(MemoryStore):
    """Runs ``before`` once, right before the first write of a key that ends with ``suffix``."""

    def __init__(self, suffix: str, before: Callable[[], object]) -> None:
        super().__init__()
        self.suffix, self.before = suffix, before

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        if self.suffix and key.endswith(self.suffix):
            self.suffix = ""
            self.before()
        super().create(key, data, sha256=sha256)


def test_a_resume_that_planned_before_the_deletion_submits_nothing(submitter: FakeSubmitter) -> None:
    store = _Interleaved("", lambda: delete_runs(store, submitter, [RUN]))
    ended(store, submitter)
    store.suffix = "submissions/000000002.json"

    def begin_deletion() -> None:
        with dying_at("delete_run.after_claim"):
            delete_runs(store, submitter, [RUN])

    store.before = begin_deletion
    # The deletion's own claim has the same key, so it is the first writer that is interrupted, and it is the resume.
    with pytest.raises(NotFoundError, match="was partly deleted"):
        resume_run(store, submitter, RUN)
    assert submitter.names() == [RUN]


def test_a_resume_that_claims_first_keeps_the_run(submitter: FakeSubmitter) -> None:
    store = _Interleaved("", lambda: resume_run(store, submitter, RUN))
    ended(store, submitter)
    store.suffix = "submissions/000000002.json"
    assert reasons(delete_runs(store, submitter, [RUN])) == {
        RUN: "another process submitted it at the same time, as submission 2"
    }
    assert [one.claim.kind for one in read_submissions(store, RUN)] == [SubmissionKind.ORIGINAL, SubmissionKind.RESUME]


def test_a_fork_that_was_recorded_before_the_claim_keeps_the_run(submitter: FakeSubmitter) -> None:
    store = _Interleaved("", lambda: fork_run(store, submitter, RUN, "child"))
    ended(store, submitter)
    store.suffix = "submissions/000000002.json"
    assert reasons(delete_runs(store, submitter, [RUN])) == {RUN: "run child is a fork of it"}
    assert [one.claim.kind for one in read_submissions(store, RUN)] == [SubmissionKind.ORIGINAL]
    assert resume_run(store, submitter, RUN).submission == 2


def test_a_fork_that_planned_before_the_deletion_is_not_submitted(submitter: FakeSubmitter) -> None:
    store = _Interleaved("", lambda: delete_runs(store, submitter, [RUN]))
    ended(store, submitter)
    store.suffix = "child/run.json"
    with pytest.raises(NotFoundError):
        fork_run(store, submitter, RUN, "child")
    assert keys_of(store, RUN) == []
    assert submitter.names() == [RUN]


def test_the_janitor_reports_a_deletion_that_did_not_finish(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    with dying_at("delete_run.after_claim"):
        delete_runs(store, submitter, [RUN])
    later = utc_now() + timedelta(days=365)
    presence = WorkflowPresence("west", lambda binding: True)
    marker, found = find_stalled_runs(store, presence, later)
    assert marker.reason.startswith("submission 2 has replaced submission 1")
    assert "`tiphys runs rm digits-1 --yes` deletes the rest" in found.reason


def _die_after(store: MemoryStore, writes: int) -> None:
    """All writes and deletions after the first ``writes`` fail, as after the death of the process."""
    left = [writes]

    def refuses(operation: str, key: str) -> bool:
        if operation not in ("create", "delete"):
            return False
        left[0] -= 1
        return left[0] < 0

    store.refuses = refuses


def test_a_deletion_that_is_killed_at_any_write_is_completed_by_the_next(submitter: FakeSubmitter) -> None:
    whole = MemoryStore()
    start_run(whole, submitter, PIPELINE, RUN, key="nightly")
    with_records(whole, submitter, RUN)
    resume_run(whole, submitter, RUN)
    submitter.end(f"{RUN}-2")
    ended(whole, submitter, "other")
    claim_record(whole, memo_key(json_digest("prep")), MemoRecord(run=RUN, step="prep", attempt=1))
    others = keys_of(whole, "other")
    deaths = 0
    for writes in range(200):
        store = MemoryStore(whole.objects)
        _die_after(store, writes)
        try:
            delete_runs(store, submitter, [RUN])
            break
        except StoreError:
            deaths += 1
        store.refuses = lambda operation, key: False
        if not keys_of(store, RUN):  # its markers are left, which the janitor removes
            start_run(store, FakeSubmitter(submitter.folder / f"free-{writes}"), PIPELINE, RUN)
            continue
        assert_not_taken_for_sound(store, submitter, whole)
        assert reasons(delete_runs(store, submitter, [RUN])) == {RUN: ""}
        assert keys_of(store, RUN) == []
        assert keys_of(store, "other") == others
        assert list(store.list("control/memo/")) == list(store.list("control/idempotency-keys/")) == []
    assert deaths > 20
    assert keys_of(store, RUN) == []


def assert_not_taken_for_sound(store: MemoryStore, submitter: FakeSubmitter, whole: MemoryStore) -> None:
    """The run is untouched, or no command submits, forks or starts it."""
    if not {key for key in store.objects.keys() ^ whole.objects.keys() if not key.startswith(OPEN)}:
        return
    before = dict(store.objects)
    calls: list[Callable[[], object]] = [
        lambda: resume_run(store, submitter, RUN, force=True),
        lambda: fork_run(store, submitter, RUN),
        lambda: start_run(MemoryStore(before), FakeSubmitter(submitter.folder / "free"), PIPELINE, RUN),
    ]
    for call in calls:
        with pytest.raises(TiphysError):
            call()
    assert store.objects == before
    [summary] = [one for one in list_run_summaries(store, submitter) if one.run == RUN]
    assert "partly deleted" in summary.reason


def test_a_name_is_not_free_while_its_run_is_partly_deleted(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    with dying_at("delete_run.after_record"):
        delete_runs(store, submitter, [RUN])
    submitter.delete(RUN)
    with pytest.raises(ConflictError, match="partly deleted"):
        start_run(store, submitter, PIPELINE, RUN)
    with pytest.raises(ConflictError, match="partly deleted"):
        start_run(store, submitter, PIPELINE, RUN, key="key")
    with pytest.raises(NotFoundError, match="partly deleted"):
        read_run(store, RUN)


def test_a_run_without_its_record_is_deleted_despite_forks_and_pins(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    fork_run(store, submitter, RUN, "child")
    submitter.end("child")
    pin_checkpoint(store, CheckpointRef(lineage=lineage_name(RUN, "fit"), attempt=1, global_step=10), "release")
    store.delete(RunLayout(RUN).run_record)
    assert reasons(delete_runs(store, submitter, [RUN])) == {RUN: ""}
    assert keys_of(store, RUN) == []


def test_a_claim_of_a_deletion_names_no_workflow(store: Store, submitter: FakeSubmitter) -> None:
    ended(store, submitter)
    with dying_at("delete_run.after_claim"):
        delete_runs(store, submitter, [RUN])
    claim: SubmissionClaim = read_submissions(store, RUN)[-1].claim
    assert (claim.kind, claim.submission, claim.workflow_name) == (SubmissionKind.DELETION, 2, "")
