"""Steps without a gate, as finalize and the admit of a step behind record them from the nodes of their Workflow.

| the live Workflow                                   | finalize                                      |
|-----------------------------------------------------|-----------------------------------------------|
| all steps have ended                                | records them, and seals                       |
| its own node is not final yet                       | waits, 20 s at most                           |
| outputs are being hashed                            | waits                                         |
| a step succeeded, and its artifact is not there     | records the step as failed, fails the Workflow |
| a step failed                                       | says why in one sentence, not in Argo's words |
| a step failed, and the author tolerates that        | seals as succeeded                            |
| a record cannot be read                             | says so, and seals                            |
| gone, or a database has its nodes                   | seals                                         |

| a step without a gate before a gated one            | admit of the latter                           |
|-----------------------------------------------------|-----------------------------------------------|
| none                                                | reads no Workflow                             |
| its node has ended                                  | records it first, then decides                |
| Argo has not stored its end yet                     | waits, 20 s at most                           |
| it made the same bytes again                        | finds the finished result                     |
| it succeeded, and its artifact is not there         | refuses the step                              |
| it failed, or was left out, and may                 | goes on                                       |
| a database has its node                             | goes on                                       |
"""

import hashlib
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.fakes.argo_workflow import RUN, ArgoWorkflow, ungated
from support.stories.plugin import World, fit, keys, outputs, phase, prep, said
from support.stories.recorded_flow import RecordedFlow
from tiphys_plugin.operations.recording import _LONGEST_WAIT_SECONDS
from tiphys_plugin.runtime.background import HashingProgress
from tiphys_plugin.runtime.context import _MAX_RECORDERS, RecorderCache

from tiphys.protocol.step_spec import StepSpec
from tiphys.records import AttemptEndOutcome, Cause, item_step_id
from tiphys.store import RunLayout, read_step_attempts
from tiphys.store.workflow_layout import OutputOrigin, output_origin

GATED = prep(name="train", template="t-train", parameters=(), artifacts=())
STOPPED = "workflow shutdown with strategy:  Stop"


def submit(here: World, *specs: StepSpec) -> RecordedFlow:
    specs = specs or (ungated(), GATED)
    return RecordedFlow(here, ArgoWorkflow(here.store, specs, {"train": "prep"} if GATED in specs else {}))


def wait_out(live: RecordedFlow, call: Any) -> list[str]:
    """Call until it is no longer answered with Pending; the messages of the waits, one each 4 s."""
    messages = []
    for _ in range(20):
        reply = call()
        if phase(reply) != "Pending":
            return messages
        messages.append(said(reply))
        live.here.clock.advance(_LONGEST_WAIT_SECONDS / 5)
    raise AssertionError(f"it waits for ever: {messages[-1]}")


# --- finalize ---


def test_finalize_records_the_steps_that_nothing_has_recorded(here):
    live = submit(here)
    live.finish()
    live.store("Succeeded")
    assert said(live.finalize()) == f"Run {RUN}, submission 1: Succeeded"
    end = live.end()
    assert (end.outcome, end.outputs_prefix) == (AttemptEndOutcome.DONE, live.argo.folder())
    rows, data = end.outputs
    assert (rows.name, rows.value, rows.objects) == ("rows", "3", ())
    assert [one.sha256 for one in data.objects] == [hashlib.sha256(b"1,2,3").hexdigest()]
    origin = OutputOrigin(live.argo.pod(), RUN, "prep", 1)
    assert keys(here.store, "control/workflows/") == [output_origin("uid-1", origin)]
    assert read_step_attempts(here.store, RUN, "train") == [], "a gated step that never ran"


def test_repeated_finalize_records_nothing_again(here):
    live = submit(here)
    live.finish()
    live.store("Succeeded")
    first = live.finalize()
    before = keys(here.store)
    assert live.finalize() == first
    live.here.core = here.restart()
    assert live.finalize() == first
    assert keys(here.store) == before
    assert 'tiphys_attempts_ended_total{cause="done"}' not in here.core.metrics.render().decode()


def test_steps_that_finalize_records_are_counted_by_their_outcome(here):
    live = submit(here, ungated(), ungated("other"))
    live.finish()
    live.argo.start("other")
    live.argo.fail("other", exit_code=1)
    live.store("Failed")
    live.finalize("Failed")
    text = here.core.metrics.render().decode()
    assert 'tiphys_attempts_ended_total{cause="done"} 1.0' in text
    assert 'tiphys_attempts_ended_total{cause="user_error"} 1.0' in text


def test_finalize_waits_for_the_nodes_that_argo_stores_a_moment_later(here):
    live = submit(here)
    live.argo.start()
    live.store()
    waiting = live.finalize()
    assert (phase(waiting), said(waiting)) == ("Pending", "Argo has not stored the end of the last step yet")
    assert not keys(here.store, RunLayout(RUN).attempts)
    live.argo.finish(parameters={"rows": "3"}, artifacts={"data": b"x"})
    live.store("Succeeded")
    assert phase(live.finalize()) == "Succeeded"
    assert live.end().outcome is AttemptEndOutcome.DONE


def test_finalize_gives_up_after_20_seconds_and_records_what_the_nodes_show(here):
    live = submit(here, ungated(), ungated("slow"))
    live.finish()
    live.argo.start("slow")
    live.store()
    began = here.clock.now
    assert set(wait_out(live, live.finalize)) == {"Argo has not stored the end of the last step yet"}
    assert (here.clock.now - began).total_seconds() == _LONGEST_WAIT_SECONDS
    assert live.flow.sealed()["status"] == "Succeeded"
    assert live.end().outcome is AttemptEndOutcome.DONE
    (slow,) = read_step_attempts(here.store, RUN, "slow")
    assert slow.end is None


def test_finalize_of_a_workflow_whose_steps_all_have_a_gate_waits_for_no_node(here):
    live = submit(here, GATED, fit())
    live.store()
    assert phase(live.finalize()) == "Succeeded"


@pytest.mark.parametrize("call", ["finalize", "admit"])
def test_call_waits_while_outputs_are_hashed(here, monkeypatch, call):
    live = submit(here)
    artifact = live.finish()
    live.store("Succeeded")
    ask = live.finalize if call == "finalize" else lambda: live.admit("train", artifact)
    with monkeypatch.context() as patch:
        patch.setattr(here.core._context.hasher, "hash_objects", lambda *_: HashingProgress(0, 1))
        waiting = ask()
        here.clock.advance(10 * _LONGEST_WAIT_SECONDS)
        assert ask() == waiting, "hashing takes as long as it takes"
    assert (phase(waiting), said(waiting)) == ("Pending", "Verifying the outputs of prep")
    assert read_step_attempts(here.store, RUN, "prep")[0].end is None
    assert phase(ask()) == "Succeeded"
    assert live.end().outcome is AttemptEndOutcome.DONE


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(("lost", "why"), [("object", "there is nothing at"), ("node", "is missing in Argo's node")])
def test_finalize_fails_a_workflow_whose_step_succeeded_without_its_artifact(here, lost, why, is_restarted):
    live = submit(here, ungated())
    live.finish()
    if lost == "object":
        here.store.delete(f"{live.argo.folder()}data")
    else:
        live.argo.nodes[f"{live.argo.name}.prep"]["outputs"].pop("artifacts")
    live.store("Succeeded")
    verdict = live.finalize()
    assert phase(verdict) == "Failed"
    assert said(verdict).startswith(f"Run {RUN}, submission 1: Failed: prep failed in attempt 1 by output missing: ")
    assert why in said(verdict)
    assert f"`tiphys resume {RUN}`" in said(verdict)
    assert live.flow.sealed()["status"] == "Failed"
    assert (live.end().outcome, live.end().cause) == (AttemptEndOutcome.FAILED, Cause.OUTPUT_MISSING)
    if is_restarted:
        here.core = here.restart()
    assert live.finalize() == verdict, "asked again, as by `argo retry`"


def test_verdict_on_a_failed_step_stands_for_all_that_argo_says_of_it(here):
    live = submit(here, ungated(), ungated("other"))
    for number in range(2):
        live.argo.start(attempt=number)
        live.argo.fail(f"prep({number})", exit_code=1, retry_message="No more retries left" if number else None)
    live.argo.write("notify", phase="Failed", message="main: Error (exit code 2)")
    live.store("Failed")
    reply = live.finalize("Failed")
    message = live.flow.sealed()["message"]
    assert said(reply) == f"Run {RUN}, submission 1: Failed: {message}"
    verdict, foreign = message.split("; ")
    assert verdict.startswith(
        "prep failed in attempt 1 by user error: the program exited with 1 (ValueError: no rows)."
    )
    assert f"`tiphys resume {RUN}`" in verdict
    assert foreign == "notify: main: Error (exit code 2)"


def test_verdict_on_an_item_names_it_as_people_do(here):
    live = submit(here, ungated("sweep", parameters=(), artifacts=(), fan_out=True))
    for index, item in enumerate(("0.1", "0.2")):
        place = live.argo.start_item("sweep", index, item)
        if index:
            live.argo.fail(place, exit_code=1)
        else:
            live.argo.finish(place)
    live.store("Failed")
    live.finalize("Failed")
    message = live.flow.sealed()["message"]
    assert message.startswith("sweep[1] failed in attempt 1 by user error: ")
    assert "0.2" not in message


def test_failure_that_the_author_tolerates_stays_tolerated(here):
    live = submit(here)
    live.argo.start()
    live.argo.fail(exit_code=3)
    live.store("Succeeded")
    reply = live.finalize()
    assert (phase(reply), said(reply)) == ("Succeeded", f"Run {RUN}, submission 1: Succeeded")
    assert live.flow.sealed()["status"] == "Succeeded"
    assert live.end().cause is Cause.USER_ERROR


def test_stopped_step_is_not_charged_and_the_record_says_that_it_was_stopped(here):
    live = submit(here)
    live.argo.start()
    live.argo.fail(message=STOPPED)
    live.store("Failed")
    live.finalize("Failed")
    assert (live.end().outcome, live.end().stopped) == (AttemptEndOutcome.FENCED, True)
    assert live.flow.sealed()["message"] == f"prep: {STOPPED}"


def test_record_that_cannot_be_read_is_reported_and_does_not_keep_the_submission_open(here):
    live = submit(here, ungated(), ungated("other"))
    live.finish()
    live.finish(step="other")
    key = RunLayout(RUN).attempt("prep", 1)
    here.store.create(key, b"{")
    live.store("Succeeded")
    assert phase(live.finalize()) == "Succeeded"
    message = live.flow.sealed()["message"]
    assert message.startswith("prep: its end cannot be recorded: ")
    assert f"{key} is not a valid AttemptClaim" in message
    assert live.end("other").outcome is AttemptEndOutcome.DONE


def test_steps_whose_nodes_a_database_has_are_left_to_others(here):
    live = submit(here)
    live.finish()
    live.store("Succeeded", offloadNodeStatusVersion="fnv:1", nodes={})
    assert phase(live.finalize()) == "Succeeded"
    assert live.flow.sealed()["status"] == "Succeeded"
    assert not keys(here.store, RunLayout(RUN).attempts)


def test_workflow_that_another_replaced_under_its_name_is_not_recorded(here):
    live = submit(here)
    assert phase(live.admit("train")) == "Succeeded"  # the Workflow is known
    live.finish()
    live.argo.uid = "uid-9"
    live.store("Succeeded")
    assert phase(live.finalize()) == "Succeeded"
    assert not keys(here.store, RunLayout(RUN).step_attempts("prep"))


# --- admit of a step behind ---


def test_admit_records_the_step_that_made_its_input_before_it_computes_its_key(here):
    live = submit(here)
    artifact = live.finish()
    live.store()
    assert outputs(live.admit("train", artifact))["run"] == "true"
    assert live.end().outcome is AttemptEndOutcome.DONE
    (train,) = read_step_attempts(here.store, RUN, "train")
    assert train.claim.dataset, "the content of its input is part of its key"


@pytest.mark.parametrize(("data", "run"), [(b"1,2,3", "false"), (b"1,2,4", "true")])
def test_result_counts_for_an_input_that_was_made_again_if_its_bytes_are_the_same(here, data, run):
    first = submit(here)
    artifact = first.finish()
    first.store()
    first.admit("train", artifact)
    assert phase(first.flow.conclude("train")) == "Succeeded"

    second = first.resumed()
    made_again = second.finish(data)
    second.store()
    assert made_again["s3"] != artifact["s3"]
    reply = second.admit("train", made_again)
    assert outputs(reply)["run"] == run
    assert run == "true" or said(reply) == "Adopted from attempt 1"
    assert second.end(attempt=2).submission == 2


def test_admit_waits_for_the_end_that_argo_stores_a_moment_later(here):
    live = submit(here)
    live.argo.start()
    live.store()
    waiting = live.admit("train", live.artifact())
    assert (phase(waiting), said(waiting)) == ("Pending", "The steps before it are not recorded yet")
    live.argo.finish(parameters={"rows": "3"}, artifacts={"data": b"x"})
    live.store()
    assert outputs(live.admit("train", live.artifact()))["run"] == "true"
    assert live.end().outcome is AttemptEndOutcome.DONE


def test_admit_gives_up_after_20_seconds_and_says_so_in_the_log(here):
    live = submit(here)
    live.argo.start()
    live.store()
    began = here.clock.now
    with capture_logs() as logs:
        assert wait_out(live, lambda: live.admit("train", live.artifact()))
    assert (here.clock.now - began).total_seconds() == _LONGEST_WAIT_SECONDS
    [warning] = [entry for entry in logs if entry["event"] == "steps.unrecorded"]
    assert (warning["before"], warning["steps"]) == ("train", ["prep"])
    assert len(read_step_attempts(here.store, RUN, "train")) == 1


def test_admit_does_not_wait_for_nodes_that_a_database_has(here):
    live = submit(here, ungated(), GATED, prep(name="known", template="t-known"))
    live.admit("known")
    live.finish()
    live.store(offloadNodeStatusVersion="fnv:1", nodes={})
    assert outputs(live.admit("train", live.artifact()))["run"] == "true"


def test_admit_reads_the_workflow_once_for_a_step_that_waits(here, monkeypatch):
    live = submit(here)
    artifact = live.finish()
    live.store()
    assert outputs(live.admit("train", artifact))["run"] == "true"

    def refuse(*_: object) -> None:
        raise AssertionError("the Workflow was read")

    monkeypatch.setattr(here.cluster, "workflow", refuse)
    assert outputs(live.admit("train", artifact))["run"] == "true"


def test_admit_of_a_step_behind_no_recorded_step_reads_no_workflow(here, monkeypatch):
    live = submit(here, ungated(), GATED, prep(name="known", template="t-known"))
    live.store()
    live.admit("known")
    monkeypatch.setattr(here.cluster, "workflow", lambda *_: pytest.fail("the Workflow was read"))
    assert outputs(live.admit("known"))["run"] == "true"


def test_admit_refuses_a_step_behind_one_whose_output_is_gone(here):
    live = submit(here)
    artifact = live.finish()
    here.store.delete(here.store.from_artifact_key(artifact["s3"]["key"]))
    live.store()
    reply = live.admit("train", artifact)
    assert phase(reply) == "Failed"
    assert "prep failed in attempt 1 by output missing" in said(reply)
    assert read_step_attempts(here.store, RUN, "train") == []


def test_training_behind_a_step_whose_output_is_gone_does_not_retry_for_ever(here):
    live = RecordedFlow(here, ArgoWorkflow(here.store, [ungated(), fit()], {"fit": "prep"}))
    live.finish()
    here.store.delete(f"{live.argo.folder()}data")
    live.store()
    reply = live.flow.admit("fit", 0)
    assert phase(reply) == "Failed"
    assert "prep failed in attempt 1 by output missing" in said(reply)
    assert phase(live.flow.conclude("fit", 0, status="Skipped")) == "Failed"


@pytest.mark.parametrize(
    ("ending", "causes"), [("Failed", [Cause.USER_ERROR]), ("Omitted", [])], ids=["failed", "left out"]
)
def test_admit_goes_on_behind_a_step_that_may_fail_or_be_left_out(here, ending, causes):
    live = submit(here)
    live.argo.depends = {"train": "prep.Failed || prep.Omitted"}
    if ending == "Failed":
        live.argo.start()
        live.argo.fail(exit_code=1)
    else:
        live.argo.write("prep", "Skipped", phase="Omitted")
    live.store()
    assert outputs(live.admit("train"))["run"] == "true"
    assert [attempt.end.cause for attempt in read_step_attempts(here.store, RUN, "prep")] == causes


def test_admit_waits_for_a_step_that_its_task_names_in_a_list(here):
    live = submit(here)
    live.argo.start()
    live.argo.depends = {}
    live.store()
    document = here.cluster.workflow("ml", live.argo.name)
    document["spec"]["templates"][0]["dag"]["tasks"][1]["dependencies"] = ["prep"]
    here.cluster.write_workflow(document)
    assert phase(live.admit("train")) == "Pending"


def test_admit_records_all_items_of_a_fan_out_before_it(here):
    sweep = ungated("sweep", parameters=("loss",), artifacts=(), fan_out=True)
    live = RecordedFlow(here, ArgoWorkflow(here.store, [sweep, GATED], {"train": "sweep"}))
    places = [live.argo.start_item("sweep", index, item) for index, item in enumerate(("0.1", "0.2"))]
    live.argo.finish(places[0], {"loss": "3"})
    live.store()
    assert phase(live.admit("train")) == "Pending"
    live.argo.finish(places[1], {"loss": "4"})
    live.store()
    assert outputs(live.admit("train"))["run"] == "true"
    ended = [read_step_attempts(here.store, RUN, item_step_id("sweep", item, 0)) for item in ("0.1", "0.2")]
    assert [attempt.end.outputs[0].value for (attempt,) in ended] == ["3", "4"]


def test_recorders_are_kept_for_the_workflows_that_called_last(here):
    cache, made = RecorderCache(), submit(here).argo.recorder
    first = cache.get("uid-0", made)
    for number in range(1, _MAX_RECORDERS):
        cache.get(f"uid-{number}", made)
    assert cache.get("uid-0", made) is first
    second = cache.get("uid-1", made)
    cache.get("one more", made)
    assert cache.get("uid-0", made) is first
    assert cache.get("uid-1", made) is second
    assert cache.get("uid-2", made) is not first
    assert len(cache._recorders) == _MAX_RECORDERS
