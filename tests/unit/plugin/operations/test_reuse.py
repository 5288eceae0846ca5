"""When does a finished result stand for a step?

| result                                   | admit                                  |
|------------------------------------------|----------------------------------------|
| intact, same step key                    | run=false, adopted                     |
| an object missing, or of another size, or of other bytes | runs again, says what is damaged |
| written again with the same bytes        | adopted, once it was hashed            |
| parameter, input content, program or version of data new | runs again             |
| input made again with equal bytes        | adopted                                |
| cache=False                              | runs again in every submission         |
| of another run, share=True               | adopted from it                        |
| of another run, share=False              | runs                                   |
"""

import pytest
from support.stories.plugin import (
    Flow,
    artifacts,
    fit,
    keys,
    outputs,
    phase,
    prep,
    records,
    resumed,
    said,
)
from tiphys_plugin.operations import reuse
from tiphys_plugin.runtime.background import HashingProgress

from tiphys.records import AttemptEnd, DataVersion
from tiphys.store import RunLayout, pass_over_end, read_events, read_record
from tiphys.store.layout import MEMOS


def finish(flow: Flow, data: bytes = b"rows", **fields) -> str:
    """Run `prep` to its end; the key of its artifact."""
    reply = flow.admit("prep", **fields)
    assert outputs(reply)["run"] == "true", reply
    key = flow.write_output(reply, "0/artifacts/data", data)
    assert phase(flow.conclude("prep")) == "Succeeded"
    return key


STEP = prep(parameters=())


def test_finished_step_is_adopted_by_the_next_submission(here):
    key = finish(here.submit(STEP), inputs={"n": "1"})
    flow = resumed(here, STEP)
    admitted = flow.admit("prep", inputs={"n": "1"})
    assert outputs(admitted)["run"] == "false"
    assert said(admitted) == "Adopted from attempt 1"
    verdict = flow.conclude("prep", status="Skipped", exit_code="-1")
    assert phase(verdict) == "Succeeded"
    assert artifacts(verdict) == {"data": key}
    assert [e.message for e in read_events(here.store, "digits-abc12")] == ["prep was not run: adopted from attempt 1"]
    layout = RunLayout("digits-abc12")
    left = {info.key for info in here.store.list(layout.all_reused)}
    assert left == {layout.reused(2, "prep"), layout.reused_attempt(2, "prep", 1)}


def test_repeated_admit_of_an_adopted_step_gives_the_same_answer_once_recorded(here, monkeypatch):
    finish(here.submit(STEP))
    flow = resumed(here, STEP)
    first, before = flow.admit("prep"), keys(here.store)
    assert flow.admit("prep") == first
    assert keys(here.store) == before
    monkeypatch.setattr(reuse, "find_reuse_record", lambda call: None)  # as of a replica that looked before
    assert flow.admit("prep") == first
    assert keys(here.store) == before


def replace_bytes(store, key):
    before = store.read(key)
    store.delete(key)
    store.create(key, before[::-1].swapcase())
    assert store.read(key) != before


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda store, key: store.delete(key), "artifacts/data is missing"),
        (
            lambda store, key: (store.delete(key), store.create(key, b"x")),
            "artifacts/data has 1 bytes, its record says 4",
        ),
        (replace_bytes, "artifacts/data was written again with other bytes after it was verified"),
    ],
)
def test_damaged_result_is_made_again_and_the_damage_named(here, damage, says):
    key = here.store.from_artifact_key(finish(here.submit(STEP)))
    damage(here.store, key)
    reply = resumed(here, STEP).admit("prep")
    assert (outputs(reply)["run"], outputs(reply)["attempt"]) == ("true", "2")
    assert "The result of attempt 1 is damaged" in said(reply)
    assert says in said(reply)


def test_result_that_was_copied_with_the_same_bytes_is_reused_once_it_was_hashed(here, monkeypatch):
    key = here.store.from_artifact_key(finish(here.submit(STEP)))
    data = here.store.read(key)
    here.store.delete(key)
    here.store.create(key, data)
    flow, hasher = resumed(here, STEP), here.core._context.hasher
    with monkeypatch.context() as patch:
        patch.setattr(hasher, "hash_objects", lambda *_: HashingProgress(0, 1))
        waiting = flow.admit("prep")
    assert (phase(waiting), said(waiting)) == ("Pending", "Verifying outputs again: 0 of 1 objects")
    assert outputs(flow.admit("prep"))["run"] == "false"


def damage_end(store, run: str = "digits-abc12") -> str:
    key = RunLayout(run).attempt_end("prep", 1)
    data = store.read(key).replace(b'"attempt": 1', b'"attempt": 3')
    store.delete(key)
    store.create(key, data)
    return key


def test_step_whose_end_record_is_damaged_waits_for_a_person(here):
    finish(here.submit(STEP))
    key = damage_end(here.store)
    reply = resumed(here, STEP).admit("prep")
    assert phase(reply) == "Failed"
    assert f"{key} is not a valid AttemptEnd" in said(reply)
    assert "tiphys resume --force" in said(reply)


def test_step_whose_damaged_end_was_passed_over_runs_again(here):
    finish(here.submit(STEP))
    damage_end(here.store)
    pass_over_end(here.store, "digits-abc12", "prep", 1, "`tiphys resume --force`")
    reply = resumed(here, STEP).admit("prep")
    assert (outputs(reply)["run"], outputs(reply)["attempt"]) == ("true", "2")


def test_damaged_result_of_another_run_does_not_stop_a_step(here):
    shared = STEP.model_copy(update={"share": True})
    finish(here.submit(shared))
    key = damage_end(here.store)
    reply = here.submit(shared, name="other", uid="uid-9").admit("prep")
    assert (outputs(reply)["run"], outputs(reply)["attempt"]) == ("true", "1")
    assert key in said(reply)


def test_step_whose_shared_result_has_a_damaged_record_says_how_to_drop_it(here):
    shared = STEP.model_copy(update={"share": True})
    finish(here.submit(shared))
    [key] = [info.key for info in here.store.list(MEMOS)]
    here.store.delete(key)
    here.store.create(key, b"{}")
    reply = here.submit(shared, name="other", uid="uid-9").admit("prep")
    assert phase(reply) == "Failed"
    assert f"{key} is not a valid MemoRecord" in said(reply)
    assert "`tiphys cache drop --damaged` shows it" in said(reply)


@pytest.mark.parametrize(
    ("spec", "inputs"),
    [
        (STEP, {"n": "2"}),
        (STEP.model_copy(update={"template": "other program"}), {"n": "1"}),
        (STEP.model_copy(update={"artifacts": ("data", "more")}), {"n": "1"}),
        (STEP.model_copy(update={"data": (DataVersion(name="d", algorithm="md5", digest="0"),)}), {"n": "1"}),
    ],
)
def test_changed_parameter_program_declaration_or_data_runs_again(here, spec, inputs):
    finish(here.submit(STEP), inputs={"n": "1"})
    # The policy of a run never changes; another run under the same memo shows what the key covers.
    shared = here.submit(spec.model_copy(update={"share": True}), name="other", uid="uid-9")
    assert outputs(shared.admit("prep", inputs=inputs))["run"] == "true"


def test_the_newest_of_several_intact_results_is_adopted(here):
    key = here.store.from_artifact_key(finish(here.submit(STEP)))
    here.store.delete(key)
    finish(resumed(here, STEP))
    here.store.create(key, b"rows")
    assert said(resumed(here, STEP, submission=3).admit("prep")) == "Adopted from attempt 2"


def test_damage_of_the_newest_result_is_named_where_older_ones_are_damaged_too(here):
    for make in (here.submit, lambda *specs: resumed(here, *specs)):
        here.store.delete(here.store.from_artifact_key(finish(make(STEP))))
    assert "The result of attempt 2 is damaged" in said(resumed(here, STEP, submission=3).admit("prep"))


def test_older_result_is_found_again_when_the_parameter_goes_back(here):
    finish(here.submit(STEP), inputs={"n": "1"})
    finish(resumed(here, STEP), inputs={"n": "2"})
    third = resumed(here, STEP, submission=3)
    assert said(third.admit("prep", inputs={"n": "1"})) == "Adopted from attempt 1"
    assert phase(third.conclude("prep", status="Skipped")) == "Succeeded"


def test_input_artifact_counts_by_content_and_not_by_place(here):
    twin = STEP.model_copy(update={"name": "twin"})
    first = here.submit(STEP, twin, fit(checkpoints=None))
    key = finish(first, b"same bytes")
    reply = first.admit("twin")
    same = first.write_output(reply, "0/artifacts/data", b"same bytes")
    first.conclude("twin")
    artifact = [{"name": "data", "path": "/in", "s3": {"key": key}}]
    first.write_output(first.admit("fit", 0, artifacts=artifact), "artifacts/model", b"m")
    assert phase(first.conclude("fit", 0)) == "Succeeded"

    second = resumed(here, STEP, twin, fit(checkpoints=None))
    moved = [{"name": "data", "path": "/elsewhere", "s3": {"key": same}}]
    assert said(second.admit("fit", 0, artifacts=moved)) == "Adopted from attempt 1"
    third = resumed(here, STEP, twin, fit(checkpoints=None), submission=3)
    foreign = [{"name": "data", "s3": {"key": "somewhere/else"}}]
    assert outputs(third.admit("fit", 0, artifacts=foreign))["run"] == "true"


def test_step_with_cache_off_runs_in_every_submission(here):
    spec = STEP.model_copy(update={"cache": False})
    finish(here.submit(spec))
    flow = resumed(here, spec)
    assert outputs(flow.admit("prep"))["run"] == "true"


def test_shared_result_is_adopted_by_another_run(here):
    spec = STEP.model_copy(update={"share": True})
    key = finish(here.submit(spec))
    other = here.submit(spec, name="digits-other", uid="uid-2")
    assert said(other.admit("prep")) == "Adopted from run digits-abc12, step prep, attempt 1"
    assert artifacts(other.conclude("prep", status="Skipped")) == {"data": key}


def test_result_is_not_shared_unless_the_author_says_so(here):
    finish(here.submit(STEP))
    assert keys(here.store, "control/memo/") == []
    other = here.submit(STEP.model_copy(update={"share": True}), name="digits-other", uid="uid-2")
    assert outputs(other.admit("prep"))["run"] == "true"


def test_damaged_shared_result_is_made_again(here):
    spec = STEP.model_copy(update={"share": True})
    here.store.delete(here.store.from_artifact_key(finish(here.submit(spec))))
    reply = here.submit(spec, name="digits-other", uid="uid-2").admit("prep")
    assert outputs(reply)["run"] == "true"
    assert "The shared result of run digits-abc12 is damaged" in said(reply)


def test_adopted_training_is_concluded_with_the_adopted_outputs(here):
    flow = here.submit(fit())
    key = flow.write_output(flow.admit("fit", 0), "artifacts/model", b"m")
    flow.conclude("fit", 0)
    again = resumed(here, fit())
    assert outputs(again.admit("fit", 0))["run"] == "false"
    verdict = again.conclude("fit", 0, status="Skipped", exit_code="-1")
    assert (phase(verdict), artifacts(verdict)) == ("Succeeded", {"model": key})


def test_admit_and_conclude_say_when_the_adopted_record_was_removed(here):
    finish(here.submit(STEP))
    flow = resumed(here, STEP)
    flow.admit("prep")
    here.store.delete("control/runs/digits-abc12/attempts/prep/000000001.end.json")
    assert "has been removed since" in said(flow.conclude("prep", status="Skipped"))
    asked_again = flow.admit("prep")
    assert (phase(asked_again), "has been removed since" in said(asked_again)) == ("Failed", True)


def test_conclude_does_not_succeed_with_an_adopted_record_that_was_passed_over(here):
    finish(here.submit(STEP))
    flow = resumed(here, STEP)
    flow.admit("prep")
    damage_end(here.store)
    pass_over_end(here.store, "digits-abc12", "prep", 1, "`tiphys resume --force`")
    verdict = flow.conclude("prep", status="Skipped")
    assert phase(verdict) == "Failed"
    assert "passed it over" in said(verdict)


def test_older_submission_may_open_no_attempt_once_a_newer_one_was_claimed(here):
    old = here.submit(STEP)
    resumed(here, STEP)
    reply = old.admit("prep")
    assert phase(reply) == "Failed"
    assert "submission 2 has taken over" in said(reply)
    assert records(here.store, "control/runs/digits-abc12/attempts/") == []


@pytest.mark.parametrize("change", [None, {"step_key": "another"}, {"outcome": "fenced"}])
def test_a_shared_result_whose_end_is_gone_or_another_is_not_adopted(here, change):
    shared = STEP.model_copy(update={"share": True})
    finish(here.submit(shared))
    key = RunLayout("digits-abc12").attempt_end("prep", 1)
    end = read_record(here.store, key, AttemptEnd)
    here.store.delete(key)
    if change is not None:
        here.store.create(key, AttemptEnd.model_validate(end.model_dump() | change).to_bytes())
    assert outputs(here.submit(shared, name="other", uid="uid-9").admit("prep"))["run"] == "true"
