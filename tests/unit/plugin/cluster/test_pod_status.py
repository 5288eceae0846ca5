"""How the end of a real Pod is judged.

| pod                                         | finished | judged by                          |
|---------------------------------------------|----------|------------------------------------|
| a container runs, whatever the phase says   | no       |                                    |
| terminating, and a container runs           | no       |                                    |
| all containers ended, held by a finalizer   | yes      | main, and what was done before     |
| phase Unknown, NodeLost                     | no       | forced: node lost                  |
| node gone (garbage collected)               | yes      | node lost                          |
| evicted, deadline, refused by the node      | yes      | the pod's own reason               |
| deleted or drained before main ended        | yes      | the deletion                       |
| deleted or drained after main ended         | yes      | main's exit code                   |
| init or wait failed                         | yes      | which, and its code                |
"""

import pytest
from pydantic import ValidationError
from support.builders.argo_pods import disruption, ended, pod, runs, waits
from tiphys_plugin.attempts.pods import observe_pod_end
from tiphys_plugin.cluster.interface import DirectoryCluster, PodStatus
from tiphys_plugin.cluster.pod_status import pod_status

from tiphys.failures.classify import classify_failure
from tiphys.records import Cause

BOTH_OK = (ended("wait", 0), ended("main", 0))
SHUTDOWN = "Pod was terminated in response to imminent node shutdown."
PRESSURE = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi."


def died(code: int, reason: str = "", after: float = 100.0):
    return (ended("wait", 0, after=after + 1), ended("main", code, reason, after=after))


STILL_THERE = {
    "both run": pod(),
    "main has ended, and its outputs are being saved": pod(runs("wait"), ended("main", 0)),
    "terminating, in its grace period": pod(deleted_after=10),
    "drained, in its grace period": pod(deleted_after=10, conditions=(disruption("EvictionByEvictionAPI"),)),
    "phase runs ahead of the containers": pod(phase="Failed", reason="Evicted", message=PRESSURE),
    "phase is ahead of one container": pod(runs("wait"), ended("main", 1), phase="Failed"),
    "init runs": pod(
        waits("wait", "PodInitializing"), waits("main", "PodInitializing"), phase="Pending", init=runs("init")
    ),
    "image cannot be pulled": pod(runs("wait"), waits("main", "ImagePullBackOff"), phase="Pending"),
    "node is lost": pod(phase="Unknown", reason="NodeLost", deleted_after=10),
    "node is lost, as it is shown today": pod(deleted_after=10, conditions=(disruption("DeletionByTaintManager"),)),
    "only some containers have a status": pod(ended("main", 0)),
}


@pytest.mark.parametrize("found", STILL_THERE.values(), ids=STILL_THERE.keys())
def test_pod_that_may_use_its_gpus_is_not_finished(found):
    assert not pod_status(found).finished


@pytest.mark.parametrize("main", [runs("main"), ended("main", 0)], ids=["runs", "has ended"])
def test_image_of_another_container_is_no_reason_once_the_program_has_started(main):
    found = pod(main, waits("proxy", "ImagePullBackOff"), phase="Pending")
    assert pod_status(found).reason == ""
    assert pod_status(pod(waits("main", "PodInitializing"), init=waits("init", "ErrImagePull"), phase="Pending")).reason


FINISHED = {
    "succeeded": (pod(*BOTH_OK, phase="Succeeded"), "Succeeded", 0),
    "failed": (pod(*died(1), phase="Failed"), "Failed", 1),
    "held by a finalizer": (pod(*died(75), phase="Failed", deleted_after=90), "Failed", 75),
    "all containers ended before the phase says so": (pod(*died(75), deleted_after=90), "Failed", 75),
    "all ended well before the phase says so": (pod(*BOTH_OK), "Succeeded", 0),
    "its node is gone, though its containers were last seen to run": (
        pod(phase="Failed", deleted_after=400, conditions=(disruption("DeletionByPodGC"),)),
        "Failed",
        None,
    ),
    "init failed, main never started": (
        pod(
            waits("wait", "PodInitializing"),
            waits("main", "PodInitializing"),
            phase="Failed",
            init=ended("init", 64, message="key does not exist"),
        ),
        "Failed",
        None,
    ),
}


@pytest.mark.parametrize(("found", "phase", "code"), FINISHED.values(), ids=FINISHED.keys())
def test_pod_whose_containers_have_all_ended_is_finished(found, phase, code):
    seen = pod_status(found)
    assert (seen.finished, seen.phase, seen.exit_code) == (True, phase, code)


CAUSES = {
    "program failed": (pod(*died(1), phase="Failed"), Cause.USER_ERROR, "exited with 1"),
    "saved after SIGTERM": (pod(*died(75), phase="Failed"), Cause.PREEMPTION, "exit code 75"),
    "out of memory": (pod(*died(137, "OOMKilled"), phase="Failed"), Cause.OUT_OF_MEMORY, "OOMKilled"),
    "out of memory while it was being deleted": (
        pod(*died(137, "OOMKilled"), phase="Failed", deleted_after=90),
        Cause.OUT_OF_MEMORY,
        "OOMKilled",
    ),
    "evicted": (
        pod(*died(143), phase="Failed", reason="Evicted", message=PRESSURE),
        Cause.INFRASTRUCTURE,
        "low on resource",
    ),
    "spot node reclaimed": (
        pod(
            *died(1),
            phase="Failed",
            reason="Terminated",
            message=SHUTDOWN,
            conditions=(disruption("TerminationByKubelet", SHUTDOWN),),
        ),
        Cause.PREEMPTION,
        "node shutdown",
    ),
    "past its deadline": (
        pod(
            *died(143),
            phase="Failed",
            reason="DeadlineExceeded",
            message="Pod was active on the node longer than the specified deadline",
        ),
        Cause.DEADLINE,
        "longer than its deadline",
    ),
    "drained": (
        pod(
            *died(1),
            phase="Failed",
            deleted_after=90,
            conditions=(disruption("EvictionByEvictionAPI", "Eviction API: evicting", after=90),),
        ),
        Cause.PREEMPTION,
        "Eviction API",
    ),
    "drained long after it failed by itself": (
        pod(
            *died(1, after=10),
            phase="Failed",
            deleted_after=90,
            conditions=(disruption("EvictionByEvictionAPI", after=90),),
        ),
        Cause.USER_ERROR,
        "exited with 1",
    ),
    "preempted by the scheduler": (
        pod(*died(143), phase="Failed", deleted_after=90, conditions=(disruption("PreemptionByScheduler", after=90),)),
        Cause.PREEMPTION,
        "PreemptionByScheduler",
    ),
    "node tainted, and kubelet ended it": (
        pod(*died(1), phase="Failed", deleted_after=90, conditions=(disruption("DeletionByTaintManager", after=90),)),
        Cause.PREEMPTION,
        "DeletionByTaintManager",
    ),
    "node tainted, and kubelet is silent": (
        pod(deleted_after=90, conditions=(disruption("DeletionByTaintManager"),)),
        Cause.INFRASTRUCTURE,
        "NodeLost",
    ),
    "node gone": (
        pod(phase="Failed", conditions=(disruption("DeletionByPodGC", "PodGC: node no longer exists"),)),
        Cause.INFRASTRUCTURE,
        "node no longer exists",
    ),
    "node lost": (pod(phase="Unknown", reason="NodeLost"), Cause.INFRASTRUCTURE, "NodeLost"),
    "deleted": (pod(*died(1), phase="Failed", deleted_after=90), Cause.PREEMPTION, "Deleted"),
    "deleted in the second in which it ended": (
        pod(*died(1), phase="Failed", deleted_after=100),
        Cause.PREEMPTION,
        "Deleted",
    ),
    "deleted by Argo, once it had failed": (
        pod(*died(1), phase="Failed", deleted_after=105, grace=0),
        Cause.USER_ERROR,
        "exited with 1",
    ),
    "still ending when its attempt was ended by force": (pod(deleted_after=90), Cause.PREEMPTION, "Deleted"),
    "refused by the node": (
        pod(waits("main", ""), phase="Failed", reason="UnexpectedAdmissionError", message="Allocate failed"),
        Cause.INFRASTRUCTURE,
        "Allocate failed",
    ),
    "image not there": (
        pod(runs("wait"), waits("main", "ErrImagePull", "not found"), phase="Pending"),
        Cause.IMAGE,
        "ErrImagePull: not found",
    ),
    "registry does not answer": (
        pod(runs("wait"), waits("main", "ErrImagePull", "dial tcp: i/o timeout"), phase="Pending"),
        Cause.INFRASTRUCTURE,
        "i/o timeout",
    ),
    "program whose log says that its GPU is full": (
        pod(ended("wait", 0), ended("main", 1, "Error", "step 7\ntorch.OutOfMemoryError: CUDA out"), phase="Failed"),
        Cause.GPU_OUT_OF_MEMORY,
        "torch.OutOfMemoryError",
    ),
    "container could not be started": (
        pod(
            ended("wait", 0),
            ended("main", 128, "StartError", "nvidia-container-cli: initialization error"),
            phase="Failed",
        ),
        Cause.INFRASTRUCTURE,
        "nvidia-container-cli",
    ),
    "what the program writes into its termination log decides nothing": (
        pod(ended("wait", 0), ended("main", 1, message="preempted, OOMKilled, Evicted"), phase="Failed"),
        Cause.USER_ERROR,
        "exited with 1",
    ),
}


@pytest.mark.parametrize(("found", "cause", "says"), CAUSES.values(), ids=CAUSES.keys())
def test_cause_is_derived_from_the_pod_alone(found, cause, says):
    """As when an attempt is ended by the next one: Argo's word for it is not known there."""
    verdict = classify_failure(observe_pod_end([pod_status(found)], status="", exit_code=""))
    assert verdict.cause is cause
    assert says in verdict.evidence


def test_failed_executor_is_named_with_its_code_and_words():
    failed = pod(ended("wait", 64, message="could not save outputs"), ended("main", 0), phase="Failed")
    assert pod_status(failed).message == "wait: Error (exit code 64): could not save outputs"
    never = pod(waits("main", "PodInitializing"), phase="Failed", init=ended("init", 64, message="no such key"))
    assert pod_status(never).message == "init: Error (exit code 64): no such key"


def test_lines_of_argos_executor_are_no_words_of_the_program():
    log = (
        "Traceback (most recent call last):\n"
        "PermissionError: [Errno 13] Permission denied: 'points.json'\n"
        'time=2026-11-23T02:09:23.058Z level=INFO msg="sub-process exited" argo=true error="exit status 1"\n'
        'time="2026-11-23T02:09:23.058Z" level=warning msg="cannot save artifact" argo=true\n'
        "Error: exit status 1"
    )
    message = pod_status(pod(ended("main", 1, message=log), phase="Failed")).termination_message
    assert message.splitlines()[-1] == "PermissionError: [Errno 13] Permission denied: 'points.json'"
    assert pod_status(pod(ended("main", 1, message="Error: exit status 1\n"), phase="Failed")).termination_message == ""


def test_pod_says_to_which_workflow_and_node_it_belongs():
    seen = pod_status(pod())
    assert (seen.workflow_uid, seen.node) == ("uid-1", "digits-abc12.fit(0).run")
    assert (seen.namespace, seen.labels["tiphys.dev/attempt"]) == ("ml", "1")


def test_pod_that_is_not_scheduled_yet_is_pending():
    fresh = pod()
    del fresh["status"], fresh["metadata"]["ownerReferences"], fresh["metadata"]["annotations"]
    seen = pod_status(fresh)
    assert (seen.phase, seen.exit_code, seen.workflow_uid, seen.node) == ("Pending", None, "", "")


def test_pod_of_a_folder_with_an_unknown_field_is_refused(tmp_path):
    found = PodStatus(name="fit", workflow_uid="u1", node="wf.fit(0)")
    cluster = DirectoryCluster(tmp_path)
    cluster.write_pod(found)
    assert cluster.workflow_pods("u1") == [found]
    path = tmp_path / "pods" / "fit.json"
    path.write_text(path.read_text().replace('"phase"', '"stage"'))
    with pytest.raises(ValidationError, match=r"stage\s+Extra inputs are not permitted"):
        cluster.workflow_pods("u1")
