"""Why did an attempt end? Retry budgets are kept by cause, so the answer must not be a guess.

The same event reaches us in several forms: deleting a pod shows as exit code
143, as 75, as a vanished pod, or as a status of Kubernetes, depending on who
looked first. The rules below are ordered from the most specific evidence to the
least; what none of them knows is `Cause.UNKNOWN`. Their source is Argo's
``inferFailedReason`` and what its nodes show after real drains, evictions,
OOM kills and deadlines.

What programs and registries write when they fail, and what it means.

The last resort before an exit code, which tells everything alike: a full GPU,
a broken GPU and a typing error all end a Python program with 1. The phrases
are those of PyTorch, CUDA, NCCL, the Linux kernel and containerd; one that
says nothing certain is not listed, and the exit code decides.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from tiphys.protocol.environment import EX_FENCED, EX_HANG, EX_TEMPFAIL, EX_UNAVAILABLE
from tiphys.records import Cause


class Phrase(NamedTuple):
    """``pattern`` in the words of a program is taken for ``cause``; ``meaning`` says so to a person."""

    rule: str
    cause: Cause
    pattern: re.Pattern[str]
    meaning: str


class Reading(NamedTuple):
    """The phrase that was found, and the words it was found in."""

    phrase: Phrase
    words: str


_GPU_FULL = r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|HIP out of memory"
_GPU_FULL_LIBRARIES = (
    r"CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor"
)
_HOST_FULL = (
    r"(?:\b|_Array)MemoryError\b|Cannot allocate memory|can't allocate memory: you tried to allocate"
    r"|std::bad_alloc|memory allocation of \d+ bytes failed"
)
_WORKER_KILLED = r"DataLoader worker \(pid.{0,200}is killed by signal: Killed"
_GPU_BROKEN = r"uncorrectable (?:NVLink|ECC) error|GPU has fallen off the bus|\bXid\b.{0,40}: \d+|NVRM: "
_NO_GPU = r"no CUDA-capable device is detected|CUDA driver initialization failed|system not yet initialized"
_NCCL = r"ncclSystemError|ncclRemoteError|ncclUnhandledCudaError"
_PEER_LOST = r"Connection closed by (?:remote )?peer|Connection reset by peer.*\[Gloo\]|\[Gloo\].*Connection"

PHRASES: Sequence[Phrase] = (
    Phrase("gpu-broken", Cause.INFRASTRUCTURE, re.compile(_GPU_BROKEN), "its GPU is broken"),
    Phrase("gpu-missing", Cause.INFRASTRUCTURE, re.compile(_NO_GPU), "its node has no working GPU"),
    Phrase(
        "gpu-out-of-memory",
        Cause.GPU_OUT_OF_MEMORY,
        re.compile(f"{_GPU_FULL}|{_GPU_FULL_LIBRARIES}"),
        "its GPU had no memory left",
    ),
    Phrase(
        "host-out-of-memory",
        Cause.OUT_OF_MEMORY,
        re.compile(f"{_HOST_FULL}|{_WORKER_KILLED}"),
        "its pod had no memory left",
    ),
    Phrase(
        "connection-lost",
        Cause.INFRASTRUCTURE,
        re.compile(f"{_NCCL}|{_PEER_LOST}"),
        "it lost the connection to its other ranks",
    ),
)
"""In order: a broken GPU also breaks connections, and only the first is the reason."""

_NO_SUCH_IMAGE = re.compile(
    r"not found|manifest unknown|NotFound|no match for platform|no matching manifest|unauthorized|Unauthorized"
    r"|authentication required|authorization failed|access denied|access to the resource is denied|403 Forbidden"
    r"|invalid reference format|InvalidImageName|couldn't parse image"
)
_FATAL = re.compile(r"^Fatal Python error: ([A-Z][A-Za-z -]+)", re.MULTILINE)
_SIGNALS = {
    "Illegal instruction": 132,
    "Aborted": 134,
    "Bus error": 135,
    "Floating point exception": 136,
    "Segmentation fault": 139,
}
"""As faulthandler names them (CPython, ``Modules/faulthandler.c``)."""
_LONGEST_WORDS = 300


def read(text: str) -> Reading | None:
    """What ``text`` says about an end; None if it says nothing that is known."""
    for phrase in PHRASES:
        if found := phrase.pattern.search(text):
            return Reading(phrase, line_around(text, found.start()))
    return None


def registry_refused(message: str) -> bool:
    """Whether a registry has answered that this pod gets no such image; False also if it did not answer."""
    return _NO_SUCH_IMAGE.search(message) is not None


def signal_told(text: str) -> int | None:
    """Exit code (128 and the number) of the signal that a Python program says it dies of; None if it says none."""
    found = _FATAL.search(text)
    return _SIGNALS.get(found[1].replace("-", " ")) if found else None


def line_around(text: str, position: int) -> str:
    """The line of ``text`` at ``position``, cut where it is very long."""
    first = text.rfind("\n", 0, position) + 1
    line = text[first:].partition("\n")[0].strip()
    return line if len(line) <= _LONGEST_WORDS else f"{line[: _LONGEST_WORDS - 1]}…"


_DID_NOT_RUN = ("Skipped", "Omitted")
_SIGTERM, _SIGKILL, _SIGALRM = 143, 137, 142
_ARGO_CODES = (64, 141)
"""argoexec's own exits: 64 when it could not load inputs or save outputs, 141 when its pipe broke."""

WORDS: Mapping[Cause, tuple[str, ...]] = {
    Cause.OUT_OF_MEMORY: ("OOMKilled",),
    Cause.DEADLINE: ("DeadlineExceeded", "longer than the specified deadline"),
    Cause.INFRASTRUCTURE: (
        *("Evicted", "evicted", "low on resource", "NodeLost", "UnexpectedAdmissionError", "NodeAffinity"),
        *("OutOfcpu", "OutOfmemory", "OutOfpods", "OutOfephemeral-storage", "OutOfnvidia.com/gpu"),
        "TopologyAffinityError",
    ),
    Cause.PREEMPTION: (
        *("node shutdown", "NodeShutdown", "Preempt", "preempt", "pod deleted", "Deleted"),
        *("EvictionByEvictionAPI", "DeletionByTaintManager"),
    ),
}
"""What a pod or node says that was ended by a cause; the first cause that is said decides.

A drain shows as ``EvictionByEvictionAPI``, a spot node's notice as a taint
(Kubernetes, ``PodConditionType`` DisruptionTarget).
"""

_NOT_PULLED = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
_NO_IMAGE = ("ErrImageNeverPull", "InvalidImageName")
_NOT_STARTED = (
    *("StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError", "CreateContainerConfigError"),
    *_NOT_PULLED,
)
"""Reasons of kubelet for a container that has never run: not the program's doing, which Argo's executor starts."""

_ALARM_DUMP = "(most recent call first)"
"""In what the hang watchdog leaves where a program is so stuck that only the kernel can end it."""


@dataclass(frozen=True)
class Observation:
    """What is known about the end of one attempt. Every field may be unknown."""

    status: str = ""
    """Argo's status of the run node: Succeeded, Failed, Error, Skipped or Omitted; empty if it never told."""
    exit_code: int | None = None
    """Of the main container; None or -1 when nobody saw it."""
    pod_seen: bool = False
    """Whether the pod of the attempt still existed when its end was judged."""
    pod_reason: str = ""
    """Kubernetes' word, such as ``OOMKilled``, ``Evicted`` or ``Deleted``."""
    pod_message: str = ""
    """The sentence beside it, or the message of the run node."""
    member: str = ""
    """Which of several pods it was that ended first, for a person; empty where there was one."""
    at: datetime | None = None
    """When that pod began to end."""
    node: str = ""
    """The node that it ran on."""
    told: str = ""
    """What the program left as its termination message, or the end of its log."""
    account: str = ""
    """The error that ended the program, as its session has recorded it."""
    stuck_seconds: float | None = None
    """How long the program had completed no step when its session ended it for that."""

    @property
    def known_exit_code(self) -> int | None:
        """What the program ended with. Argo tells each signal as SIGKILL; last words tell which it was."""
        if self.exit_code == _SIGKILL:
            return signal_told(self.told) or self.exit_code
        return None if self.exit_code == -1 else self.exit_code

    def says(self, words: tuple[str, ...]) -> str:
        """The first of ``words`` that reason or message hold; empty if none."""
        return next((word for word in words if word in self.pod_reason or word in self.pod_message), "")


class Verdict(NamedTuple):
    """``cause`` is None when the attempt did not fail. ``evidence`` says what it was judged by, for a person.

    ``rule`` names the rule that decided, and ``words`` are what it found.
    """

    cause: Cause | None
    evidence: str
    rule: str = ""
    words: str = ""


def classify(seen: Observation) -> Verdict:
    """Judge how an attempt ended; the first rule with evidence decides."""
    verdict = _judge(seen)
    if seen.member and verdict.cause is not None:
        return verdict._replace(evidence=f"{seen.member}: {verdict.evidence}")
    return verdict


def _judge(seen: Observation) -> Verdict:
    for rule in _RULES:
        if (verdict := rule(seen)) is not None:
            return verdict
    pod = "its pod says nothing" if seen.pod_seen else "its pod is gone"
    return Verdict(Cause.UNKNOWN, f"no exit code was seen and {pod}", "nothing-known")


def _not_failed(seen: Observation) -> Verdict | None:
    if seen.status == "Succeeded":
        return Verdict(None, "the program succeeded")
    if seen.status in _DID_NOT_RUN:
        return Verdict(None, f"the program did not run ({seen.status})")
    return None


def _by_pod(seen: Observation) -> Verdict | None:
    told = seen.pod_message or seen.pod_reason
    if words := seen.says(WORDS[Cause.OUT_OF_MEMORY]):
        killed = "the kernel killed it for using more memory than its limit (OOMKilled)"
        return Verdict(Cause.OUT_OF_MEMORY, killed, "pod-out-of-memory", words)
    if seen.says(WORDS[Cause.DEADLINE]):
        return Verdict(Cause.DEADLINE, f"it ran longer than its deadline ({told})", "pod-deadline", told)
    if seen.says(WORDS[Cause.INFRASTRUCTURE]):
        return Verdict(Cause.INFRASTRUCTURE, f"the node gave it up ({told})", "pod-given-up", told)
    if seen.says(WORDS[Cause.PREEMPTION]):
        return Verdict(Cause.PREEMPTION, f"its pod was taken away ({told})", "pod-taken-away", told)
    return None


def _by_start(seen: Observation) -> Verdict | None:
    """A container that has never run."""
    reason, why = seen.pod_reason, f": {seen.pod_message}" if seen.pod_message else ""
    if reason in _NO_IMAGE or (reason in _NOT_PULLED and registry_refused(seen.pod_message)):
        refused = f"there is no such image, or this pod may not pull it ({reason}{why}); correct its name or its access"
        return Verdict(Cause.IMAGE, refused, "image-refused", seen.pod_message or reason)
    if reason in _NOT_STARTED:
        rule = "image-not-pulled" if reason in _NOT_PULLED else "not-started"
        never = f"its program was never started ({reason}{why})"
        return Verdict(Cause.INFRASTRUCTURE, never, rule, seen.pod_message or reason)
    return None


def _by_account(seen: Observation) -> Verdict | None:
    """What the program says of itself, unless it ended as Tiphys told it to."""
    if seen.known_exit_code in (0, EX_TEMPFAIL, EX_UNAVAILABLE, EX_FENCED):
        return None
    if seen.stuck_seconds is not None:
        return Verdict(Cause.HANG, seen.account, "no-step", f"no step in {seen.stuck_seconds:.0f} s")
    # A log holds much that was no reason; it is asked where the program gives none, and was not told to end.
    reading = None if seen.known_exit_code == _SIGTERM else read(seen.account or seen.told)
    if reading is not None:
        phrase, words = reading
        return Verdict(phrase.cause, f"{phrase.meaning} ({words})", phrase.rule, words)
    stuck = seen.known_exit_code in (_SIGALRM, _SIGKILL) and _ALARM_DUMP in seen.told
    if stuck or (seen.known_exit_code == EX_HANG and seen.account == ""):
        return Verdict(Cause.HANG, "it completed no step for too long, and was ended for that", "no-step", seen.told)
    return None


def _by_exit_code(seen: Observation) -> Verdict | None:
    code = seen.known_exit_code
    if code is None or code == 0:
        return None
    if code in EXIT_CODES:
        cause, meaning = EXIT_CODES[code]
        return Verdict(cause, f"exit code {code}: {meaning}", f"exit-code-{code}")
    if seen.status == "Error":
        return None
    return Verdict(Cause.USER_ERROR, f"the program exited with {code}", "program-failed")


def _by_status(seen: Observation) -> Verdict | None:
    if seen.status == "Error":
        told = seen.pod_message or seen.pod_reason
        why = f" ({told})" if told else ""
        return Verdict(Cause.INFRASTRUCTURE, f"Argo could not run it to its end{why}", "argo-error", told)
    if seen.known_exit_code == 0:
        return Verdict(Cause.UNKNOWN, "the program exited with 0, yet the step did not succeed", "exit-code-0")
    return None


EXIT_CODES: Mapping[int, tuple[Cause, str]] = {
    EX_TEMPFAIL: (Cause.PREEMPTION, "it was told to stop, and asks to be tried again"),
    EX_UNAVAILABLE: (Cause.STORAGE, "storage was out of reach when it wanted to restore"),
    EX_FENCED: (Cause.INFRASTRUCTURE, "it stopped because another attempt had taken its place"),
    _SIGTERM: (Cause.PREEMPTION, "it was told to stop (SIGTERM)"),
    _SIGKILL: (Cause.INFRASTRUCTURE, "it was killed (SIGKILL), and not for its memory"),
    **dict.fromkeys(_ARGO_CODES, (Cause.INFRASTRUCTURE, "the container's executor failed, not the program")),
}
"""Exit codes that mean the same in every program. Any other but 0 is the program's own."""

_RULES: tuple[Callable[[Observation], Verdict | None], ...] = (
    *(_not_failed, _by_pod, _by_start, _by_account, _by_exit_code, _by_status),
)
