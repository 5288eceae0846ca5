"""Where each record lies: keys lead back to what they were made of, and list in their order."""

import inspect
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiphys.errors import UsageError
from tiphys.records import CheckpointRef
from tiphys.store import check_key, layout
from tiphys.store.incarnations import crash_key
from tiphys.store.layout import LineageLayout, RunLayout, lineage_name, memo_key

RUN = RunLayout("digits-7xk2p")
LINEAGE = LineageLayout("digits-7xk2p/fit")
DIGEST = "ab" * 32

labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
steps = labels | st.builds(
    "{}.{}.{}".format, labels, st.from_regex(r"[0-9a-f]{12}", fullmatch=True), st.integers(0, 99)
)
runs = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", fullmatch=True)
numbers = st.integers(1, 10**9 - 1)
global_steps = st.integers(0, 10**15 - 1)


def test_the_documented_layout() -> None:
    """As in docs/architecture.md."""
    item = "sweep.0123456789ab.0"

    assert [
        RUN.run_record,
        RUN.submission(1),
        RUN.submission_binding(1),
        RUN.submission_end(1),
        RUN.item(2, item),
        RUN.reused(2, "fit"),
        RUN.reused_attempt(2, "fit", 3),
        RUN.attempt("fit", 3),
        RUN.attempt_end("fit", 3),
        RUN.outputs("fit", 3),
        RUN.done_marker("fit", 3, DIGEST),
        crash_key(RUN, "fit", 3),
        RUN.progress("fit", 3),
        layout.event_batch_key(RUN.events, 7),
        layout.event_batch_key(RUN.program_events, 7),
        memo_key(DIGEST),
        RUN.auto_resume(2),
        RUN.manual_stop(2),
        layout.alert_key("ab" * 16, "result"),
        LINEAGE.shards(3, 1200),
        LINEAGE.shard(3, 1200, 4, DIGEST, "json"),
        LINEAGE.shard(3, 1200, 4, DIGEST, "json", rank=5),
        LINEAGE.pin(3, 1200, "release-1"),
        LINEAGE.tombstone(3, 1200),
    ] == [
        "control/runs/digits-7xk2p/run.json",
        "control/runs/digits-7xk2p/submissions/000000001.json",
        "control/runs/digits-7xk2p/submissions/000000001.bound.json",
        "control/runs/digits-7xk2p/submissions/000000001.end.json",
        "control/runs/digits-7xk2p/items/000000002/sweep.0123456789ab.0.json",
        "control/runs/digits-7xk2p/reused/000000002/fit.json",
        "control/runs/digits-7xk2p/reused/000000002/fit.attempt-000000003",
        "control/runs/digits-7xk2p/attempts/fit/000000003.json",
        "control/runs/digits-7xk2p/attempts/fit/000000003.end.json",
        "data/runs/digits-7xk2p/outputs/fit/000000003/",
        f"control/runs/digits-7xk2p/done/fit/000000003-{DIGEST}",
        "data/runs/digits-7xk2p/incarnations/fit/000000003/000000001.crash.json",
        "data/runs/digits-7xk2p/progress/fit/000000003",
        "control/runs/digits-7xk2p/events/000000007.json",
        "data/runs/digits-7xk2p/events/000000007.json",
        f"control/memo/{DIGEST}.json",
        "control/runs/digits-7xk2p/auto-resumes/000000002.json",
        "control/runs/digits-7xk2p/auto-resumes/000000002.manual-stop.json",
        f"control/alerts/{'ab' * 16}/result.json",
        "data/lineages/digits-7xk2p/fit/shards/000000003-000000000001200/",
        "data/lineages/digits-7xk2p/fit/shards/000000003-000000000001200/00004-abababababababab.json",
        "data/lineages/digits-7xk2p/fit/shards/000000003-000000000001200/r00005-00004-abababababababab.json",
        "data/lineages/digits-7xk2p/fit/pins/999999996-999999999998799/release-1.json",
        "data/lineages/digits-7xk2p/fit/tombstones/999999996-999999999998799.json",
    ]


@given(runs, steps, numbers, numbers)
def test_every_key_fits_every_store_and_lies_below_its_run(run: str, step: str, number: int, other: int) -> None:
    place = RunLayout(run)
    keys = [
        place.run_record,
        place.submission(number),
        place.submission_binding(number),
        place.submission_end(number),
        place.auto_resume(number),
        place.manual_stop(number),
        place.item(number, step),
        place.reused(number, step),
        place.reused_attempt(number, step, other),
        place.attempt(step, number),
        place.attempt_end(step, number),
        place.done_marker(step, number, DIGEST),
        layout.event_batch_key(place.events, number),
    ]
    written_by_programs = [
        place.outputs(step, number) + "artifacts/x",
        crash_key(place, step, number),
        place.progress(step, number),
        layout.event_batch_key(place.program_events, number),
    ]

    assert all(check_key(key).startswith(f"control/runs/{run}/") for key in keys)
    assert all(check_key(key).startswith(f"data/runs/{run}/") for key in written_by_programs)
    assert len({*keys, *written_by_programs}) == len(keys) + len(written_by_programs)


@given(steps, numbers, st.booleans())
def test_an_attempt_is_read_from_its_key(step: str, attempt: int, end: bool) -> None:
    key = RUN.attempt_end(step, attempt) if end else RUN.attempt(step, attempt)

    assert layout.parse_attempt(key) == (step, attempt, end)


@given(numbers)
def test_a_submission_is_read_from_its_key(number: int) -> None:
    keys = (RUN.submission(number), RUN.submission_binding(number), RUN.submission_end(number))

    assert [layout.parse_submission(key) for key in keys] == [(number, "claim"), (number, "bound"), (number, "end")]
    assert layout.parse_submission(RUN.submission_key(number, "0a" * 32)) is None


@given(steps, numbers)
def test_results_are_read_from_their_keys(step: str, number: int) -> None:
    assert layout.parse_done(RUN.done_marker(step, number, DIGEST)) == (step, number, DIGEST)
    assert layout.parse_output(RUN.outputs(step, number) + "a/b") == (RUN.run, step, number, "a/b")
    assert layout.parse_reused(RUN.reused(number, step)) == (number, step)
    assert layout.parse_reused(RUN.reused_attempt(number, step, 3)) is None
    assert layout.parse_reused_attempt(RUN.reused_attempt(number, step, 3)) == (number, step, 3)
    assert layout.parse_reused_attempt(RUN.reused(number, step)) is None
    assert layout.parse_event_batch(layout.event_batch_key(RUN.events, number)) == number
    assert layout.parse_event_batch(layout.event_batch_key(RUN.program_events, number)) == number


@given(steps, numbers)
def test_every_key_of_a_run_listing_has_one_typed_form(step: str, number: int) -> None:
    typed = {
        RUN.attempt(step, number): layout.AttemptRecordKey(step, number, is_end=False),
        RUN.attempt_end(step, number): layout.AttemptRecordKey(step, number, is_end=True),
        RUN.outputs(step, number) + "a/b": layout.OutputKey(RUN.run, step, number, "a/b"),
        RUN.done_marker(step, number, DIGEST): layout.DoneMarkerKey(step, number, DIGEST),
        RUN.reused(number, step): layout.ReuseRecordKey(number, step),
        RUN.reused_attempt(number, step, 3): layout.ReusedAttemptKey(number, step, 3),
    }

    listed = {key: layout.parse_listed_key(key) for key in typed}

    assert listed == typed
    assert [type(one) for one in listed.values()] == [type(one) for one in typed.values()]


@pytest.mark.parametrize(
    "key",
    [
        RUN.run_record,
        RUN.submission(1),
        crash_key(RUN, "fit", 1),
        RUN.control,
        RUN.data,
        "runs",
        "control/alerts/a/b/c",
        "",
    ],
)
def test_other_keys_have_no_listed_form(key: str) -> None:
    assert layout.parse_listed_key(key) is None


@given(numbers, global_steps)
def test_a_checkpoint_is_read_from_its_keys(attempt: int, step: int) -> None:
    ref = CheckpointRef(lineage=LINEAGE.lineage, attempt=attempt, global_step=step)

    assert LINEAGE.parse_checkpoint(LINEAGE.manifest(attempt, step)) == ref
    assert LINEAGE.parse_checkpoint(LINEAGE.quarantined(attempt, step)) == ref
    assert LINEAGE.parse_shard(LINEAGE.shard(attempt, step, 0, DIGEST, "npz")) == ref
    assert LINEAGE.parse_pin(LINEAGE.pin(attempt, step, "release-1.2")) == (ref, "release-1.2")
    assert LINEAGE.parse_tombstone(LINEAGE.tombstone(attempt, step)) == (ref, "")
    assert LINEAGE.parse_tombstone(LINEAGE.deletion_notice(attempt, step, "0123beef")) == (ref, "0123beef")


@given(numbers, global_steps, numbers, global_steps)
def test_mark_and_announcements_of_a_checkpoint_are_listed_together_and_the_mark_comes_last(
    attempt: int, step: int, other_attempt: int, other_step: int
) -> None:
    prefix = LINEAGE.tombstones(attempt, step)
    keys = [LINEAGE.deletion_notice(attempt, step, "0beef"), LINEAGE.deletion_notice(attempt, step, "ffff")]

    assert all(key.startswith(prefix) for key in [*keys, LINEAGE.tombstone(attempt, step)])
    assert sorted([LINEAGE.tombstone(attempt, step), *keys])[-1] == LINEAGE.tombstone(attempt, step)
    same = (attempt, step) == (other_attempt, other_step)
    assert LINEAGE.tombstone(other_attempt, other_step).startswith(prefix) == same


@pytest.mark.parametrize(
    "key",
    [
        "",
        "README",
        "control/runs/a/x/000000001.json.tmp",
        "control/runs/a/x/1.json",
        "control/runs/a/x/000000001",
        "control/runs/a/x/000000001.old.json",
    ],
)
def test_a_foreign_key_parses_as_no_record(key: str) -> None:
    parsers = [function for name, function in inspect.getmembers(layout) if name.startswith("parse_")]
    folders = ("attempts/fit", "submissions", "events", "reused", "done/fit", "outputs")

    assert len(parsers) >= 6
    for parse, folder in itertools.product(parsers, folders):
        assert parse(key.replace("x", folder)) is None
    assert LINEAGE.parse_checkpoint(key) is None
    assert LINEAGE.parse_shard(key) is None
    assert LINEAGE.parse_pin(key) is None
    assert LINEAGE.parse_tombstone(key) is None


@given(st.lists(st.tuples(numbers, global_steps), min_size=2, unique=True))
def test_the_newest_checkpoint_lists_first(written: list[tuple[int, int]]) -> None:
    keys = sorted(LINEAGE.manifest(*checkpoint) for checkpoint in written)

    listed = [LINEAGE.parse_checkpoint(key) for key in keys]

    assert [(ref.attempt, ref.global_step) for ref in listed if ref] == sorted(written, reverse=True)


@given(st.lists(numbers, min_size=2, unique=True))
def test_attempts_submissions_and_events_list_in_their_order(written: list[int]) -> None:
    for key_of in (RUN.submission, lambda number: RUN.attempt("fit", number)):
        assert sorted(map(key_of, written)) == [key_of(number) for number in sorted(written)]


@pytest.mark.parametrize("run", ["", "..", "a/b", "Digits", "-a", "a-", "x" * 64, "a b"])
def test_a_run_that_cannot_be_a_key_is_refused(run: str) -> None:
    with pytest.raises(UsageError, match="run name"):
        RunLayout(run)


@pytest.mark.parametrize("step", ["", "..", "a/b", "Fit", "fit.", "fit.x.0", "fit.0123456789ab", "fit.0123456789ab.x"])
def test_a_step_that_cannot_be_a_key_is_refused(step: str) -> None:
    for key_of in (
        RUN.step_attempts,
        lambda name: RUN.done_marker(name, 1, "digest"),
        lambda name: RUN.item(1, name),
        lambda name: lineage_name("a", name),
    ):
        with pytest.raises(UsageError, match="step id"):
            key_of(step)


def test_a_lineage_belongs_to_one_step_of_one_run() -> None:
    assert LineageLayout(lineage_name("digits", "fit")).prefix == "data/lineages/digits/fit/"
