"""Reading the state of a run from listings alone."""

import hashlib
from contextlib import nullcontext
from pathlib import Path

import pytest

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, StoreError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    Event,
    EventBatch,
    RunRecord,
    StoredRecord,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
)
from tiphys.store import (
    DirectoryStore,
    LineageLayout,
    ObjectInfo,
    RunLayout,
    append_events,
    fence_attempt,
    list_runs,
    outputs_digest,
    read_events,
    read_run,
    read_step_attempts,
    read_submissions,
    runs,
)
from tiphys.store.layout import event_batch_key
from tiphys.store.runs import check_name_free_of_leftovers, is_partly_deleted

LAYOUT = RunLayout("digits")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def put(store: DirectoryStore, key: str, record: StoredRecord) -> None:
    store.create(key, record.to_bytes())


def attempt(step: str, number: int) -> AttemptClaim:
    return AttemptClaim(
        run="digits", step=step, attempt=number, submission=1, uid="u", node="n", instance="i", step_key="k"
    )


def end(step: str, number: int) -> AttemptEnd:
    return AttemptEnd(run="digits", step=step, attempt=number, submission=1, outcome=AttemptEndOutcome.FAILED)


def submission(number: int) -> SubmissionClaim:
    return SubmissionClaim(
        run="digits", submission=number, kind=SubmissionKind.RESUME, workflow_name=f"digits-{number}", namespace="ml"
    )


def event(message: str) -> Event:
    return Event(name="checkpoint.skipped", message=message)


def messages(store: DirectoryStore) -> list[str]:
    return [event.message for event in read_events(store, "digits")]


class TestFences:
    """
    | Attempt              | End afterwards          |
    |----------------------|-------------------------|
    | claimed, without end | fenced, with the reason |
    | ended before         | the earlier end         |
    | never claimed        | none                    |
    """

    def test_an_open_attempt_ends_as_fenced(self, store: DirectoryStore) -> None:
        put(store, LAYOUT.attempt("fit", 2), attempt("fit", 2))

        fence = fence_attempt(store, "digits", "fit", 2, "its node was lost")

        assert fence == read_step_attempts(store, "digits", "fit")[0].end
        assert (fence.outcome, fence.message) == (AttemptEndOutcome.FENCED, "its node was lost")
        assert (fence.attempt, fence.submission, fence.step_key) == (2, 1, "k")

    def test_an_attempt_that_has_ended_keeps_its_end(self, store: DirectoryStore) -> None:
        put(store, LAYOUT.attempt("fit", 1), attempt("fit", 1))
        put(store, LAYOUT.attempt_end("fit", 1), first := end("fit", 1))

        assert fence_attempt(store, "digits", "fit", 1, "too late") == first

    def test_an_attempt_that_was_never_claimed_gets_no_end(self, store: DirectoryStore) -> None:
        assert fence_attempt(store, "digits", "fit", 1, "no such attempt") is None
        assert not list(store.list(LAYOUT.attempts))

    def test_a_damaged_claim_is_an_error(self, store: DirectoryStore) -> None:
        store.create(LAYOUT.attempt("fit", 1), b"{}")

        with pytest.raises(IntegrityError, match="not a valid AttemptClaim"):
            fence_attempt(store, "digits", "fit", 1, "its node was lost")


class TestRuns:
    def test_lists_each_run_once_in_order(self, store: DirectoryStore) -> None:
        for run in ("b", "a", "a.b"):
            for name in ("run.json", "events/000000001.json"):
                store.create(f"control/runs/{run}/{name}", b"")
        store.create("data/lineages/c/fit/x", b"")

        assert list(list_runs(store)) == ["a.b", "a", "b"]

    def test_lists_nothing_in_an_empty_store(self, store: DirectoryStore) -> None:
        assert list(list_runs(store)) == []

    def test_reads_a_run(self, store: DirectoryStore) -> None:
        record = RunRecord(run="digits", pipeline="digits", workflow={"spec": {}}, digest="d")
        put(store, LAYOUT.run_record, record)

        assert read_run(store, "digits") == record

    def test_names_similar_runs_when_there_is_no_such_run(self, store: DirectoryStore) -> None:
        store.create("control/runs/digits-7xk2p/run.json", b"")

        with pytest.raises(NotFoundError, match=r"has no run 'digits-7xk2q'; did you mean digits-7xk2p\?"):
            read_run(store, "digits-7xk2q")

    def test_names_the_store_when_no_run_is_similar(self, store: DirectoryStore) -> None:
        with pytest.raises(NotFoundError, match=rf"{store.url} has no run 'digits'; check the name and the store"):
            read_run(store, "digits")

    @pytest.mark.parametrize(
        ("left", "is_free"),
        [
            (LAYOUT.submission(1), True),
            (LAYOUT.attempt("fit", 1), False),
            (f"{LAYOUT.outputs('fit', 1)}model", False),
            (LineageLayout("digits/fit").manifest(1, 9), False),
        ],
    )
    def test_leftovers_of_a_deleted_run_take_its_name(self, store: DirectoryStore, left: str, is_free: bool) -> None:
        store.create(left, b"{}")
        store.create(RunLayout("digits.2").attempt("fit", 1), b"{}")
        assert is_partly_deleted(store, "digits")
        with nullcontext() if is_free else pytest.raises(ConflictError, match="partly deleted"):
            check_name_free_of_leftovers(store, "digits")

    def test_refuses_a_name_that_no_run_can_have(self, store: DirectoryStore) -> None:
        with pytest.raises(UsageError, match="not valid"):
            read_run(store, "../secrets")


class TestSubmissions:
    def test_come_in_order_with_what_is_known_of_each(self, store: DirectoryStore) -> None:
        bound = SubmissionBinding(
            run="digits", submission=1, cluster="c", namespace="ml", workflow_name="digits-1", uid="u"
        )
        sealed = SubmissionEnd(run="digits", submission=1, status="Failed")
        put(store, LAYOUT.submission(1), submission(1))
        put(store, LAYOUT.submission_binding(1), bound)
        put(store, LAYOUT.submission_end(1), sealed)
        put(store, LAYOUT.submission(2), submission(2))

        first, second = read_submissions(store, "digits")

        assert (first.claim.submission, first.binding, first.end) == (1, bound, sealed)
        assert (second.claim.submission, second.binding, second.end) == (2, None, None)

    def test_submissions_are_none_for_a_run_without_any(self, store: DirectoryStore) -> None:
        put(store, "control/runs/digits2/submissions/000000001.json", submission(1))

        assert read_submissions(store, "digits") == []

    def test_an_end_without_its_claim_is_damage(self, store: DirectoryStore) -> None:
        put(store, LAYOUT.submission_end(3), SubmissionEnd(run="digits", submission=3, status="Failed"))

        with pytest.raises(IntegrityError, match="run digits: submission 3 has records but no claim"):
            read_submissions(store, "digits")


class TestAttempts:
    def test_of_a_step_ascend_and_carry_their_end(self, store: DirectoryStore) -> None:
        for number in (2, 1, 10):
            put(store, LAYOUT.attempt("fit", number), attempt("fit", number))
        put(store, LAYOUT.attempt_end("fit", 1), end("fit", 1))

        found = read_step_attempts(store, "digits", "fit")

        assert [a.claim.attempt for a in found] == [1, 2, 10]
        assert [a.end is not None for a in found] == [True, False, False]

    def test_of_a_step_leave_out_steps_whose_name_begins_alike(self, store: DirectoryStore) -> None:
        put(store, LAYOUT.attempt("fit-more", 1), attempt("fit-more", 1))

        assert read_step_attempts(store, "digits", "fit") == []

    def test_of_all_steps_are_told_apart(self, store: DirectoryStore) -> None:
        item = "sweep.0123456789ab.0"
        for step, number in (("fit", 1), ("fit", 2), (item, 1)):
            put(store, LAYOUT.attempt(step, number), attempt(step, number))
        put(store, LAYOUT.attempt_end(item, 1), end(item, 1))

        found = RunHistory(store, "digits").attempts

        assert {step: [a.claim.attempt for a in tries] for step, tries in found.items()} == {"fit": [1, 2], item: [1]}
        assert found[item][0].end is not None

    def test_an_end_without_its_claim_is_damage(self, store: DirectoryStore) -> None:
        put(store, LAYOUT.attempt_end("fit", 1), end("fit", 1))

        with pytest.raises(IntegrityError, match="attempt of fit 1 has records but no claim"):
            RunHistory(store, "digits").read_attempts()

    @pytest.mark.parametrize("other", [{"run": "digits.2"}, {"step": "fit-2"}, {"attempt": 2}])
    def test_an_end_that_was_copied_from_another_attempt_is_damage(
        self, store: DirectoryStore, other: dict[str, object]
    ) -> None:
        put(store, LAYOUT.attempt("fit", 1), attempt("fit", 1))
        put(store, LAYOUT.attempt_end("fit", 1), end("fit", 1).model_copy(update=other))
        with pytest.raises(IntegrityError, match="copied from another key"):
            read_step_attempts(store, "digits", "fit")

    @pytest.mark.parametrize("other", [{"run": "digits.2"}, {"submission": 2}])
    def test_a_claim_that_was_copied_from_another_submission_is_damage(
        self, store: DirectoryStore, other: dict[str, object]
    ) -> None:
        put(store, LAYOUT.submission(1), submission(1).model_copy(update=other))
        with pytest.raises(IntegrityError, match="copied from another key"):
            read_submissions(store, "digits")

    def test_a_record_that_is_no_record_is_damage(self, store: DirectoryStore) -> None:
        store.create(LAYOUT.attempt("fit", 1), b"{}")

        with pytest.raises(IntegrityError, match="not a valid AttemptClaim"):
            read_step_attempts(store, "digits", "fit")

    def test_foreign_objects_are_left_out(self, store: DirectoryStore) -> None:
        store.create(f"{LAYOUT.step_attempts('fit')}README", b"")

        assert RunHistory(store, "digits").attempts == {}


class TestListingDigest:
    ROWS = [("artifacts/data", 3), ("parameters/loss", 4)]

    def test_the_listing_digest_does_not_depend_on_the_order_of_rows(self) -> None:
        assert outputs_digest(self.ROWS) == outputs_digest(iter(reversed(self.ROWS)))

    @pytest.mark.parametrize(
        "rows",
        [[], ROWS[:1], [("artifacts/data", 3), ("parameters/loss", 5)], [("artifacts/dat", 3), ("parameters/loss", 4)]],
    )
    def test_differs_when_a_row_differs(self, rows: list[tuple[str, int]]) -> None:
        assert outputs_digest(rows) != outputs_digest(self.ROWS)

    def test_takes_rows_of_a_listing_as_they_come(self) -> None:
        assert outputs_digest([ObjectInfo(key, size) for key, size in self.ROWS]) == outputs_digest(self.ROWS)

    def test_the_listing_digest_is_stable_because_it_is_stored(self) -> None:
        assert outputs_digest([("a", 1)]) == hashlib.sha256(b'[["a",1]]').hexdigest()


class TestEvents:
    def test_come_back_in_the_order_in_which_they_were_stored(self, store: DirectoryStore) -> None:
        append_events(store, "digits", "plugin", [event("one"), event("two")])
        append_events(store, "digits", "trainer", [event("three")])

        assert messages(store) == ["one", "two", "three"]

    def test_of_none_write_nothing(self, store: DirectoryStore) -> None:
        append_events(store, "digits", "plugin", [])

        assert list(store.list("")) == []

    def test_take_the_next_number_when_another_writer_was_faster(self, store: DirectoryStore) -> None:
        class Late(DirectoryStore):
            """Another writer takes the number that this one saw free."""

            def create(self, key: str, data: bytes) -> None:
                if key == event_batch_key(LAYOUT.events, 1):
                    put(store, key, EventBatch(run="digits", source="other", events=(event("other"),)))
                super().create(key, data)

        append_events(Late(store._root), "digits", "plugin", [event("mine")])

        assert messages(store) == ["other", "mine"]

    def test_give_up_in_bounded_time(self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runs, "_EVENT_ATTEMPTS", 3)
        batch = EventBatch(run="digits", source="other", events=())

        class Stale(DirectoryStore):
            """A listing that shows nothing of what others wrote."""

            def list(self, prefix: str):  # type: ignore[no-untyped-def]
                return iter(())

        for number in (1, 2, 3):
            put(store, event_batch_key(LAYOUT.events, number), batch.model_copy(update={"nonce": str(number)}))

        with pytest.raises(StoreError, match="other writers claimed 3 event numbers of run digits"):
            append_events(Stale(store._root), "digits", "plugin", [event("mine")])
