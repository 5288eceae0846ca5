"""The memory of the pod: its limit, and what is in use, as the kernel counts them.

The limit is that of the innermost control group that has one, in version 1 or 2,
or else the memory of the machine. Cached files that nobody maps are no use of
memory, because the kernel drops them first; the kubelet counts alike (working set).
Sources: cgroup-v2.rst "memory.current", "memory.stat"; cgroup-v1/memory.rst section 5.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_NONE = 1 << 60
"""Version 1 shows about so many bytes where no limit is set."""


class _Files(NamedTuple):
    limit: str
    usage: str
    inactive: str
    """Name of the cached files in ``memory.stat``."""


_VERSIONS = {
    "": _Files("memory.max", "memory.current", "inactive_file"),
    "memory": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the name of the controller in ``/proc/self/cgroup``."""


class PodMemory(NamedTuple):
    """Memory in bytes."""

    limit_bytes: int
    free_bytes: int
    """What can still be taken."""


def read_pod_memory(root: Path = Path("/")) -> PodMemory:
    """Read limit and use; ``root`` is where ``proc`` and ``sys`` are."""
    machine = _read_fields(root / "proc/meminfo")
    limits = [1024 * machine.get("MemTotal:", _NONE)]
    free = [1024 * machine.get("MemAvailable:", _NONE)]
    for folder, names in _iter_groups(root):
        limit, used = _read_number(folder / names.limit), _read_number(folder / names.usage)
        if limit is not None and used is not None and limit < _NONE:
            inactive = _read_fields(folder / "memory.stat").get(names.inactive, 0)
            limits.append(limit)
            free.append(limit - max(0, used - inactive))
    return PodMemory(min(limits), max(0, min(free)))


def read_peak_bytes(root: Path = Path("/")) -> int:
    """Most memory that this process has had at once; 0 if the kernel does not say it."""
    return 1024 * _read_fields(root / "proc/self/status").get("VmHWM:", 0)


def _iter_groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The control groups of this process that this container sees, the innermost first."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & _VERSIONS.keys():
            mount = root / "sys/fs/cgroup" / controller
            # In a container of version 1 the path is that on the host, which is mounted as the root.
            for part in (PurePosixPath(path), *PurePosixPath(path).parents):
                yield mount / str(part).lstrip("/"), _VERSIONS[controller]


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdecimal() else None


def _read_fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.split() for line in _read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
