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
| a rank crashes, the others lose it | Failed | 1 | faulthandler's words beside that error | user error |
| a signal, which Argo tells as SIGKILL | Failed | 137, and faulthandler's last words | | user error |
| an output that storage cannot keep | Error | 64 | wait: Object name …, is not UTF-8 text | user error |
| program failed | Failed | any other | | user error |
| nothing is known | | | | unknown |
"""

import pytest

from tiphys.failures.classify import AttemptObservation, classify_failure
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
LOST_PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4"
STUCK = "no step in 900 s, 10 times as long as the longest of the last 100 steps"
STACKS = 'Thread 0x00007f1c (most recent call first):\n  File "train.py", line 7 in all_reduce'
NEVER_STARTED = "Pod failed before main container starts due to UnexpectedAdmissionError"
UNSTORABLE = (
    "failed to put directory: Object name with non UTF-8 strings are not supported",
    "failed to put directory: Object name cannot be longer than 1024 characters",
    "failed to put directory: Your key is too long",
    "illegal symlink target: model/latest -> /etc",
    "output parameter loss is not UTF-8 text; declare it as an artifact",
)
REFUSED = "done\ntiphys: output /out: 'a' is a link, which no store can keep; let the program write a copy\n"
UNREACHABLE = "step 3\ntiphys: s3://b/p: cannot read x: http://minio did not answer; try again\nbye"
NO_CREDENTIALS = "tiphys: s3://b/p: cannot read x: Unable to locate credentials; check the credentials of AWS"

TABLE = [
    (AttemptObservation("Succeeded", 0), None),
    (AttemptObservation("Succeeded"), None),
    (AttemptObservation("Skipped"), None),
    (AttemptObservation("Omitted"), None),
    (AttemptObservation("Failed", 75), Cause.PREEMPTION),
    (AttemptObservation("", 75, pod_seen=True), Cause.PREEMPTION),
    (AttemptObservation("Error", 75), Cause.PREEMPTION),
    (AttemptObservation("Failed", 143), Cause.PREEMPTION),
    (AttemptObservation("Error", -1, pod_message="pod deleted"), Cause.PREEMPTION),
    (AttemptObservation("", None, pod_reason="Deleted"), Cause.PREEMPTION),
    (AttemptObservation("Failed", 1, pod_message=SHUTDOWN), Cause.PREEMPTION),
    (AttemptObservation("Failed", None, pod_reason="NodeShutdown"), Cause.PREEMPTION),
    (AttemptObservation("Failed", None, pod_reason="Preempting"), Cause.PREEMPTION),
    (AttemptObservation("Failed", 1, pod_reason="Evicted", pod_message=PRESSURE), Cause.INFRASTRUCTURE),
    (AttemptObservation("Failed", 75, pod_reason="Evicted", pod_message=PRESSURE), Cause.INFRASTRUCTURE),
    (AttemptObservation("Failed", None, pod_reason="NodeLost"), Cause.INFRASTRUCTURE),
    (
        AttemptObservation("Failed", 1, pod_reason="EvictionByEvictionAPI", pod_message="Eviction API: evicting"),
        Cause.PREEMPTION,
    ),
    (AttemptObservation("Failed", 1, pod_reason="DeletionByTaintManager"), Cause.PREEMPTION),
    (AttemptObservation("Failed", 1, pod_reason="PreemptionByScheduler"), Cause.PREEMPTION),
    *(
        (
            AttemptObservation(
                "Failed",
                None,
                pod_reason=f"OutOf{name}",
                pod_message=f"Node didn't have enough resource: {name}, requested: 1, used: 0, capacity: 0",
            ),
            Cause.INFRASTRUCTURE,
        )
        for name in ("nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.10gb")
    ),
    (AttemptObservation("Failed", None, pod_reason="TopologyAffinityError"), Cause.INFRASTRUCTURE),
    (AttemptObservation("", None, pod_seen=True, pod_reason="ImagePullBackOff"), Cause.INFRASTRUCTURE),
    (AttemptObservation("Failed", 128, pod_reason="StartError"), Cause.INFRASTRUCTURE),
    (AttemptObservation("Failed", 128), Cause.USER_ERROR),
    (AttemptObservation("Failed", 1, pod_reason="NotErrImagePull"), Cause.USER_ERROR),
    (AttemptObservation("Failed", 137), Cause.INFRASTRUCTURE),
    (AttemptObservation("Failed", 137, pod_reason="OOMKilled"), Cause.OUT_OF_MEMORY),
    (AttemptObservation("Failed", 137, pod_message="main: OOMKilled (exit code 137)"), Cause.OUT_OF_MEMORY),
    (AttemptObservation("Error", None, pod_reason="OOMKilled"), Cause.OUT_OF_MEMORY),
    (AttemptObservation("Failed", 75, pod_message=DEADLINE), Cause.DEADLINE),
    (AttemptObservation("Failed", 143, pod_reason="DeadlineExceeded"), Cause.DEADLINE),
    (AttemptObservation("Failed", 64), Cause.INFRASTRUCTURE),
    (
        AttemptObservation("Error", 64, pod_message="init: Error (exit code 64): key does not exist"),
        Cause.INFRASTRUCTURE,
    ),
    (AttemptObservation("Failed", 141), Cause.INFRASTRUCTURE),
    (AttemptObservation("Failed", 76), Cause.INFRASTRUCTURE),
    (AttemptObservation("Failed", 69), Cause.STORAGE),
    (AttemptObservation("Failed", 69, crash_error=CUDA), Cause.STORAGE),
    (AttemptObservation("", None, pod_seen=True, pod_reason="ImagePullBackOff", pod_message=NOT_FOUND), Cause.IMAGE),
    (AttemptObservation("", None, pod_seen=True, pod_reason="ErrImagePull", pod_message=DENIED), Cause.IMAGE),
    (AttemptObservation("", None, pod_seen=True, pod_reason="ErrImagePull", pod_message=TIMEOUT), Cause.INFRASTRUCTURE),
    (AttemptObservation("", None, pod_seen=True, pod_reason="InvalidImageName"), Cause.IMAGE),
    (AttemptObservation("Failed", 1, crash_error=CUDA), Cause.GPU_OUT_OF_MEMORY),
    (
        AttemptObservation("Failed", 1, termination_message=f"Traceback (most recent call last):\n{CUDA}\n"),
        Cause.GPU_OUT_OF_MEMORY,
    ),
    (AttemptObservation("Failed", 137, pod_reason="OOMKilled", crash_error=CUDA), Cause.OUT_OF_MEMORY),
    (AttemptObservation("Failed", 1, crash_error="MemoryError: Unable to allocate 8.00 GiB"), Cause.OUT_OF_MEMORY),
    (
        AttemptObservation("Failed", 1, crash_error="numpy._core._exceptions._ArrayMemoryError: Unable"),
        Cause.OUT_OF_MEMORY,
    ),
    (AttemptObservation("Failed", 1, crash_error="MyMemoryErrorHandler: no"), Cause.USER_ERROR),
    (AttemptObservation("Failed", 1, crash_error="HostMemoryError: no"), Cause.USER_ERROR),
    (AttemptObservation("Failed", 1, crash_error=WORKER), Cause.OUT_OF_MEMORY),
    (
        AttemptObservation("Failed", 134, termination_message="memory allocation of 4096 bytes failed"),
        Cause.OUT_OF_MEMORY,
    ),
    (
        AttemptObservation("Failed", 134, termination_message="terminate called after throwing ... 'std::bad_alloc'"),
        Cause.OUT_OF_MEMORY,
    ),
    (AttemptObservation("Failed", 1, crash_error=ECC), Cause.INFRASTRUCTURE),
    (AttemptObservation("Failed", 1, termination_message=f"{ECC}\n{CUDA}"), Cause.INFRASTRUCTURE),
    (AttemptObservation("Failed", 1, crash_error="ValueError: loss is NaN"), Cause.USER_ERROR),
    (AttemptObservation("Failed", 75, crash_error=CUDA), Cause.PREEMPTION),
    (AttemptObservation("Failed", 143, termination_message=CUDA), Cause.PREEMPTION),
    (
        AttemptObservation("Failed", 1, crash_error="ValueError: loss is NaN", termination_message=CUDA),
        Cause.USER_ERROR,
    ),
    (AttemptObservation("Failed", 1, pod_message=SHUTDOWN, crash_error=CUDA), Cause.PREEMPTION),
    (AttemptObservation("Failed", 79, crash_error=STUCK, stuck_seconds=900.0), Cause.HANG),
    (AttemptObservation("Failed", 1, crash_error=STUCK, stuck_seconds=900.0), Cause.HANG),
    (AttemptObservation("", None, pod_reason="Deleted", crash_error=STUCK, stuck_seconds=900.0), Cause.PREEMPTION),
    (AttemptObservation("Failed", 79), Cause.HANG),
    (AttemptObservation("Failed", 137, termination_message=STACKS), Cause.HANG),
    (AttemptObservation("Failed", 142, termination_message=STACKS), Cause.HANG),
    (
        AttemptObservation("Failed", 137, termination_message=f"Fatal Python error: Segmentation fault\n\n{STACKS}"),
        Cause.USER_ERROR,
    ),
    (AttemptObservation("Failed", 1, termination_message=STACKS), Cause.USER_ERROR),
    (AttemptObservation("Failed", 1, crash_error=LOST_PEER), Cause.INFRASTRUCTURE),
    (
        AttemptObservation(
            "Failed", 1, crash_error=LOST_PEER, termination_message=f"Fatal Python error: Aborted\n{STACKS}"
        ),
        Cause.USER_ERROR,
    ),
    (AttemptObservation("Error"), Cause.INFRASTRUCTURE),
    (AttemptObservation("Error", -1, pod_message=NEVER_STARTED), Cause.INFRASTRUCTURE),
    (AttemptObservation("Error", 1, pod_message="wait: Error (exit code 1)"), Cause.INFRASTRUCTURE),
    *(
        (AttemptObservation("Error", 64, pod_message=f"wait: Error (exit code 64): {said}"), Cause.USER_ERROR)
        for said in UNSTORABLE
    ),
    (AttemptObservation("Failed", 137, pod_reason="OOMKilled", pod_message=UNSTORABLE[0]), Cause.OUT_OF_MEMORY),
    (AttemptObservation("Failed", 1), Cause.USER_ERROR),
    (AttemptObservation("Failed", 139), Cause.USER_ERROR),
    (AttemptObservation("", 2, pod_seen=True), Cause.USER_ERROR),
    (AttemptObservation("Failed", 0), Cause.UNKNOWN),
    (AttemptObservation("", 0, pod_seen=True), Cause.UNKNOWN),
    (AttemptObservation("Failed", -1), Cause.UNKNOWN),
    (AttemptObservation("", None, pod_seen=True), Cause.UNKNOWN),
    (AttemptObservation(), Cause.UNKNOWN),
]


@pytest.mark.parametrize(("seen", "cause"), TABLE)
def test_the_table_above_holds(seen, cause):
    assert classify_failure(seen).cause is cause


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (AttemptObservation("Failed", 1), "exited with 1"),
        (AttemptObservation("Failed", 137), "exit code 137"),
        (AttemptObservation("Failed", 75, pod_message=SHUTDOWN), SHUTDOWN),
        (AttemptObservation("Error", pod_message="wait: broken"), "wait: broken"),
        (
            AttemptObservation("Failed", 2, termination_message=REFUSED),
            "an output cannot be stored: output /out: 'a' is a",
        ),
        (AttemptObservation("Error", 64, pod_message=f"wait: {UNSTORABLE[0]}"), "short names of UTF-8, and no links"),
        (AttemptObservation("Failed", 69), "exit code 69: storage was unavailable during the restore"),
        (
            AttemptObservation("Failed", 69, termination_message=UNREACHABLE),
            "the restore (s3://b/p: cannot read",
        ),
        (AttemptObservation("Failed", 69, termination_message=UNREACHABLE), "did not answer; try again)"),
        (
            AttemptObservation("Failed", 69, termination_message=NO_CREDENTIALS),
            "tiphys-store gives its pod (s3:",
        ),
        (AttemptObservation("Failed", 69, termination_message=NO_CREDENTIALS), "no outage: it lacks credentials"),
        (AttemptObservation("Skipped"), "did not run"),
        (AttemptObservation(), "its pod is gone"),
        (AttemptObservation(pod_seen=True), "its pod says nothing"),
    ],
)
def test_the_evidence_names_what_decided(seen, words):
    assert words in classify_failure(seen).evidence


@pytest.mark.parametrize(
    ("seen", "rule", "words"),
    [
        (AttemptObservation("Failed", 1, termination_message=f"step 7\n{CUDA}\nbye"), "gpu-out-of-memory", CUDA),
        (AttemptObservation("Failed", 1, pod_reason="Evicted", pod_message=PRESSURE), "pod-given-up", PRESSURE),
        (AttemptObservation("Failed", 137, pod_reason="OOMKilled"), "pod-out-of-memory", "OOMKilled"),
        (AttemptObservation("Failed", 75), "exit-code-75", ""),
        (AttemptObservation("Failed", 3), "program-failed", ""),
        (AttemptObservation(), "nothing-known", ""),
    ],
)
def test_the_deciding_rule_and_its_text_are_kept(seen, rule, words):
    assert classify_failure(seen)[2:] == (rule, words)


@pytest.mark.parametrize(
    ("observation", "evidence"),
    [
        (AttemptObservation("Failed", 1), "the program exited with 1"),
        (
            AttemptObservation("Failed", 1, termination_message="epoch 3\ndiverged\n\ntiphys: step 3 is saved\n"),
            "the program exited with 1 (diverged)",
        ),
        (
            AttemptObservation("Failed", 1, crash_error="SystemExit: diverged", termination_message="epoch 3"),
            "the program exited with 1 (SystemExit: diverged)",
        ),
        (
            AttemptObservation("Failed", 75, termination_message="x"),
            "exit code 75: it was asked to stop, and requests another attempt",
        ),
    ],
)
def test_the_last_words_of_a_program_are_part_of_the_evidence(observation, evidence):
    verdict = classify_failure(observation)
    assert (verdict.evidence, verdict.matched_text) == (evidence, "")


def test_every_failure_names_its_rule():
    assert all(classify_failure(seen).rule for seen, cause in TABLE if cause is not None)


def test_a_line_that_is_kept_is_not_endless():
    assert (
        len(classify_failure(AttemptObservation("Failed", 1, termination_message=f"{CUDA}{'x' * 9999}")).matched_text)
        == 300
    )


def test_a_deleted_pod_has_one_cause_however_it_shows():
    """Argo's controller and the pod's deletion race: the same event shows in three ways."""
    faces = [
        AttemptObservation("Failed", 143),
        AttemptObservation("Failed", 75),
        AttemptObservation("Error", -1, pod_message="pod deleted"),
    ]
    assert {classify_failure(face).cause for face in faces} == {Cause.PREEMPTION}


@pytest.mark.parametrize(
    ("words", "code"),
    [("Segmentation fault", 139), ("Aborted", 134), ("Floating-point exception", 136), ("Cannot recover", 137)],
)
def test_the_signal_is_read_from_the_termination_message(words, code):
    assert (
        AttemptObservation(
            "Failed", 137, termination_message=f"Fatal Python error: {words}\n\n{STACKS}"
        ).effective_exit_code
        == code
    )
