"""An attempt of several pods through admit and conclude.

| what is seen of it | cause | message names |
|---|---|---|
| a rank failed, the others were deleted after it | that of the rank | the rank |
| several deleted, one before the others | preemption | the first |
| a rank was killed for its memory, others crashed in the same second | out of memory | the rank |
| the pods are gone, the Job remembers | what it remembers | the pod |
| nothing | infrastructure | – |
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.builders.authored_workflows import STORE, train
from support.builders.authored_workflows import workflow as authored
from support.fakes.resource_templates import filled_in
from support.stories.plugin import Flow, World, artifacts, fit, gpus, outputs, phase, records, said, workflow
from support.stories.plugin_with_gangs import JOB, gang_world, objects, pod, put
from tiphys_plugin import PodStatus, Queues
from tiphys_plugin.attempts import gangs

from hera_pipelines.compile import CompileOptions, Spot, compile_workflow
from tiphys.failures.classify import classify_failure
from tiphys.protocol.gang import FirstFailure, GangPhase, GangSpec, gang_name
from tiphys.protocol.operations import ADMIT_OUTPUTS, GANG_OUTPUTS
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL, NodeLabelValue, RetryPolicy, StepSpec
from tiphys.records import AttemptClaim, Cause
from tiphys.store import fence_attempt

FOUR = GangSpec(members=4)


@pytest.fixture
def here(tmp_path: Path) -> World:
    queues = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]})
    return gang_world(tmp_path, queues)


def spec(**changes: object) -> StepSpec:
    return fit(artifacts=(), gang=FOUR, gpu=gpus(8, members=4), **changes)


def started(here: World, flow: Flow, stage: GangPhase = GangPhase.ACTIVE) -> str:
    """The first attempt, its object made, and all its pods running; the name of the object."""
    answer = outputs(flow.admit("fit", 0))
    assert answer["run"] == "true"
    name = answer["gang"]
    objects(here).objects[name] = replace(JOB, name=name, stage=stage)
    for rank in range(4):
        put(here, rank)
    return name


def ends(here: World) -> list[tuple[str, str]]:
    found = records(here.store, "control/runs/digits-abc12/attempts/fit/")
    return [(one["cause"], one["message"]) for one in found if "outcome" in one]


TOLD = {"reason": "Deleted", "exit_code": 75}


@pytest.mark.parametrize(
    ("found", "cause", "member"),
    [
        (
            [pod(0, after=9, **TOLD), pod(1, after=8, exit_code=3), pod(2, after=9, **TOLD)],
            Cause.USER_ERROR,
            "rank 1 of 4",
        ),
        ([pod(0, after=8, **TOLD), pod(1, after=8, exit_code=3), pod(2)], Cause.USER_ERROR, "rank 1 of 4"),
        ([pod(0, after=9, **TOLD), pod(3, after=5, **TOLD)], Cause.PREEMPTION, "rank 3 of 4"),
        (
            [pod(0, after=5, exit_code=1), pod(2, after=5, exit_code=137, reason="OOMKilled")],
            Cause.OUT_OF_MEMORY,
            "rank 2",
        ),
        ([pod(0, after=9, exit_code=1), pod(2, "Running", after=5, reason="NodeLost")], Cause.INFRASTRUCTURE, "rank 2"),
        ([pod(1, rank=None, after=5, exit_code=3)], Cause.USER_ERROR, "pod job-1"),
    ],
)
def test_the_pod_whose_end_began_first_decides(found: list[PodStatus], cause: Cause, member: str) -> None:
    verdict = classify_failure(gangs.observe_gang_end(FOUR, JOB, found, "Failed"))
    assert verdict.cause is cause
    assert member in verdict.evidence


@pytest.mark.parametrize("name", ["job-2-xyz", "job-node-0-2-x1z5q"], ids=["job", "job-of-a-jobset"])
@pytest.mark.parametrize(
    ("exit_code", "cause", "word"), [(75, Cause.PREEMPTION, "code 75"), (None, Cause.PREEMPTION, "DisruptionTarget")]
)
def test_a_pod_that_is_gone_is_remembered_by_what_made_it(
    exit_code: int | None, cause: Cause, word: str, name: str
) -> None:
    message = f"Pod ml/{name} has condition DisruptionTarget, exit code {exit_code}"
    job = replace(JOB, first_failure=FirstFailure(name, exit_code, message))
    verdict = classify_failure(gangs.observe_gang_end(FOUR, job, [pod(0, after=9, **TOLD)], "Failed"))
    assert verdict.cause is cause
    assert word in verdict.evidence
    assert verdict.evidence.startswith("rank 2 of 4: ")


def test_pods_that_run_or_have_succeeded_are_not_why_it_ended() -> None:
    verdict = classify_failure(gangs.observe_gang_end(FOUR, JOB, [pod(0, "Running"), pod(1, "Succeeded")], "Failed"))
    assert verdict.cause is Cause.INFRASTRUCTURE
    assert "no pod of the gang shows how the attempt ended" in verdict.evidence


def test_without_what_made_them_deleted_pods_tell_nothing() -> None:
    """Whether they are still there when somebody looks is a matter of moments, and must not decide."""
    for found in ([], [pod(0, after=9, **TOLD)]):
        assert classify_failure(gangs.observe_gang_end(FOUR, None, found, "Error")).cause is Cause.INFRASTRUCTURE
    crashed = [pod(0, after=9, **TOLD), pod(1, after=10, exit_code=3)]
    assert classify_failure(gangs.observe_gang_end(FOUR, None, crashed, "Error")).cause is Cause.USER_ERROR


def test_admit_answers_what_the_manifest_needs(here: World) -> None:
    flow = here.submit(spec())
    reply = flow.admit("fit", 0)
    answer = outputs(reply)
    assert tuple(answer) == (*ADMIT_OUTPUTS, *GANG_OUTPUTS)
    assert answer["gang"] == gang_name("digits-abc12", "fit", 1)
    assert json.loads(f"[{answer['node-requirements']}]") == [{"key": "kubernetes.io/hostname", "operator": "Exists"}]
    assert json.loads(answer["input-keys"]) == {}
    assert said(reply).startswith("Attempt 1, 4 pods, holds 8 A100 of queue research")
    assert outputs(flow.admit("fit", 0)) == answer, "asked again, it answers the same"


def test_nodes_of_the_lease_and_the_chosen_type_become_requirements() -> None:
    claim = AttemptClaim(
        run="r",
        step="fit",
        attempt=1,
        submission=1,
        uid="u",
        node="n",
        instance="i",
        step_key="k",
        nodes=("b", "a", "a", "b"),
    )
    placement = {"nodeSelector": {"nvidia.com/gpu.product": "A100"}}
    parameters = gangs.gang_output_parameters(FOUR, claim, "{}", placement)
    assert json.loads(f"[{parameters['node-requirements']}]") == [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": ["a", "b"]},
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["A100"]},
    ]


def test_members_get_the_keys_of_their_inputs(here: World) -> None:
    key = here.store.artifact_key("data/runs/digits-abc12/outputs/prep/000000001/artifacts/data")
    given = [{"name": "data", "s3": {"key": key}}, {"name": "extra", "optional": True}]
    answer = outputs(here.submit(spec()).admit("fit", 0, artifacts=given))
    assert json.loads(answer["input-keys"]) == {"data": "data/runs/digits-abc12/outputs/prep/000000001/artifacts/data"}


def test_an_input_from_elsewhere_is_refused_before_anything_is_held(here: World) -> None:
    given = [{"name": "data", "http": {"url": "https://example.com/data"}}]
    reply = here.submit(spec()).admit("fit", 0, artifacts=given)
    assert phase(reply) == "Failed"
    assert "input artifact 'data' is not in" in said(reply)
    assert not here.ledger.snapshot().leases


def test_gpus_are_held_until_the_last_pod_is_gone(here: World) -> None:
    flow = here.submit(spec())
    name = started(here, flow)
    put(here, 1, "Failed", after=5, exit_code=3)
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.ENDING)
    assert phase(flow.end_try("fit", 0)) == "Pending"
    for rank in (0, 2, 3):
        assert phase(flow.end_try("fit", 0)) == "Pending"
        assert len(here.ledger.snapshot().leases) == 1
        put(here, rank, "Failed", after=6, **TOLD)
    assert (phase(flow.end_try("fit", 0)), objects(here).ended) == ("Failed", []), "it ended by itself"
    assert ends(here) == [("user_error", "rank 1 of 4: the program exited with 3")]
    assert not here.ledger.snapshot().leases


def test_a_gang_without_its_watcher_is_ended(here: World) -> None:
    flow = here.submit(spec())
    name = started(here, flow)
    assert phase(flow.end_try("fit", 0, status="Error")) == "Pending"
    assert objects(here).ended == [name]
    for rank in range(4):
        put(here, rank, "Failed", after=6, **TOLD)
    assert phase(flow.end_try("fit", 0, status="Error")) == "Error"
    assert [cause for cause, _ in ends(here)] == ["infrastructure"]


def test_an_object_whose_pods_are_still_to_come_is_ended_and_waited_for(here: World) -> None:
    flow = here.submit(spec())
    name = outputs(flow.admit("fit", 0))["gang"]
    objects(here).objects[name] = replace(JOB, name=name, stage=GangPhase.ACTIVE)
    assert phase(flow.end_try("fit", 0, status="Error")) == "Pending"
    assert len(here.ledger.snapshot().leases) == 1
    assert phase(flow.end_try("fit", 0, status="Error")) == "Error"
    assert not here.ledger.snapshot().leases


def test_a_member_that_failed_is_not_deleted_before_its_end_is_read(here: World) -> None:
    flow = here.submit(spec())
    started(here, flow)
    put(here, 1, "Failed", after=5, exit_code=3)
    assert phase(flow.end_try("fit", 0)) == "Pending"
    assert objects(here).ended == [], "what made it has not yet noticed, and will remember it"


def test_gpus_of_a_workflow_that_is_over_wait_for_pods_that_may_still_come(here: World) -> None:
    flow = here.submit(spec())
    name = outputs(flow.admit("fit", 0))["gang"]
    objects(here).objects[name] = replace(JOB, name=name, stage=GangPhase.ACTIVE)
    document = here.cluster.workflow("ml", "digits-abc12")
    assert document is not None
    here.cluster.write_workflow({**document, "status": {"phase": "Failed"}})
    flow.finalize("Failed")
    assert len(here.ledger.snapshot().leases) == 1
    del objects(here).objects[name]
    here.clock.advance(60)
    flow.finalize("Failed")
    assert not here.ledger.snapshot().leases


def test_a_gang_is_done_only_if_every_member_succeeded(here: World) -> None:
    flow = here.submit(spec())
    name = started(here, flow)
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.FINISHED)
    for rank in range(4):
        put(here, rank, "Succeeded", exit_code=0)
    verdict = flow.conclude("fit", 0)
    assert (phase(verdict), said(verdict)) == ("Succeeded", "Attempt 1 is done: no outputs to be verified")


def test_a_gang_that_finished_is_not_run_again_where_its_watching_pod_was_lost(here: World) -> None:
    flow = here.submit(spec())
    name = started(here, flow)
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.FINISHED)
    for rank in range(4):
        put(here, rank, "Succeeded", exit_code=0)
    verdict = flow.end_try("fit", 0, status="Error", exit_code="")
    assert phase(verdict) == "Succeeded", "the watching pod was lost, not the training"
    assert said(verdict) == "Attempt 1 is done, although Argo reports Error: no outputs to be verified"
    assert flow.end_try("fit", 0, status="Error", exit_code="") == verdict


@pytest.mark.parametrize("lost", [(0,), (1, 3), (0, 1, 2, 3)])
def test_gang_that_its_job_calls_complete_is_done_although_pods_went_with_the_node_of_the_watching_pod(
    here: World, lost: tuple[int, ...]
) -> None:
    flow = here.submit(fit(gang=FOUR, gpu=gpus(8, members=4)))
    name = started(here, flow)
    key = flow.write_output(flow.admit("fit", 0), "artifacts/model", b"weights")
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.FINISHED, succeeded=True)
    for rank in range(4):
        made = put(here, rank, "Succeeded", exit_code=0)
        if rank in lost:
            objects(here).lose(made)
    verdict = flow.end_try("fit", 0, status="Error", exit_code="")
    assert (phase(verdict), artifacts(verdict)) == ("Succeeded", {"model": key})
    assert not here.ledger.snapshot().leases


@pytest.mark.parametrize("is_complete", [True, False])
def test_next_try_of_a_gang_whose_end_was_not_concluded_takes_its_result_over_without_gpus(
    here: World, is_complete: bool
) -> None:
    flow = here.submit(fit(gang=FOUR, gpu=gpus(8, members=4)))
    name = started(here, flow)
    key = flow.write_output(flow.admit("fit", 0), "artifacts/model", b"weights")
    finished = replace(objects(here).objects[name], stage=GangPhase.FINISHED, succeeded=is_complete)
    objects(here).objects[name] = finished
    for rank in range(4):
        made = put(here, rank, "Succeeded", exit_code=0)
        if is_complete:
            objects(here).lose(made)
    again = flow.admit("fit", 1)
    assert outputs(again)["run"] == "false"
    assert artifacts(flow.conclude("fit", 1, status="Skipped", exit_code="-1")) == {"model": key}
    assert not here.ledger.snapshot().leases
    assert not here.ledger.snapshot().pending


@pytest.mark.parametrize("status", ["Failed", "Error"])
def test_a_single_successful_member_makes_no_success(here: World, status: str) -> None:
    flow = here.submit(spec())
    name = started(here, flow)
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.FINISHED)
    put(here, 0, "Failed", after=5, exit_code=3)
    for rank in (1, 2, 3):
        put(here, rank, "Succeeded", exit_code=0)
    assert phase(flow.conclude("fit", 0, status=status)) == "Failed"
    assert ends(here) == [("user_error", "rank 0 of 4: the program exited with 3")]


def test_a_gpu_that_is_too_small_for_a_rank_halves_the_batch_of_all(here):
    flow = here.submit(spec(retry=RetryPolicy(gpu_out_of_memory=1)))
    name = started(here, flow, GangPhase.FINISHED)
    full = "torch.OutOfMemoryError: CUDA out of memory"
    for rank in range(4):
        message = full if rank == 2 else ""
        put(
            here, rank, "Failed", after=1.0 + (rank != 2), exit_code=1, termination_message=message, host=f"node-{rank}"
        )
    assert "ended by GPU out of memory, rank 2 of 4" in said(flow.end_try("fit", 0))
    del objects(here).objects[name]
    before = outputs(flow.admit("fit", 1))
    claims = records(here.store, "control/runs/digits-abc12/attempts/fit/000000002.json")
    assert [claim["escalation"]["batch_scale"] for claim in claims] == [0.5]
    assert "TIPHYS_BATCH_SCALE" not in before["pod-patch"]


def asks(here: World, asked: StepSpec, memory: dict[str, str] | None = None) -> Flow:
    """A workflow whose admit answers memory, as compile makes it where it may grow."""
    made = workflow([asked])
    supplied = [{"name": name, "valueFrom": {"default": value}} for name, value in (memory or {}).items()]
    made["spec"]["templates"].append({"name": "fit-admit", "outputs": {"parameters": supplied}})
    here.cluster.write_workflow(made)
    return Flow(here, "digits-abc12", "uid-1")


def ended(here: World, flow: Flow, number: int, worst: dict[str, object]) -> None:
    """All members of an attempt fail, rank 2 as ``worst`` says; the others follow it, in the same second."""
    name = outputs(flow.admit("fit", number - 1))["gang"]
    objects(here).objects[name] = replace(JOB, name=name, stage=GangPhase.FINISHED)
    labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: str(number)}
    for rank in range(4):
        fields = worst if rank == 2 else {"exit_code": 1}
        here.cluster.write_pod(pod(rank, "Failed", float(number), labels=labels, **fields))
    assert phase(flow.end_try("fit", number - 1)) == "Error"
    objects(here).objects.pop(name, None)


def test_a_rank_that_had_too_little_memory_gets_all_of_them_more(here: World) -> None:
    ladder = RetryPolicy(out_of_memory=3, infrastructure=5, memory_ceiling_bytes=20 * 1024**3)
    flow = asks(here, spec(retry=ladder), {"memory-request": "4Gi", "memory-limit": "8Gi"})
    answered = []
    for number, end in enumerate(({"reason": "OOMKilled"}, {"reason": "Evicted"}, {"reason": "OOMKilled"}), 1):
        answered.append(outputs(flow.admit("fit", number - 1)))
        ended(here, flow, number, {"exit_code": 137, **end})
    last = flow.admit("fit", 3)
    answered.append(outputs(last))

    assert [(one["memory-request"], one["memory-limit"]) for one in answered] == [
        ("4Gi", "8Gi"),
        ("6Gi", "12Gi"),
        ("6Gi", "12Gi"),
        ("9Gi", "18Gi"),
    ]
    assert said(last).endswith("After earlier failures: 18Gi of memory")
    assert "containers" not in answered[-1]["pod-patch"]
    here.core = here.restart()
    assert flow.admit("fit", 3) == last, "the claim keeps what was answered"


def test_memory_is_answered_only_as_it_was_declared(here: World) -> None:
    flow = asks(here, spec(retry=RetryPolicy(memory_ceiling_bytes=1024**4)), {"memory-limit": "8Gi"})
    answer = outputs(flow.admit("fit", 0))
    assert (answer["memory-limit"], "memory-request" in answer) == ("8Gi", False)


@pytest.mark.parametrize("kinds", [("spot",), ("spot", "cheap")])
def test_members_leave_spot_nodes_that_were_taken_away(here: World, kinds: tuple[str, ...]) -> None:
    spot = tuple(NodeLabelValue(label=kind, value="true") for kind in kinds)
    flow = asks(here, spec(retry=RetryPolicy(on_demand_after=2), spot=spot))

    def asked_of_nodes(retry: int) -> list[tuple[str, str]]:
        found = json.loads(f"[{outputs(flow.admit('fit', retry))['node-requirements']}]")
        return [(one["key"], one["operator"]) for one in found if one["key"] in kinds]

    for number in (1, 2):
        assert asked_of_nodes(number - 1) == ([("spot", "In")] if len(kinds) == 1 else [])
        ended(here, flow, number, {"exit_code": 75, "reason": "Preempted"})
    assert asked_of_nodes(2) == [(kind, "NotIn") for kind in kinds]


@pytest.mark.parametrize("knows_nodes", [True, False])
def test_a_gang_avoids_a_node_where_the_queue_chooses_its_nodes(tmp_path: Path, knows_nodes: bool) -> None:
    nodes = [{"name": f"n{number}", "gpu_type": "A100", "gpus": 2} for number in range(1, 6)]
    rules = {"queues": [{"name": "research", "gpus": {"A100": 10}}], **({"nodes": nodes} if knows_nodes else {})}
    here = gang_world(tmp_path, Queues.model_validate(rules))
    flow = here.submit(spec())
    for number in (1, 2):
        flow.admit("fit", number - 1)
        ended(here, flow, number, {"reason": "NodeLost", "host": "n1"})
    reply = flow.admit("fit", 2)
    [requirement] = json.loads(f"[{outputs(reply)['node-requirements']}]")
    assert ("rather not on n1" in said(reply)) == knows_nodes
    assert requirement.get("values") == (["n2", "n3", "n4", "n5"] if knows_nodes else None)


def test_outputs_of_admit_reach_the_members_of_a_compiled_gang(here: World) -> None:
    resources = {"requests": {"memory": "4Gi"}, "limits": {"memory": "8Gi"}}
    retry = RetryPolicy(on_demand_after=1, memory_ceiling_bytes=1024**4)
    asked = {"gang": FOUR, "retry": retry, "spot": (Spot(label="spot"),)}
    compiled = compile_workflow(
        authored(train(container={"resources": resources}, asked=asked)), CompileOptions(store=STORE)
    )
    names = {"name": "digits-abc12", "namespace": "ml", "uid": "uid-1"}
    here.cluster.write_workflow({**compiled, "metadata": {**compiled["metadata"], **names}})
    flow = Flow(here, "digits-abc12", "uid-1")
    templates = {one["name"]: one for one in compiled["spec"]["templates"]}

    def members(retry: int) -> tuple[dict[str, Any], dict[str, Any]]:
        answer = outputs(flow.admit("fit", retry))
        assert {one["name"] for one in templates["fit-admit"]["outputs"]["parameters"]} <= set(answer)
        known = {f"inputs.parameters.tiphys-{name}": value for name, value in answer.items()}
        text = templates["fit-run"]["resource"]["manifest"]
        made = filled_in(text, {**known, "workflow.uid": "uid-1", "node.name": "n"})["spec"]["template"]["spec"]
        required = made["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        [term] = required["nodeSelectorTerms"]
        return made["containers"][0]["resources"], {one["key"]: one["operator"] for one in term["matchExpressions"]}

    host = {"kubernetes.io/hostname": "Exists"}
    assert members(0) == (resources, {**host, "spot": "In"})
    ended(here, flow, 1, {"exit_code": 137, "reason": "OOMKilled"})
    ended(here, flow, 2, {"exit_code": 75, "reason": "Preempted"})
    more = {"requests": {"memory": "6Gi"}, "limits": {"memory": "12Gi"}}
    assert members(2) == (more, {**host, "spot": "NotIn"})


@pytest.mark.parametrize(
    "asks", [lambda flow, rival: flow.end_try("fit", 0), lambda flow, rival: rival.admit("fit", 0)]
)
def test_a_fenced_gang_holds_its_gpus_until_its_job_creates_no_more_pods(here: World, asks) -> None:
    flow, rival = here.submit(spec()), here.submit(fit(gpu=gpus(8)), name="other-xyz99", uid="uid-2")
    name = started(here, flow)
    for rank in range(4):
        objects(here).lose(pod(rank))
    fence_attempt(here.store, "digits-abc12", "fit", 1, "submission 2 took over")
    job = objects(here).objects[name]

    def holders() -> list[str]:
        here.clock.advance(60)
        objects(here).objects.setdefault(name, job)  # a deletion that the API server has not carried out
        asks(flow, rival)
        return [lease.request.uid for lease in here.ledger.snapshot().leases]

    assert holders() == ["uid-1"]
    job = replace(job, stage=GangPhase.FINISHED)
    objects(here).objects[name] = job
    document = workflow([spec()])
    document["status"]["nodes"] = {"n": {"name": "digits-abc12.fit(0).run", "phase": "Failed"}}
    here.cluster.write_workflow(document)
    assert holders() != ["uid-1"]
