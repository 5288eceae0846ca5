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
| storage out of reach at the start | Failed | 69 | | storage |
| the registry has no such image | any | | ErrImagePull: not found | image |
| PyTorch says that the GPU is full | Failed | 1 | | GPU out of memory |
| Python says that memory is full | Failed | 1 | | out of memory |
| the driver says that a GPU is broken | Failed | 1 | | infrastructure |
| its session says that no step was completed | Failed | any | | hang |
| the kernel's alarm left its stacks | Failed | 137, 142 | | hang |
| a signal, which Argo tells as SIGKILL | Failed | 137, and faulthandler's last words | | user error |
| program failed | Failed | any other | | user error |
| nothing is known | | | | unknown |
"""

import pytest

from tiphys.failures.classify import Observation, classify
from tiphys.records import Cause

SHUTDOWN = "Pod was terminated in response to imminent node shutdown."
PRESSURE = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi."
DEADLINE = "Pod was active on the node longer than the specified deadline"
NOT_FOUND = (
    'Back-off pulling image "a/b:1": ErrImagePull: rpc error: code = NotFound desc = failed to pull and unpack image '
    '"docker.io/a/b:1": failed to resolve reference "docker.io/a/b:1": docker.io/a/b:1: not found'
)
DENIED = "failed to authorize: pull access denied, repository does not exist or may require authorization"
TIMEOUT = 'failed to do request: Head "https://registry.example/v2/b/manifests/1": dial tcp 10.0.0.1:443: i/o timeout'
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.1 GiB in total"
WORKER = "RuntimeError: DataLoader worker (pid(s) 71) is killed by signal: Killed. "
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
STUCK = "no step in 900 s, 10 times as long as the longest of the last 100 steps"
STACKS = 'Thread 0x00007f1c (most recent call first):\n  File "train.py", line 7 in all_reduce'
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
    (Observation("Failed", 69), Cause.STORAGE),
    (Observation("Failed", 69, account=CUDA), Cause.STORAGE),
    (Observation("", None, pod_seen=True, pod_reason="ImagePullBackOff", pod_message=NOT_FOUND), Cause.IMAGE),
    (Observation("", None, pod_seen=True, pod_reason="ErrImagePull", pod_message=DENIED), Cause.IMAGE),
    (Observation("", None, pod_seen=True, pod_reason="ErrImagePull", pod_message=TIMEOUT), Cause.INFRASTRUCTURE),
    (Observation("", None, pod_seen=True, pod_reason="InvalidImageName"), Cause.IMAGE),
    (Observation("Failed", 1, account=CUDA), Cause.GPU_OUT_OF_MEMORY),
    (Observation("Failed", 1, told=f"Traceback (most recent call last):\n{CUDA}\n"), Cause.GPU_OUT_OF_MEMORY),
    (Observation("Failed", 137, pod_reason="OOMKilled", account=CUDA), Cause.OUT_OF_MEMORY),
    (Observation("Failed", 1, account="MemoryError: Unable to allocate 8.00 GiB"), Cause.OUT_OF_MEMORY),
    (Observation("Failed", 1, account="numpy._core._exceptions._ArrayMemoryError: Unable"), Cause.OUT_OF_MEMORY),
    (Observation("Failed", 1, account="MyMemoryErrorHandler: no"), Cause.USER_ERROR),
    (Observation("Failed", 1, account="HostMemoryError: no"), Cause.USER_ERROR),
    (Observation("Failed", 1, account=WORKER), Cause.OUT_OF_MEMORY),
    (Observation("Failed", 134, told="memory allocation of 4096 bytes failed"), Cause.OUT_OF_MEMORY),
    (Observation("Failed", 134, told="terminate called after throwing ... 'std::bad_alloc'"), Cause.OUT_OF_MEMORY),
    (Observation("Failed", 1, account=ECC), Cause.INFRASTRUCTURE),
    (Observation("Failed", 1, told=f"{ECC}\n{CUDA}"), Cause.INFRASTRUCTURE),
    (Observation("Failed", 1, account="ValueError: loss is NaN"), Cause.USER_ERROR),
    (Observation("Failed", 75, account=CUDA), Cause.PREEMPTION),
    (Observation("Failed", 143, told=CUDA), Cause.PREEMPTION),
    (Observation("Failed", 1, account="ValueError: loss is NaN", told=CUDA), Cause.USER_ERROR),
    (Observation("Failed", 1, pod_message=SHUTDOWN, account=CUDA), Cause.PREEMPTION),
    (Observation("Failed", 79, account=STUCK, stuck_seconds=900.0), Cause.HANG),
    (Observation("Failed", 1, account=STUCK, stuck_seconds=900.0), Cause.HANG),
    (Observation("", None, pod_reason="Deleted", account=STUCK, stuck_seconds=900.0), Cause.PREEMPTION),
    (Observation("Failed", 79), Cause.HANG),
    (Observation("Failed", 137, told=STACKS), Cause.HANG),
    (Observation("Failed", 142, told=STACKS), Cause.HANG),
    (Observation("Failed", 137, told=f"Fatal Python error: Segmentation fault\n\n{STACKS}"), Cause.USER_ERROR),
    (Observation("Failed", 1, told=STACKS), Cause.USER_ERROR),
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


@pytest.mark.parametrize(
    ("seen", "rule", "words"),
    [
        (Observation("Failed", 1, told=f"step 7\n{CUDA}\nbye"), "gpu-out-of-memory", CUDA),
        (Observation("Failed", 1, pod_reason="Evicted", pod_message=PRESSURE), "pod-given-up", PRESSURE),
        (Observation("Failed", 137, pod_reason="OOMKilled"), "pod-out-of-memory", "OOMKilled"),
        (Observation("Failed", 75), "exit-code-75", ""),
        (Observation("Failed", 3), "program-failed", ""),
        (Observation(), "nothing-known", ""),
    ],
)
def test_what_decided_is_kept_as_it_was_found(seen, rule, words):
    assert classify(seen)[2:] == (rule, words)


def test_every_failure_names_its_rule():
    assert all(classify(seen).rule for seen, cause in TABLE if cause is not None)


def test_a_line_that_is_kept_is_not_endless():
    assert len(classify(Observation("Failed", 1, told=f"{CUDA}{'x' * 9999}")).words) == 300


def test_both_faces_of_a_deleted_pod_have_one_cause():
    """Argo's controller and the pod's deletion race: the same event shows in three ways."""
    faces = [
        Observation("Failed", 143),
        Observation("Failed", 75),
        Observation("Error", -1, pod_message="pod deleted"),
    ]
    assert {classify(face).cause for face in faces} == {Cause.PREEMPTION}


@pytest.mark.parametrize(
    ("words", "code"),
    [("Segmentation fault", 139), ("Aborted", 134), ("Floating-point exception", 136), ("Cannot recover", 137)],
)
def test_which_signal_it_was_is_told_by_the_last_words(words, code):
    assert Observation("Failed", 137, told=f"Fatal Python error: {words}\n\n{STACKS}").known_exit_code == code
