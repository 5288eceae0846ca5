"""How an attempt ended, judged from what Argo and Kubernetes show.

| what happened | status | exit code | reason or message | cause |
|---|---|---|---|---|
| program succeeded | Succeeded | 0 | | none |
| did not run | Skipped, Omitted | | | none |
| saved after SIGTERM | Failed | 75 | | preemption |
| SIGTERM without a handler | Failed | 143 | | preemption |
| pod deleted before it was seen | Error | | pod deleted | preemption |
| spot node reclaimed | Failed | any | imminent node shutdown | preemption |
| node under pressure | Failed | any | Evicted, low on resource | infrastructure |
| killed, not for memory | Failed | 137 | | infrastructure |
| killed for memory | Failed | 137 | OOMKilled | out of memory |
| past the deadline | Failed | any | longer than the specified deadline | deadline |
| drained, or its node tainted | Failed | any | EvictionByEvictionAPI, DeletionByTaintManager | preemption |
| node refused it | Failed | | OutOf…, TopologyAffinityError | infrastructure |
| image not pulled, container not made | any | 128 or none | ErrImagePull, StartError, … | infrastructure |
| executor failed | Failed, Error | 64, 141 | | infrastructure |
| never started, wait or init failed | Error | | | infrastructure |
| fenced | Failed | 76 | | infrastructure |
| storage out of reach at the start | Failed | 69 | | infrastructure |
| program failed | Failed | any other | | user error |
| nothing is known | | | | unknown |
"""

import pytest

from tiphys.lineage.classify import Observation, classify
from tiphys.records import Cause

SHUTDOWN = "Pod was terminated in response to imminent node shutdown."
PRESSURE = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi."
DEADLINE = "Pod was active on the node longer than the specified deadline"
NEVER_STARTED = "Pod failed before main container starts due to UnexpectedAdmissionError"

TABLE = [
    (Observation("Succeeded", 0), None),
    (Observation("Succeeded"), None),
    (Observation("Skipped"), None),
    (Observation("Omitted"), None),
    (Observation("Failed", 75), Cause.PREEMPTION),
    (Observation("", 75, pod_seen=True), Cause.PREEMPTION),
    (Observation("Error", 75), Cause.PREEMPTION),
    (Observation("Failed", 143), Cause.PREEMPTION),
    (Observation("Error", -1, pod_message="pod deleted"), Cause.PREEMPTION),
    (Observation("", None, pod_reason="Deleted"), Cause.PREEMPTION),
    (Observation("Failed", 1, pod_message=SHUTDOWN), Cause.PREEMPTION),
    (Observation("Failed", None, pod_reason="NodeShutdown"), Cause.PREEMPTION),
    (Observation("Failed", None, pod_reason="Preempting"), Cause.PREEMPTION),
    (Observation("Failed", 1, pod_reason="Evicted", pod_message=PRESSURE), Cause.INFRASTRUCTURE),
    (Observation("Failed", 75, pod_reason="Evicted", pod_message=PRESSURE), Cause.INFRASTRUCTURE),
    (Observation("Failed", None, pod_reason="NodeLost"), Cause.INFRASTRUCTURE),
    (
        Observation("Failed", 1, pod_reason="EvictionByEvictionAPI", pod_message="Eviction API: evicting"),
        Cause.PREEMPTION,
    ),
    (Observation("Failed", 1, pod_reason="DeletionByTaintManager"), Cause.PREEMPTION),
    (Observation("Failed", 1, pod_reason="PreemptionByScheduler"), Cause.PREEMPTION),
    (Observation("Failed", None, pod_reason="OutOfnvidia.com/gpu"), Cause.INFRASTRUCTURE),
    (Observation("Failed", None, pod_reason="TopologyAffinityError"), Cause.INFRASTRUCTURE),
    (Observation("", None, pod_seen=True, pod_reason="ImagePullBackOff"), Cause.INFRASTRUCTURE),
    (Observation("Failed", 128, pod_reason="StartError"), Cause.INFRASTRUCTURE),
    (Observation("Failed", 128), Cause.USER_ERROR),
    (Observation("Failed", 1, pod_reason="NotErrImagePull"), Cause.USER_ERROR),
    (Observation("Failed", 137), Cause.INFRASTRUCTURE),
    (Observation("Failed", 137, pod_reason="OOMKilled"), Cause.OUT_OF_MEMORY),
    (Observation("Failed", 137, pod_message="main: OOMKilled (exit code 137)"), Cause.OUT_OF_MEMORY),
    (Observation("Error", None, pod_reason="OOMKilled"), Cause.OUT_OF_MEMORY),
    (Observation("Failed", 75, pod_message=DEADLINE), Cause.DEADLINE),
    (Observation("Failed", 143, pod_reason="DeadlineExceeded"), Cause.DEADLINE),
    (Observation("Failed", 64), Cause.INFRASTRUCTURE),
    (Observation("Error", 64, pod_message="init: Error (exit code 64): key does not exist"), Cause.INFRASTRUCTURE),
    (Observation("Failed", 141), Cause.INFRASTRUCTURE),
    (Observation("Failed", 76), Cause.INFRASTRUCTURE),
    (Observation("Failed", 69), Cause.INFRASTRUCTURE),
    (Observation("Error"), Cause.INFRASTRUCTURE),
    (Observation("Error", -1, pod_message=NEVER_STARTED), Cause.INFRASTRUCTURE),
    (Observation("Error", 1, pod_message="wait: Error (exit code 1)"), Cause.INFRASTRUCTURE),
    (Observation("Failed", 1), Cause.USER_ERROR),
    (Observation("Failed", 139), Cause.USER_ERROR),
    (Observation("", 2, pod_seen=True), Cause.USER_ERROR),
    (Observation("Failed", 0), Cause.UNKNOWN),
    (Observation("", 0, pod_seen=True), Cause.UNKNOWN),
    (Observation("Failed", -1), Cause.UNKNOWN),
    (Observation("", None, pod_seen=True), Cause.UNKNOWN),
    (Observation(), Cause.UNKNOWN),
]


@pytest.mark.parametrize(("seen", "cause"), TABLE)
def test_the_table_above_holds(seen, cause):
    assert classify(seen).cause is cause


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Observation("Failed", 1), "exited with 1"),
        (Observation("Failed", 137), "exit code 137"),
        (Observation("Failed", 75, pod_message=SHUTDOWN), SHUTDOWN),
        (Observation("Error", pod_message="wait: broken"), "wait: broken"),
        (Observation("Skipped"), "did not run"),
        (Observation(), "its pod is gone"),
        (Observation(pod_seen=True), "its pod says nothing"),
    ],
)
def test_the_evidence_names_what_decided(seen, words):
    assert words in classify(seen).evidence


def test_both_faces_of_a_deleted_pod_have_one_cause():
    """Argo's controller and the pod's deletion race: the same event shows in three ways."""
    faces = [
        Observation("Failed", 143),
        Observation("Failed", 75),
        Observation("Error", -1, pod_message="pod deleted"),
    ]
    assert {classify(face).cause for face in faces} == {Cause.PREEMPTION}
