"""Records that are damaged, lie, or were written for another place: a typed error, and nothing is written.

| record | outcome |
|---|---|
| not JSON, cut off, without a field | refused, its key named |
| of another schema version | refused, the version named |
| run.json or a claim of another run or submission | refused, both named |
| run.json whose Workflow was changed | refused before anything is written |
| an end that was changed, or is that of another step | refused |
| an end that names bytes which it did not write, or that are gone | not done: the step runs |
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.compiled import History, gated, pipeline_of
from support.memory import MemoryStore
from support.submitter import FakeSubmitter
from tiphys_controller import fork_run, plan_run, resume_run, start_run

from tiphys.errors import IntegrityError, TiphysError, UsageError
from tiphys.records import AttemptEnd, AttemptEndOutcome, Output, OutputKind
from tiphys.store import RunLayout

RUN = "digits-1"
LAYOUT = RunLayout(RUN)
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"))
FIT = LAYOUT.attempt_end("fit", 1)
Damage = Callable[[dict[str, Any]], None]


@pytest.fixture
def store(submitter: FakeSubmitter) -> MemoryStore:
    """A run whose training failed, beside another run."""
    store = MemoryStore()
    for run in (RUN, "other"):
        start_run(store, submitter, PIPELINE, run)
        history = History(store, run)
        history.done("prep", parameters={"n": "5"}, projection=False)
        history.failed("fit")
        submitter.end(run)
    return store


def refused(store: MemoryStore, submitter: FakeSubmitter, kind: type[TiphysError], match: str) -> None:
    """Whoever goes on with the run meets the error and leaves everything as it is."""
    before = dict(store.objects)
    for go_on in (resume_run, fork_run):
        with pytest.raises(kind, match=match):
            go_on(store, submitter, RUN)
    assert store.objects == before
    assert submitter.names() == [RUN, "other"]


def edit(store: MemoryStore, key: str, damage: Damage) -> None:
    document = json.loads(store.objects[key])
    damage(document)
    store.objects[key] = json.dumps(document).encode()


@pytest.mark.parametrize("key", [LAYOUT.run_record, LAYOUT.submission(1), FIT])
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"run": "digits-1"}'])
def test_what_is_no_record_is_refused(store: MemoryStore, submitter: FakeSubmitter, key: str, data: bytes) -> None:
    store.objects[key] = data

    refused(store, submitter, IntegrityError, f"{key} is not a valid ")


@pytest.mark.parametrize("key", [LAYOUT.run_record, LAYOUT.submission(1), LAYOUT.submission_binding(1), FIT])
def test_another_schema_version_is_named(store: MemoryStore, submitter: FakeSubmitter, key: str) -> None:
    edit(store, key, lambda document: document.update(version=7))

    refused(store, submitter, IntegrityError, f"{key} was written by another version .*schema version 7.* reads 1")


@pytest.mark.parametrize("name", ["run_record", "submission", "attempt_end"])
def test_the_record_of_another_run_is_refused(store: MemoryStore, submitter: FakeSubmitter, name: str) -> None:
    arguments = {"run_record": (), "submission": (1,), "attempt_end": ("fit", 1)}[name]
    own, other = (getattr(RunLayout(run), name) for run in (RUN, "other"))
    here, there = (own, other) if name == "run_record" else (own(*arguments), other(*arguments))
    store.objects[here] = store.objects[there]

    refused(store, submitter, IntegrityError, f"{here} holds a record of run other, .* another key")


def test_a_workflow_that_was_changed_since_is_not_submitted(store: MemoryStore, submitter: FakeSubmitter) -> None:
    def hijack(document: dict[str, Any]) -> None:
        [run] = [one for one in document["workflow"]["spec"]["templates"] if one["name"] == "fit-run"]
        run["container"]["image"] = "evil"

    edit(store, LAYOUT.run_record, hijack)

    refused(store, submitter, IntegrityError, r"run\.json of run digits-1 was changed .* digest does not match")


def test_an_end_that_was_changed_is_refused(store: MemoryStore, submitter: FakeSubmitter) -> None:
    edit(store, FIT, lambda document: document.update(outcome="done"))

    refused(store, submitter, IntegrityError, "its seal does not match")


@pytest.mark.parametrize(
    "where", ["data/runs/other/outputs/prep/000000001/parameters/n", "control/memo/secret", "outputs/n"]
)
def test_a_done_record_that_names_what_it_did_not_write_is_not_done(store: MemoryStore, where: str) -> None:
    output = Output(name="n", kind=OutputKind.ARTIFACT, key=where)
    lie = AttemptEnd(run=RUN, step="fit", attempt=1, submission=1, outcome=AttemptEndOutcome.DONE, outputs=(output,))
    store.objects[FIT] = lie.to_bytes()

    [fit] = [step for step in plan_run(store, RUN).steps if step.name == "fit"]

    assert (fit.decision, fit.reason) == (
        "run",
        f"damaged: its record names {where}, which this attempt did not write",
    )


@pytest.mark.parametrize("name", ["../digits-1", "digits-1/..", "DIGITS", "digits 1", "", "a" * 64])
def test_a_name_that_is_no_place_in_the_store_is_refused(
    store: MemoryStore, submitter: FakeSubmitter, name: str
) -> None:
    before = dict(store.objects)

    for go_on in (resume_run, fork_run):
        with pytest.raises(UsageError, match="run name"):
            go_on(store, submitter, name)

    assert store.objects == before
