"""Which attempts a recorder claims and ends, by what Argo writes of the nodes of a step.

| nodes of the step                                  | claim | end                   |
|----------------------------------------------------|-------|-----------------------|
| none, or a Retry node without tries                | no    | no                    |
| Pod that waits or runs                             | yes   | no                    |
| Pod that succeeded                                 | yes   | done                  |
| Pod that succeeded, and Argo lacks its outputs     | yes   | no                    |
| Retry with a try that failed and one that runs     | yes   | no                    |
| Retry that succeeded                               | yes   | done, by the last try |
| Pod that Argo could not make                       | yes   | failed                |
| skipped, omitted, or refused before there is a pod | no    | no                    |
| those of a hook                                    | –     | –                     |
"""

from datetime import UTC, datetime, timedelta

import pytest
from support.fakes.argo_workflow import (
    RUN,
    START,
    ArgoWorkflow,
    attempt_keys,
    bare,
    claim_of,
    end_of,
    ungated,
)
from support.fakes.counting_store import CountingStore

from tiphys.protocol.step_spec import RESULT_PARAMETER, StepKind, StepSpec
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause, ItemBinding, item_step_id
from tiphys.store import RunLayout, read_record

MINUTE = timedelta(minutes=1)


def test_step_is_claimed_when_it_has_started_and_done_when_it_has_succeeded(store):
    flow = ArgoWorkflow(store, [ungated()])
    recorder = flow.recorder()
    assert flow.record(recorder).ends == {}
    flow.start(parameters={"lr": "0.1"})
    assert flow.record(recorder).ends == {}
    assert attempt_keys(store) == ["prep/000000001.json"]
    flow.finish(parameters={"rows": "3"}, artifacts={"data": b"1,2,3"})
    recorded = flow.record(recorder)
    assert (recorded.ends["prep"].outcome, recorded.names, recorded.refuted) == ("done", {"prep": "prep"}, frozenset())

    claim, end = claim_of(flow), end_of(flow)
    assert (claim.uid, claim.instance, claim.submission) == ("uid-1", "digits-abc.prep", 1)
    assert (end.step_key, end.exit_code, end.outputs_prefix) == (claim.step_key, 0, flow.folder())
    rows, data = end.outputs
    assert (rows.name, rows.value, rows.objects) == ("rows", "3", ())
    assert (data.name, data.key, data.directory) == ("data", f"{flow.folder()}data", False)
    assert [info.key for info in store.list("data/")] == [data.key], "a value has no object"


def test_times_are_those_of_the_nodes(store):
    flow = ArgoWorkflow(store, [bare()])
    flow.fail(flow.start(attempt=0))
    flow.finish(flow.start(attempt=1))
    flow.record()
    cut_off = timedelta(milliseconds=999)
    assert claim_of(flow).written_at == START + 2 * MINUTE + cut_off, "the start of the first pod"
    assert end_of(flow).last_alive_at == end_of(flow).ended_at == flow.now + cut_off == START + 7 * MINUTE + cut_off


def test_claim_without_a_readable_time_has_the_present(store):
    flow = ArgoWorkflow(store, [bare()])
    before = datetime.now(UTC) - timedelta(seconds=1)
    flow.start()
    flow.finish()
    flow.nodes["digits-abc.prep"] |= {"startedAt": "yesterday", "finishedAt": "9999-12-31T23:59:59-23:59"}
    flow.record()
    assert claim_of(flow).written_at > before
    assert end_of(flow).last_alive_at is None


def test_attempt_is_a_node_with_all_its_tries(store):
    flow = ArgoWorkflow(store, [ungated()])
    recorder = flow.recorder()
    flow.write("prep", "Retry")
    flow.record(recorder)
    assert attempt_keys(store) == []
    flow.start(attempt=0)
    flow.record(recorder)
    flow.fail("prep(0)", exit_code=1)
    flow.record(recorder)
    assert attempt_keys(store) == ["prep/000000001.json"], "Argo has a try left"
    flow.start(attempt=1)
    flow.finish("prep(1)", parameters={"rows": "3"}, artifacts={"data": b"x"})
    flow.record(recorder)
    assert attempt_keys(store) == ["prep/000000001.end.json", "prep/000000001.json"]
    assert claim_of(flow).instance == "digits-abc.prep"
    assert end_of(flow).outputs_prefix == flow.folder("prep(1)") != flow.folder("prep(0)")


def test_outputs_are_those_of_the_tenth_try_where_text_would_sort_the_ninth_last(store):
    flow = ArgoWorkflow(store, [ungated(artifacts=())])
    for attempt in range(10):
        flow.fail(flow.start(attempt=attempt), exit_code=1)
    flow.finish(flow.start(attempt=10), parameters={"rows": "10"})
    flow.record()
    assert [output.value for output in end_of(flow).outputs] == ["10"]


def test_failure_is_that_of_the_last_try_and_not_the_words_about_all_of_them(store):
    flow = ArgoWorkflow(store, [bare()])
    flow.fail(flow.start(attempt=0), "pod deleted", phase="Error")
    flow.start(attempt=1)
    flow.fail("prep(1)", exit_code=1, retry_message="No more retries left")
    flow.record()
    end = end_of(flow)
    assert (end.outcome, end.cause, end.exit_code) == ("failed", Cause.USER_ERROR, 1)
    assert end.message == "the program exited with 1 (ValueError: no rows)"


def test_step_that_failed_without_retries_is_failed(store):
    flow = ArgoWorkflow(store, [ungated()])
    flow.start()
    flow.fail(exit_code=1, hostNodeName="gpu-7")
    recorded = flow.record()
    assert recorded.refuted == frozenset(), "Argo has seen it"
    end = end_of(flow)
    assert (end.outcome, end.cause, end.outputs, end.step_key) == (
        *("failed", Cause.USER_ERROR, ()),
        claim_of(flow).step_key,
    )
    assert end.evidence is not None
    assert end.evidence.node == "gpu-7"


def test_pod_that_waits_for_a_node_or_a_lock_is_an_open_attempt(store):
    flow = ArgoWorkflow(store, [bare()])
    flow.write("prep", phase="Pending", message="Waiting for ml/Mutex/gpu lock. Lock status: 0/1")
    flow.record()
    assert attempt_keys(store) == ["prep/000000001.json"]


def test_pod_that_argo_could_not_make_is_a_failed_attempt(store):
    flow = ArgoWorkflow(store, [bare()])
    flow.write("prep", phase="Error", message='pods "digits" is forbidden: exceeded quota: gpus')
    flow.record()
    assert end_of(flow).outcome == "failed"
    assert "exceeded quota: gpus" in end_of(flow).message


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ("Skipped", "when 'false' evaluated false"),
        ("Omitted", "omitted: depends condition not met"),
        ("Error", "unable to resolve references: {{tasks.load.outputs.parameters.rows}}"),
    ],
)
def test_task_without_a_pod_opens_no_attempt(store, phase, message):
    """``initializeNode`` gives all of these the type Skipped."""
    flow = ArgoWorkflow(store, [bare()])
    flow.write("prep", "Skipped", phase, message=message)
    assert flow.record() == ({}, frozenset(), {}, (), {}, False)
    assert attempt_keys(store) == []


def test_tries_that_ran_count_although_argo_could_not_make_the_last(store):
    flow = ArgoWorkflow(store, [bare()])
    flow.fail(flow.start(attempt=0), exit_code=1)
    flow.write("prep(1)", "Skipped", "Error", message="failed to resolve {{retries}}")
    flow.write("prep", "Retry", "Error", message="task 'digits-abc.prep' errored")
    flow.record()
    assert end_of(flow).outcome == "failed"
    assert "failed to resolve {{retries}}" in end_of(flow).message


def test_success_counts_once_argo_has_the_outputs_of_the_pod(store):
    """``NodePhase.Fulfilled``: until then the phase of a pod may still change."""
    flow = ArgoWorkflow(store, [ungated(artifacts=())])
    recorder = flow.recorder()
    flow.start()
    flow.write("prep", phase="Succeeded", taskResultSynced=False, outputs={"exitCode": "0"})
    assert flow.record(recorder).ends == {}
    flow.write("prep", phase="Failed", message="workflow shutdown with strategy:  Stop")
    assert flow.record(recorder).ends == {}
    flow.finish(parameters={"rows": "3"})
    flow.write("prep", phase="Succeeded", taskResultSynced=True)
    assert flow.record(recorder).ends["prep"].outcome == "done"


@pytest.mark.parametrize("hook", ["onExit", "hooks.running", "hooks.on-retry"])
@pytest.mark.parametrize("retries", [False, True])
def test_hook_of_a_task_is_no_attempt_of_its_step(store, hook, retries):
    flow = ArgoWorkflow(store, [bare(), bare("sweep", fan_out=True)])
    recorder = flow.recorder()
    step = flow.start(attempt=0 if retries else None)
    item = flow.start_item("sweep", 0, "a.b", attempt=0 if retries else None)
    flow.finish(step)
    flow.finish(item)
    flow.record(recorder)
    for parent in ("prep", "sweep(0:a.b)"):
        flow.start(f"{parent}.{hook}", attempt=0 if retries else None)
        flow.fail(f"{parent}.{hook}{'(0)' if retries else ''}", retry_message="No more retries left")
    flow.start("prep(0).hooks.running")
    recorded = flow.record(recorder)
    assert {step: end.outcome.value for step, end in recorded.ends.items()} == {
        "prep": "done",
        item_step_id("sweep", "a.b", 0): "done",
    }
    assert len(attempt_keys(store)) == 4


def test_nodes_of_other_tasks_gates_and_workflows_are_not_recorded(store):
    specs = [bare(), bare("gated", gate=True), StepSpec(name="fit", kind=StepKind.TRAIN, template="t")]
    flow = ArgoWorkflow(store, specs)
    assert set(flow.recorder().specs) == {"prep"}
    for place in ("gated.run", "fit(0).run", "plain", "plain.prep", "onExit", "preparation"):
        flow.finish(flow.start(place))
    for name in ("digits-abc", "digits-abc2.prep", "prep", "digits-abd.prep"):
        flow.nodes[name] = {**flow.write("plain"), "name": name, "id": name}
    flow.record()
    assert attempt_keys(store) == []


def test_workflow_with_nothing_to_record_costs_no_request(store):
    counting = CountingStore(store)
    flow = ArgoWorkflow(store, [bare(gate=True)])
    recorder = flow.recorder(counting)
    flow.start("prep.run")
    counting.requests.clear()
    flow.record(recorder)
    assert not counting.requests


def test_items_of_a_fan_out_are_recorded_by_their_values(store):
    flow = ArgoWorkflow(store, [ungated("sweep", fan_out=True)])
    flow.write("sweep", "TaskGroup")
    items = {
        "0.1": flow.start_item("sweep", 0, "0.1"),
        '{"lr":0.2,"w":"a"}': flow.start_item("sweep", 1, '{"lr":0.2,"w":"a"}', "lr:0.2,w:a"),
        "f(x) (0)": flow.start_item("sweep", 2, "f(x) (0)", attempt=0),
        "a.b[1]": flow.start_item("sweep", 3, "a.b[1]"),
        "line\nbreak": flow.start_item("sweep", 4, "line\nbreak", attempt=0),
    }
    assert items["f(x) (0)"] == "sweep(2:fx 0)(0)"
    for rank, place in enumerate(items.values()):
        flow.finish(place, parameters={"rows": str(rank)}, artifacts={"data": b"%d" % rank})
    recorded = flow.record()
    assert recorded.faults == {}
    for rank, item in enumerate(items):
        step = item_step_id("sweep", item, 0)
        assert end_of(flow, step).outputs[0].value == str(rank)
        binding = read_record(store, RunLayout(RUN).item(1, step), ItemBinding)
        assert (binding.item, f"digits-abc.{binding.label}") == (item, claim_of(flow, step).instance)
        assert recorded.names[step] == binding.label
    assert len(recorded.ends) == len(items)


def test_spelling_of_an_item_does_not_matter(store):
    flow = ArgoWorkflow(store, [bare("sweep", fan_out=True)])
    flow.finish(flow.start_item("sweep", 0, '{"w": "a",  "lr": 1.0}', "lr:1,w:a"))
    flow.record()
    assert end_of(flow, item_step_id("sweep", '{"lr":1,"w":"a"}', 0)).outcome == "done"


def test_equal_items_are_distinguished_and_keep_their_places(store):
    flow = ArgoWorkflow(store, [ungated("sweep", fan_out=True, artifacts=())])
    first, second, third = (flow.start_item("sweep", index, "same") for index in range(3))
    flow.finish(second, parameters={"rows": "2"})
    flow.record()
    flow.finish(first, parameters={"rows": "1"})
    flow.finish(third, parameters={"rows": "3"})
    flow.record()
    steps = [item_step_id("sweep", "same", ordinal) for ordinal in range(3)]
    instances = {claim_of(flow, step).instance: end_of(flow, step).outputs[0].value for step in steps}
    assert instances == {f"digits-abc.{first}": "1", f"digits-abc.{second}": "2", f"digits-abc.{third}": "3"}
    assert len(attempt_keys(store)) == 6


def test_items_of_a_task_without_a_fan_out_and_a_fan_out_without_items_are_not_argos(store):
    flow = ArgoWorkflow(store, [bare(), bare("sweep", fan_out=True)])
    flow.finish(flow.start_item("prep", 0, "a"))
    flow.finish(flow.start("sweep"))
    flow.record()
    assert attempt_keys(store) == []


def test_empty_fan_out_has_no_attempts(store):
    flow = ArgoWorkflow(store, [bare("sweep", fan_out=True)])
    flow.write("sweep", "Skipped", "Skipped", message="Skipped, empty params")
    assert flow.record().ends == {}
    assert attempt_keys(store) == []


def test_standard_output_is_kept_where_argo_reports_it(store):
    flow = ArgoWorkflow(store, [ungated(artifacts=())])
    flow.start()
    flow.finish(parameters={"rows": "3"}, result="a line\nand another")
    flow.record()
    assert {one.name: one.value for one in end_of(flow).outputs} == {
        "rows": "3",
        RESULT_PARAMETER: "a line\nand another",
    }


@pytest.mark.parametrize("result", ["é" * (32 << 10) + "x", 5, None])
def test_standard_output_that_no_workflow_should_hold_is_left_out(store, result):
    flow = ArgoWorkflow(store, [bare()])
    flow.start()
    flow.finish(result=result)
    flow.record()
    assert (end_of(flow).outcome, end_of(flow).outputs) == (AttemptEndOutcome.DONE, ())


def test_refuted_step_is_one_that_argo_saw_succeed(store):
    flow = ArgoWorkflow(store, [ungated(), ungated("load"), bare("check")])
    for place in ("prep", "load", "check"):
        flow.start(place)
    flow.finish(parameters={"rows": "3"})
    flow.fail("load", exit_code=1)
    flow.finish("check")
    recorded = flow.record()
    assert recorded.refuted == {"prep"}
    assert {step: end.outcome.value for step, end in recorded.ends.items()} == {
        "prep": "failed",
        "load": "failed",
        "check": "done",
    }


def test_repeated_record_reads_and_writes_nothing(store):
    counting = CountingStore(store)
    flow = ArgoWorkflow(store, [ungated(), bare("sweep", fan_out=True), bare("check")])
    recorder = flow.recorder(counting)
    flow.start()
    for index in range(3):
        flow.finish(flow.start_item("sweep", index, "same"))
    flow.fail(flow.start("check"), exit_code=1)
    first = flow.record(recorder)
    before, counting.requests = counting.requests, type(counting.requests)()
    assert before["create"] > 0
    assert flow.record(recorder) == first
    assert not counting.requests
    flow.finish(parameters={"rows": "3"}, artifacts={"data": b"x"})
    flow.record(recorder)
    counting.requests.clear()
    assert set(flow.record(recorder).ends) > set(first.ends)
    assert not counting.requests


def test_thousand_items_cost_one_listing_of_attempts(store):
    counting = CountingStore(store)
    flow = ArgoWorkflow(store, [bare("sweep", fan_out=True)])
    recorder = flow.recorder(counting)
    for index in range(100):
        flow.start_item("sweep", index, str(index))
    counting.requests.clear()
    flow.record(recorder)
    assert len(attempt_keys(store)) == 100
    assert counting.requests["list"] == 1


def test_equal_items_cost_no_more_reads_than_others(store):
    counting = CountingStore(store)
    flow = ArgoWorkflow(store, [bare("sweep", fan_out=True)])
    recorder = flow.recorder(counting)
    for index in range(100):
        flow.start_item("sweep", index, "same")
    for one in (recorder, flow.recorder(counting)):
        counting.requests.clear()
        flow.record(one)
        # Each of sixteen threads may read a place that another has just taken; each item reads all before it otherwise.
        assert counting.requests["read"] < 16 * 100 < 100 * 100 / 2
    assert len(attempt_keys(store)) == 100


def test_second_recorder_reports_what_the_first_has_recorded(store):
    flow = ArgoWorkflow(store, [ungated(), bare("check")])
    flow.start()
    flow.finish(parameters={"rows": "3"}, artifacts={"data": b"x"})
    flow.start("check")
    flow.fail("check", exit_code=1)
    ended: list[AttemptEnd] = []
    first = flow.record(flow.recorder(on_end=ended.append))
    assert sorted(end.step for end in ended) == ["check", "prep"]
    objects = dict(store.objects)
    assert flow.record(flow.recorder(on_end=ended.append)) == first
    assert (store.objects, len(ended)) == (objects, 2)


def test_recorder_keeps_no_outputs_in_memory(store):
    flow = ArgoWorkflow(store, [ungated()])
    recorder = flow.recorder()
    flow.start()
    flow.finish(parameters={"rows": "3"}, artifacts={"data": b"x"})
    for one in (recorder, flow.recorder()):
        assert flow.record(one).ends["prep"].outputs == ()
    assert len(end_of(flow).outputs) == 2


def test_time_that_is_over_leaves_steps_to_the_next_call(store):
    flow = ArgoWorkflow(store, [bare()])
    recorder = flow.recorder()
    flow.start()
    flow.finish()
    recorded = flow.record(recorder, seconds=-1.0)
    assert (recorded.waiting, recorded.ends) == (("prep",), {})
    assert flow.record(recorder, seconds=60.0).ends["prep"].outcome == "done"
