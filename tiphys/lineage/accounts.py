"""What programs and registries write when they fail, and what it means.

The last resort before an exit code, which tells everything alike: a full GPU,
a broken GPU and a typing error all end a Python program with 1. The phrases
are those of PyTorch, CUDA, NCCL, the Linux kernel and containerd; one that
says nothing certain is not listed, and the exit code decides.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

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
