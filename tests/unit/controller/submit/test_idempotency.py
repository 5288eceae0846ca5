"""Beginning a run under an idempotency key.

| the call before, under this key | this call | outcome |
|---|---|---|
| none | – | started |
| done | the same | the same run, nothing created |
| died anywhere | the same | the same run, what is missing is added |
| any | another pipeline, parameter, name or namespace | refused, both named |
| died before the Workflow was sent | the same, from another cluster | refused |
| none, and the name is taken | – | refused |

A fork is begun in the same way; there the parent, the steps to run again and the
changes are part of what is asked.
"""

import copy
from typing import Any

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import StartResult, WorkflowChange, fork_run, resume_run, start_run
from tiphys_controller.submit import start

from tiphys.errors import ConflictError, UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import Store, list_runs, read_run, read_submissions

PIPELINE = pipeline_of(gated("prep"), parameters={"lr": "0.1"})
HOT = pipeline_of(gated("prep"), parameters={"lr": "0.9"})
KEY = "nightly/2026-05-04 ✓"
POINTS = ("after_key", "after_record", "after_claim", "after_create", "after_bind")


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


def test_the_same_key_begins_one_run(store: Store, submitter: FakeSubmitter) -> None:
    first = start_run(store, submitter, PIPELINE, key=KEY)
    written = keys(store)
    submitter.end(first.run)
    submitter.delete(first.run)
    second = start_run(store, submitter, PIPELINE, key=KEY)

    assert first.created
    assert second == first._replace(created=False)
    assert list(list_runs(store)) == [first.run]
    assert keys(store) == written
    assert submitter.names() == []


def test_different_keys_begin_different_runs(store: Store, submitter: FakeSubmitter) -> None:
    runs = {start_run(store, submitter, PIPELINE, key=key).run for key in ("one", "two")}

    assert set(list_runs(store)) == runs
    assert len(runs) == 2


@pytest.mark.parametrize("point", POINTS)
def test_a_call_that_died_is_completed_by_the_same_call(store: Store, submitter: FakeSubmitter, point: str) -> None:
    with dying_at(f"start.{point}"):
        start_run(store, submitter, PIPELINE, key=KEY)

    started = start_run(store, submitter, PIPELINE, key=KEY)

    assert started.created == (point in ("after_key", "after_record", "after_claim"))
    assert list(list_runs(store)) == [started.run]
    assert submitter.names() == [started.run]
    [only] = read_submissions(store, started.run)
    assert only.binding is not None
    assert only.binding.uid == started.uid


@pytest.mark.parametrize("point", ["after_record", "after_claim", "after_create"])
def test_a_start_completed_by_a_resume_is_found_under_its_key(
    store: Store, submitter: FakeSubmitter, point: str
) -> None:
    with dying_at(f"start.{point}"):
        start_run(store, submitter, PIPELINE, "digits-1", key=KEY)
    resume_run(store, submitter, "digits-1")

    started = start_run(store, submitter, PIPELINE, "digits-1", key=KEY)

    assert started == StartResult("digits-1", 1, "digits-1", "uid-of-digits-1", created=False)
    assert submitter.names() == ["digits-1"]


@pytest.mark.parametrize("other", [{"manifest": HOT}, {"run": "digits-2"}, {"namespace": "ml"}])
def test_a_key_that_was_used_for_something_else_is_refused(
    store: Store, submitter: FakeSubmitter, other: dict[str, str]
) -> None:
    asked = {"manifest": PIPELINE, "key": KEY, "run": "digits-1"}
    start_run(store, submitter, **asked)
    before = keys(store)

    wanted = rf"start run digits-1 .*asks for something else \({other.get('run', 'digits-1')} of pipeline digits"
    with pytest.raises(ConflictError, match=wanted):
        start_run(store, submitter, **(asked | other))

    assert keys(store) == before
    assert submitter.names() == ["digits-1"]


def test_a_run_that_was_begun_for_another_cluster_is_not_begun_here(store: Store, submitter: FakeSubmitter) -> None:
    with dying_at("start.after_claim"):
        start_run(store, submitter, PIPELINE, "digits-1", key=KEY)
    east = FakeSubmitter(submitter.folder / "east", cluster="east")

    with pytest.raises(ConflictError, match="begun under this key for cluster west"):
        start_run(store, east, PIPELINE, "digits-1", key=KEY)

    assert east.names() == []


def test_a_name_that_another_run_has_is_refused(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, "digits-1")
    submitter.delete("digits-1")
    before = keys(store)

    with pytest.raises(ConflictError, match="already has a run 'digits-1', which was not begun under this key"):
        start_run(store, submitter, PIPELINE, "digits-1", key=KEY)

    assert keys(store) == before


def test_a_name_that_a_stranger_has_takes_no_key(store: Store, submitter: FakeSubmitter) -> None:
    submitter.create({"metadata": {"name": "digits-1", "namespace": "default"}})

    with pytest.raises(ConflictError, match="already has a Workflow default/digits-1"):
        start_run(store, submitter, PIPELINE, "digits-1", key=KEY)

    assert keys(store) == []


def test_a_name_that_another_run_took_in_between_is_refused(store: Store, submitter: FakeSubmitter) -> None:
    with dying_at("start.after_key"):
        start_run(store, submitter, PIPELINE, "digits-1", key=KEY)
    start_run(store, submitter, PIPELINE, "digits-1")

    with pytest.raises(ConflictError, match="which was not begun under this key"):
        start_run(store, submitter, PIPELINE, "digits-1", key=KEY)

    assert read_run(store, "digits-1").key == ""


@pytest.mark.parametrize("key", ["", "a" * 256, "a\nb", "\x00"])
def test_a_key_that_cannot_be_repeated_is_refused(store: Store, submitter: FakeSubmitter, key: str) -> None:
    with pytest.raises(UsageError, match="idempotency key"):
        start_run(store, submitter, PIPELINE, key=key)

    assert keys(store) == []


@pytest.mark.parametrize("key", ["../../etc/passwd", "runs/digits-1", "%2e%2e/"])
def test_a_key_cannot_name_a_place_in_the_store(store: Store, submitter: FakeSubmitter, key: str) -> None:
    start_run(store, submitter, PIPELINE, "digits-1", key=key)

    [held] = store.list("control/idempotency-keys/")
    assert held.key.removeprefix("control/idempotency-keys/").removesuffix(".json").isalnum()


@pytest.fixture
def parent(store: Store, submitter: FakeSubmitter) -> str:
    """A run that has finished its only step."""
    start_run(store, submitter, PIPELINE, "digits-1")
    History(store, "digits-1").done("prep")
    return "digits-1"


def repaired(manifest: Manifest = PIPELINE) -> WorkflowChange:
    other = copy.deepcopy(manifest)
    next(one for one in other["spec"]["templates"] if one["name"] == "prep-run")["container"]["image"] = "python:3.13"
    return WorkflowChange(other)


def test_the_same_key_begins_one_fork_whatever_its_parent_does(
    store: Store, submitter: FakeSubmitter, parent: str
) -> None:
    first = fork_run(store, submitter, parent, rerun=["prep"], key=KEY).started
    submitter.end(parent)
    resume_run(store, submitter, parent, change=repaired())
    written = keys(store)
    second = fork_run(store, submitter, parent, rerun=["prep"], key=KEY).started

    assert first is not None
    assert second == first._replace(created=False)
    assert keys(store) == written
    record = read_run(store, first.run)
    assert (record.parent, record.rerun_steps, bool(record.key)) == (parent, ("prep",), True)


@pytest.mark.parametrize("point", POINTS)
def test_a_fork_that_died_is_completed_by_the_same_call(
    store: Store, submitter: FakeSubmitter, parent: str, point: str
) -> None:
    asked = {"rerun": ["prep"], "change": repaired(), "key": KEY}
    with dying_at(f"start.{point}"):
        fork_run(store, submitter, parent, **asked)

    forked = fork_run(store, submitter, parent, **asked).started

    assert forked is not None
    assert forked.created == (point in ("after_key", "after_record", "after_claim"))
    assert submitter.names() == sorted([parent, forked.run])
    [only] = read_submissions(store, forked.run)
    assert (only.claim.kind, only.claim.rerun_since, only.binding and only.binding.uid) == (
        "fork",
        {"prep": 1},
        forked.uid,
    )


def test_a_refused_fork_records_no_key(store: Store, submitter: FakeSubmitter, parent: str) -> None:
    before = keys(store)

    with pytest.raises(ConflictError, match="may not go on with this"):
        fork_run(store, submitter, parent, change=repaired()._replace(drift_actions={"image": "refuse"}), key=KEY)

    assert keys(store) == before


@pytest.mark.parametrize("other", [{"rerun": ["prep"]}, {"run": "cold"}, {"change": repaired()}, {"namespace": "ml"}])
def test_a_key_that_was_used_for_another_fork_is_refused(
    store: Store, submitter: FakeSubmitter, parent: str, other: dict[str, object]
) -> None:
    asked = {"parent": parent, "run": "hot", "key": KEY}
    fork_run(store, submitter, **asked)
    before = keys(store)

    wanted = rf"start run hot .*asks for something else \({other.get('run', 'hot')} as a fork of run digits-1"
    with pytest.raises(ConflictError, match=wanted):
        fork_run(store, submitter, **(asked | other))
    with pytest.raises(ConflictError, match="of pipeline digits"):
        start_run(store, submitter, PIPELINE, "hot", key=KEY)

    assert keys(store) == before


@pytest.mark.parametrize("key", ["", "a\nb"])
def test_a_fork_or_resume_under_a_key_that_cannot_be_repeated_is_refused(
    store: Store, submitter: FakeSubmitter, parent: str, key: str
) -> None:
    before = keys(store)

    with pytest.raises(UsageError, match="idempotency key"):
        fork_run(store, submitter, parent, key=key)
    with pytest.raises(UsageError, match="idempotency key"):
        resume_run(store, submitter, parent, key=key)

    assert keys(store) == before


def test_a_name_that_the_same_call_took_in_this_moment_is_that_of_the_run(
    store: Store, submitter: FakeSubmitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call, sent twice at once: the other is done between the look at the key and that at the name."""
    others: list[StartResult] = []
    look = start._find_free_name

    def look_later(*arguments: Any) -> str:
        if not others:
            others.append(StartResult("", 0, "", ""))  # the other call comes here, too
            others[0] = start_run(store, submitter, PIPELINE, "nightly", key=KEY)
        return look(*arguments)

    monkeypatch.setattr(start, "_find_free_name", look_later)
    assert start_run(store, submitter, PIPELINE, "nightly", key=KEY) == others[0]._replace(created=False)
    assert submitter.names() == ["nightly"]
