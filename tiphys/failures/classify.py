"""Classification of failed attempts. Each cause has its own retry budget, so a cause must not be a guess.

One event appears in several forms: a deleted pod shows as exit code 143, as 75,
as a missing pod, or as a status of Kubernetes, depending on which component
observed it first. The rules run from the most specific evidence to the least;
without a match the cause is `Cause.UNKNOWN`. Their sources are Argo's
``inferFailedReason`` and the nodes of real workflows after drains, evictions,
OOM kills and deadlines.

`ERROR_SIGNATURES` match messages of PyTorch, CUDA, NCCL, the Linux kernel and
containerd. They come before the exit code, which is 1 for a full GPU, a broken
GPU and a TypeError alike. A message with an uncertain meaning is not listed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from tiphys.errors import UNKEPT_OUTPUT
from tiphys.protocol.environment import (
    EX_FENCED,
    EX_HANG,
    EX_NEW_POD,
    EX_TEMPFAIL,
    EX_UNAVAILABLE,
    LOG_PREFIX,
    RESTARTED,
)
from tiphys.records import Cause


class ErrorSignature(NamedTuple):
    """A pattern in the output of a program, the cause it proves, and its meaning as a sentence."""

    rule: str
    cause: Cause
    pattern: re.Pattern[str]
    meaning: str
    blames_node: bool = False
    """Whether every process of the pod would fail, so that the program needs another node."""


class SignatureMatch(NamedTuple):
    """The signature that matched, and the line of text that it matched."""

    signature: ErrorSignature
    line: str


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
_GPU_FAILED = (
    r"CUDA error: (?:an illegal memory access|unspecified launch failure|misaligned address|an illegal instruction"
    r"|the launch timed out)|CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)"
    r"|CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)"
)
"""Errors of CUDA, cuBLAS and cuDNN that end the context of a process, so that a new process is needed and may do. Not
``device-side assert``, which is an index that the program gets wrong each time."""
_NCCL = r"ncclSystemError|ncclRemoteError|ncclUnhandledCudaError"
BETWEEN_RANKS = "(between ranks)"
"""Ends the error of a rank to which a connection broke: that is the loss of another one."""
_PEER_LOST = (
    r"Connection closed by (?:remote )?peer|Connection reset by peer.{0,300}\[Gloo\]|\[Gloo\].{0,300}Connection"
    r"|gloo/transport/\S{1,50} (?:Read error|writev|Socket closed)|\(between ranks\)$"
)

_CONNECTION_LOST = "connection-lost"

ERROR_SIGNATURES: Sequence[ErrorSignature] = (
    ErrorSignature("gpu-broken", Cause.INFRASTRUCTURE, re.compile(_GPU_BROKEN), "its GPU is broken", blames_node=True),
    ErrorSignature(
        "gpu-missing", Cause.INFRASTRUCTURE, re.compile(_NO_GPU), "its node has no working GPU", blames_node=True
    ),
    ErrorSignature(
        "gpu-out-of-memory",
        Cause.GPU_OUT_OF_MEMORY,
        re.compile(f"{_GPU_FULL}|{_GPU_FULL_LIBRARIES}"),
        "its GPU had no memory left",
    ),
    ErrorSignature(
        "host-out-of-memory",
        Cause.OUT_OF_MEMORY,
        re.compile(f"{_HOST_FULL}|{_WORKER_KILLED}"),
        "its pod had no memory left",
    ),
    ErrorSignature(
        _CONNECTION_LOST,
        Cause.INFRASTRUCTURE,
        re.compile(f"{_NCCL}|{_PEER_LOST}"),
        "it lost the connection to its other ranks",
    ),
    ErrorSignature(
        "gpu-failed",
        Cause.UNKNOWN,
        re.compile(_GPU_FAILED),
        "a computation on its GPU failed, maybe once only",
    ),
)
"""The first match decides: a broken GPU also breaks connections, and the GPU is the reason."""

_IMAGE_REFUSED = re.compile(
    r"not found|manifest unknown|NotFound|no match for platform|no matching manifest|unauthorized|Unauthorized"
    r"|authentication required|authorization failed|access denied|access to the resource is denied|403 Forbidden"
    r"|invalid reference format|InvalidImageName|couldn't parse image"
)
_RESTARTED = re.compile(RESTARTED.format(r"(\d{1,9})"))
_NEEDS_NEW_POD = (
    "started again in its pod it failed before it had saved anything, maybe because of files that it found there; "
    "a new pod has none"
)
_FATAL_ERROR = re.compile(r"^Fatal Python error: ([A-Z][A-Za-z -]+)", re.MULTILINE)
_SIGNAL_EXIT_CODES = {
    "Illegal instruction": 132,
    "Aborted": 134,
    "Bus error": 135,
    "Floating point exception": 136,
    "Segmentation fault": 139,
}
"""By the names that faulthandler prints (CPython, ``Modules/faulthandler.c``)."""
_MAX_LINE_CHARACTERS = 300


def match_error_signature(text: str) -> SignatureMatch | None:
    """The first of `ERROR_SIGNATURES` that matches ``text``; None without a match."""
    for signature in ERROR_SIGNATURES:
        if match := signature.pattern.search(text):
            return SignatureMatch(signature, line_at(text, match.start()))
    return None


def is_image_refused(message: str) -> bool:
    """Whether the registry refused the image: it does not exist, or access is denied. False without an answer."""
    return _IMAGE_REFUSED.search(message) is not None


def fatal_signal_exit_code(text: str) -> int | None:
    """Exit code (128 plus the number) of the signal that faulthandler reports in ``text``; None without a report."""
    match = _FATAL_ERROR.search(text)
    return _SIGNAL_EXIT_CODES.get(match[1].replace("-", " ")) if match else None


def line_at(text: str, position: int) -> str:
    """The line of ``text`` at ``position``, truncated to 300 characters."""
    first = text.rfind("\n", 0, position) + 1
    line = text[first:].partition("\n")[0].strip()
    return line if len(line) <= _MAX_LINE_CHARACTERS else f"{line[: _MAX_LINE_CHARACTERS - 1]}…"


MISSING_OUTPUT_PATTERN = "exit code 64.: .*no such file or directory"
"""In the message of a node whose program ended well without an output that it declares: argoexec finds no such file.

Without characters that an expression of Argo would have to escape.
"""
_MISSING_OUTPUT = re.compile(MISSING_OUTPUT_PATTERN, re.DOTALL)
_DID_NOT_RUN = ("Skipped", "Omitted")
_SIGTERM, _SIGKILL, _SIGALRM = 143, 137, 142
_ARGOEXEC_EXIT_CODES = (64, 141)
"""Exit codes of argoexec itself: 64 if it could not load inputs or save outputs, 141 after a broken pipe. It is not in
the pods of a gang, so there 64 is the program's usage error."""

_OWN_OUTPUT_PHRASES = (UNKEPT_OUTPUT, "is not UTF-8 text")
"""Of messages that say what to do."""
REJECTION_PHRASES = (
    *("UnexpectedAdmissionError", "NodeAffinity", "OutOfcpu", "OutOfmemory", "OutOfpods", "OutOfephemeral-storage"),
    *("have enough resource: ", "TopologyAffinityError"),
)
"""Of pods that a node rejected before they started, and which so have no exit code.

The kubelet names any resource, GPUs too, in the message `Node didn't have enough resource: NAME, …`."""
CONDITION_PHRASES = ("EvictionByEvictionAPI", "DeletionByTaintManager")
"""Of the conditions of a pod, which Argo does not read."""
CAUSE_PHRASES: Mapping[Cause, tuple[str, ...]] = {
    Cause.OUT_OF_MEMORY: ("OOMKilled",),
    Cause.DEADLINE: ("DeadlineExceeded", "longer than the specified deadline", "exceeded its deadline"),
    Cause.INFRASTRUCTURE: ("Evicted", "evicted", "low on resource", "NodeLost", *REJECTION_PHRASES),
    Cause.PREEMPTION: (
        *("node shutdown", "NodeShutdown", "Preempt", "preempt", "pod deleted", "Deleted"),
        *CONDITION_PHRASES,
    ),
    Cause.USER_ERROR: (
        *_OWN_OUTPUT_PHRASES,
        *("Object name ", "key is too long", "illegal symlink target"),
    ),
}
"""Reasons and messages of pods and nodes, by the cause that they prove; the first match decides.

A drain shows as ``EvictionByEvictionAPI``, the termination notice of a spot node
as a taint (Kubernetes, ``PodConditionType`` DisruptionTarget). An output that
storage cannot keep is an error of argoexec: the last line has the words of the
client of S3 (minio-go, ``s3utils.CheckValidObjectName``), of S3 itself, and of
Argo (``workflow/executor``, ``untar``).
"""

IMAGE_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
IMAGE_NAME_REASONS = ("ErrImageNeverPull", "InvalidImageName")
"""Reasons of the kubelet for an image that cannot be pulled; those of the second kind do not change by waiting."""
_START_FAILURE_REASONS = (
    *("StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError", "CreateContainerConfigError"),
    *IMAGE_PULL_REASONS,
)
"""Reasons of the kubelet for a container that never ran. The program is not at fault: Argo's executor starts it."""

_HANG_DUMP_MARKER = "(most recent call first)"
"""Part of the stack dump that the hang watchdog writes before the kernel kills a stuck program."""


@dataclass(frozen=True)
class AttemptObservation:
    """Evidence about the end of one attempt. The default of each field means unknown."""

    status: str = ""
    """Argo's status of the run node: Succeeded, Failed, Error, Skipped or Omitted; empty if unknown."""
    exit_code: int | None = None
    """Exit code of the main container; None or -1 if unknown."""
    pod_seen: bool = False
    """Whether the pod of the attempt still existed at the classification."""
    pod_reason: str = ""
    """Reason from Kubernetes, such as ``OOMKilled``, ``Evicted`` or ``Deleted``."""
    pod_message: str = ""
    """Message from Kubernetes, or that of the run node."""
    member: str = ""
    """The member of a gang that ended first, such as ``rank 2 of 4``; empty for an attempt with one pod."""
    ended_at: datetime | None = None
    """When that pod began to terminate."""
    node: str = ""
    """The node of that pod."""
    termination_message: str = ""
    """Termination message of the program, or the end of its log."""
    crash_error: str = ""
    """The error that ended the program, from the crash report of its session."""
    is_launched: bool = False
    """Whether the launcher ran the program, so that `EX_NEW_POD` is its word."""
    stuck_seconds: float | None = None
    """Seconds without a completed step when the session ended the program for a hang."""

    @property
    def effective_exit_code(self) -> int | None:
        """The program's exit code. Argo reports each signal as SIGKILL; faulthandler's report names the signal."""
        if self.exit_code == _SIGKILL:
            return fatal_signal_exit_code(self.last_words) or self.exit_code
        return None if self.exit_code == -1 else self.exit_code

    @property
    def last_words(self) -> str:
        """The termination message of the last process alone: a log also has what led to a restart before it."""
        return _RESTARTED.split(self.termination_message)[-1]

    @property
    def last_process(self) -> int:
        """The last process of the program that the launcher says it has started; 1 if it says nothing."""
        return max(map(int, _RESTARTED.findall(self.termination_message)), default=1)

    def find_phrase(self, phrases: tuple[str, ...]) -> str:
        """The first of ``phrases`` in the reason or the message of the pod; empty if none."""
        return next((phrase for phrase in phrases if phrase in self.pod_reason or phrase in self.pod_message), "")


UNEXPLAINED_RULES = ("argo-error", "nothing-known")
"""Rules that match where neither the program nor its pod says why it ended."""


class FailureVerdict(NamedTuple):
    """The cause of a failure and the evidence as a sentence. ``cause`` is None if the attempt did not fail.

    ``rule`` names the rule that matched, and ``matched_text`` is what it matched.
    """

    cause: Cause | None
    evidence: str
    rule: str = ""
    matched_text: str = ""


def classify_failure(observation: AttemptObservation) -> FailureVerdict:
    """Classify the end of an attempt; the first rule with evidence decides. Pure."""
    match, signal_code = match_error_signature(observation.crash_error), fatal_signal_exit_code(observation.last_words)
    if match and match.signature.rule == _CONNECTION_LOST and signal_code:
        # A rank that crashes leaves no error, and the first to leave one has lost it. Its launcher may end with 1.
        observation = replace(observation, crash_error="", exit_code=signal_code)
    verdict = _apply_rules(observation)
    if observation.member and verdict.cause is not None:
        return verdict._replace(evidence=f"{observation.member}: {verdict.evidence}")
    return verdict


def _apply_rules(observation: AttemptObservation) -> FailureVerdict:
    for rule in _RULES:
        if (verdict := rule(observation)) is not None:
            return verdict
    pod = "its pod says nothing" if observation.pod_seen else "its pod is gone"
    return FailureVerdict(Cause.UNKNOWN, f"no exit code was seen and {pod}", "nothing-known")


def _rule_not_failed(observation: AttemptObservation) -> FailureVerdict | None:
    if observation.status == "Succeeded":
        return FailureVerdict(None, "the program succeeded")
    if observation.status in _DID_NOT_RUN:
        return FailureVerdict(None, f"the program did not run ({observation.status})")
    return None


def _rule_pod(observation: AttemptObservation) -> FailureVerdict | None:
    detail = observation.pod_message or observation.pod_reason
    if _MISSING_OUTPUT.search(observation.pod_message):
        evidence = f"a declared output is missing: the program ended well, but did not write it ({detail})"
        return FailureVerdict(Cause.OUTPUT_MISSING, evidence, "output-missing", detail)
    if phrase := observation.find_phrase(CAUSE_PHRASES[Cause.OUT_OF_MEMORY]):
        evidence = "the kernel killed it for using more memory than its limit (OOMKilled)"
        return FailureVerdict(Cause.OUT_OF_MEMORY, evidence, "pod-out-of-memory", phrase)
    if observation.find_phrase(CAUSE_PHRASES[Cause.DEADLINE]):
        return FailureVerdict(Cause.DEADLINE, f"it ran longer than its deadline ({detail})", "pod-deadline", detail)
    if observation.find_phrase(CAUSE_PHRASES[Cause.INFRASTRUCTURE]):
        evidence = f"its node failed, or evicted or rejected the pod ({detail})"
        return FailureVerdict(Cause.INFRASTRUCTURE, evidence, "pod-given-up", detail)
    if observation.find_phrase(CAUSE_PHRASES[Cause.PREEMPTION]):
        return FailureVerdict(Cause.PREEMPTION, f"its pod was taken away ({detail})", "pod-taken-away", detail)
    if phrase := observation.find_phrase(CAUSE_PHRASES[Cause.USER_ERROR]):
        remedy = "" if phrase in _OWN_OUTPUT_PHRASES else "; let its files have short names of UTF-8, and no links"
        return FailureVerdict(
            Cause.USER_ERROR, f"an output cannot be stored: {detail}{remedy}", "output-refused", detail
        )
    return None


def _rule_container_start(observation: AttemptObservation) -> FailureVerdict | None:
    """A container that never ran."""
    reason, detail = observation.pod_reason, f": {observation.pod_message}" if observation.pod_message else ""
    if reason in IMAGE_NAME_REASONS or (reason in IMAGE_PULL_REASONS and is_image_refused(observation.pod_message)):
        evidence = (
            f"the image does not exist, or this pod may not pull it ({reason}{detail}); "
            "correct the image name or the pull secret"
        )
        return FailureVerdict(Cause.IMAGE, evidence, "image-refused", observation.pod_message or reason)
    if reason in _START_FAILURE_REASONS:
        rule = "image-not-pulled" if reason in IMAGE_PULL_REASONS else "not-started"
        evidence = f"its program was never started ({reason}{detail})"
        return FailureVerdict(Cause.INFRASTRUCTURE, evidence, rule, observation.pod_message or reason)
    return None


def _rule_program_error(observation: AttemptObservation) -> FailureVerdict | None:
    """The program's own error report, unless Tiphys requested its end."""
    if observation.effective_exit_code in (0, EX_TEMPFAIL, EX_UNAVAILABLE, EX_FENCED):
        return None
    if observation.is_launched and observation.effective_exit_code == EX_NEW_POD:
        return FailureVerdict(Cause.INFRASTRUCTURE, _NEEDS_NEW_POD, "needs-new-pod", observation.crash_error)
    if observation.stuck_seconds is not None:
        return FailureVerdict(
            Cause.HANG, observation.crash_error, "no-step", f"no step in {observation.stuck_seconds:.0f} s"
        )
    # The log is read only without a crash report and without a SIGTERM: it contains errors that were not the cause.
    match = (
        None
        if observation.effective_exit_code == _SIGTERM
        else match_error_signature(observation.crash_error or observation.last_words)
    )
    if match is not None:
        signature, line = match
        return FailureVerdict(signature.cause, f"{signature.meaning} ({line})", signature.rule, line)
    stuck = observation.effective_exit_code in (_SIGALRM, _SIGKILL) and _HANG_DUMP_MARKER in observation.last_words
    if stuck or (observation.effective_exit_code == EX_HANG and observation.crash_error == ""):
        return FailureVerdict(
            Cause.HANG,
            "it completed no step for too long, and the hang watchdog ended it",
            "no-step",
            observation.last_words,
        )
    return None


def _rule_exit_code(observation: AttemptObservation) -> FailureVerdict | None:
    code = observation.effective_exit_code
    if code is None or code == 0:
        return None
    if code in EXIT_CODES and not (observation.member and code in _ARGOEXEC_EXIT_CODES):
        cause, meaning = EXIT_CODES[code]
        said = _last_line(observation.last_words, of_tiphys=True) if code == EX_UNAVAILABLE else ""
        if "credentials" in said:
            meaning = "no outage: it lacks credentials that its store accepts, which Secret tiphys-store gives its pod"
        evidence = f"exit code {code}: {meaning}{f' ({said})' if said else ''}"
        return FailureVerdict(cause, evidence, f"exit-code-{code}", said)
    if observation.status == "Error":
        return None
    refusal = _last_line(observation.last_words, of_tiphys=True)
    if UNKEPT_OUTPUT in refusal:
        return FailureVerdict(Cause.USER_ERROR, f"an output cannot be stored: {refusal}", "output-refused", refusal)
    said = observation.crash_error or _last_line(observation.last_words)
    evidence = f"the program exited with {code}{f' ({said})' if said else ''}"
    return FailureVerdict(Cause.USER_ERROR, evidence, "program-failed")


def _last_line(text: str, *, of_tiphys: bool = False) -> str:
    """The last line of ``text`` that the program wrote itself, or Tiphys beside it, truncated."""
    lines = [line for line in text.splitlines() if line.strip() and line.startswith(LOG_PREFIX) is of_tiphys]
    return line_at(lines[-1].removeprefix(LOG_PREFIX), 0) if lines else ""


def _rule_argo_status(observation: AttemptObservation) -> FailureVerdict | None:
    if observation.status == "Error":
        detail = observation.pod_message or observation.pod_reason
        evidence = f"Argo reports an error{f' ({detail})' if detail else ''}"
        return FailureVerdict(Cause.INFRASTRUCTURE, evidence, "argo-error", detail)
    if observation.effective_exit_code == 0:
        return FailureVerdict(Cause.UNKNOWN, "the program exited with 0, yet the step did not succeed", "exit-code-0")
    return None


EXIT_CODES: Mapping[int, tuple[Cause, str]] = {
    EX_TEMPFAIL: (Cause.PREEMPTION, "it was asked to stop, and requests another attempt"),
    EX_UNAVAILABLE: (Cause.STORAGE, "storage was unavailable during the restore"),
    EX_FENCED: (Cause.INFRASTRUCTURE, "it stopped because a newer attempt exists"),
    _SIGTERM: (Cause.PREEMPTION, "SIGTERM ended it"),
    _SIGKILL: (Cause.INFRASTRUCTURE, "it was killed (SIGKILL), and not for its memory"),
    **dict.fromkeys(_ARGOEXEC_EXIT_CODES, (Cause.INFRASTRUCTURE, "the container's executor failed, not the program")),
}
"""Exit codes with the same meaning in every program. Every other code except 0 is an error of the program."""

_RULES: tuple[Callable[[AttemptObservation], FailureVerdict | None], ...] = (
    *(_rule_not_failed, _rule_pod, _rule_container_start, _rule_program_error, _rule_exit_code, _rule_argo_status),
)
