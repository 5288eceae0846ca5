"""Why did an attempt end? Retry budgets are kept by cause, so the answer must not be a guess.

The same event reaches us in several forms: deleting a pod shows as exit code
143, as 75, as a vanished pod, or as a status of Kubernetes, depending on who
looked first. The rules below are ordered from the most specific evidence to the
least; what none of them knows is `Cause.UNKNOWN`. Their source is Argo's
``inferFailedReason`` and what its nodes show after real drains, evictions,
OOM kills and deadlines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL, EX_UNAVAILABLE
from tiphys.records import Cause

_DID_NOT_RUN = ("Skipped", "Omitted")
_SIGTERM, _SIGKILL = 143, 137
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

_NOT_STARTED = (
    *("StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError", "CreateContainerConfigError"),
    *("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"),
)
"""Reasons of kubelet for a container that has never run: not the program's doing, which Argo's executor starts."""


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

    @property
    def known_exit_code(self) -> int | None:
        return None if self.exit_code == -1 else self.exit_code

    def says(self, words: tuple[str, ...]) -> bool:
        """Whether reason or message hold one of ``words``."""
        return any(word in self.pod_reason or word in self.pod_message for word in words)


class Verdict(NamedTuple):
    """``cause`` is None when the attempt did not fail. ``evidence`` says what it was judged by, for a person."""

    cause: Cause | None
    evidence: str


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
    return Verdict(Cause.UNKNOWN, f"no exit code was seen and {pod}")


def _not_failed(seen: Observation) -> Verdict | None:
    if seen.status == "Succeeded":
        return Verdict(None, "the program succeeded")
    if seen.status in _DID_NOT_RUN:
        return Verdict(None, f"the program did not run ({seen.status})")
    return None


def _by_pod(seen: Observation) -> Verdict | None:
    told = seen.pod_message or seen.pod_reason
    if seen.says(WORDS[Cause.OUT_OF_MEMORY]):
        return Verdict(Cause.OUT_OF_MEMORY, "the kernel killed it for using more memory than its limit (OOMKilled)")
    if seen.says(WORDS[Cause.DEADLINE]):
        return Verdict(Cause.DEADLINE, f"it ran longer than its deadline ({told})")
    if seen.says(WORDS[Cause.INFRASTRUCTURE]):
        return Verdict(Cause.INFRASTRUCTURE, f"the node gave it up ({told})")
    if seen.says(WORDS[Cause.PREEMPTION]):
        return Verdict(Cause.PREEMPTION, f"its pod was taken away ({told})")
    if seen.pod_reason in _NOT_STARTED:
        why = f": {seen.pod_message}" if seen.pod_message else ""
        return Verdict(Cause.INFRASTRUCTURE, f"its program was never started ({seen.pod_reason}{why})")
    return None


def _by_exit_code(seen: Observation) -> Verdict | None:
    code = seen.known_exit_code
    if code is None or code == 0:
        return None
    if code in EXIT_CODES:
        cause, meaning = EXIT_CODES[code]
        return Verdict(cause, f"exit code {code}: {meaning}")
    if seen.status == "Error":
        return None
    return Verdict(Cause.USER_ERROR, f"the program exited with {code}")


def _by_status(seen: Observation) -> Verdict | None:
    if seen.status == "Error":
        told = f" ({seen.pod_message or seen.pod_reason})" if seen.pod_message or seen.pod_reason else ""
        return Verdict(Cause.INFRASTRUCTURE, f"Argo could not run it to its end{told}")
    if seen.known_exit_code == 0:
        return Verdict(Cause.UNKNOWN, "the program exited with 0, yet the step did not succeed")
    return None


EXIT_CODES: Mapping[int, tuple[Cause, str]] = {
    EX_TEMPFAIL: (Cause.PREEMPTION, "it was told to stop, and asks to be tried again"),
    EX_UNAVAILABLE: (Cause.INFRASTRUCTURE, "storage was out of reach when it wanted to restore"),
    EX_FENCED: (Cause.INFRASTRUCTURE, "it stopped because another attempt had taken its place"),
    _SIGTERM: (Cause.PREEMPTION, "it was told to stop (SIGTERM)"),
    _SIGKILL: (Cause.INFRASTRUCTURE, "it was killed (SIGKILL), and not for its memory"),
    **dict.fromkeys(_ARGO_CODES, (Cause.INFRASTRUCTURE, "the container's executor failed, not the program")),
}
"""Exit codes that mean the same in every program. Any other but 0 is the program's own."""

_RULES: tuple[Callable[[Observation], Verdict | None], ...] = (_not_failed, _by_pod, _by_exit_code, _by_status)
