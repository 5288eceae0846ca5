"""Memory of the pod that outlives the program, for the near copy of its newest checkpoint.

A file in memory (memfd) that the launcher holds: a program that dies leaves its
bytes, and the end of the launcher, which is that of the attempt, frees them. It
counts against the memory limit of the container as the program's own memory
does. `/dev/shm` would have 64 MiB by default, and an ``emptyDir`` in memory a
volume in each Workflow.

The file is one hole, whose pages take memory once they are written to: each rank
of the pod has a region of it.
"""

import os
from collections.abc import Mapping

from tiphys.protocol import environment

REGION_BYTES = 1 << 40
"""Size of the region of one rank, most of which stays a hole."""
_NAME = "tiphys-near-copy"
_REGIONS = 1024


def hold_near_memory(environ: Mapping[str, str]) -> dict[str, str]:
    """Hold an empty file in memory until this process ends.

    Returns:
        The variable that names it to the program; none for a program that keeps no checkpoints, or no near copy.
    """
    if not environ.get(environment.LINEAGE) or environ.get(environment.NEAR_COPY) == "false":
        return {}
    try:
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, _REGIONS * REGION_BYTES)
    except OSError:
        return {}  # a sandbox without this call
    return {environment.NEAR_MEMORY: f"/proc/{os.getpid()}/fd/{descriptor}"}


def open_near_memory(environ: Mapping[str, str], local_rank: int) -> int | None:
    """Open the file of the launcher, and return its descriptor; None if this process has no launcher."""
    path = environ.get(environment.NEAR_MEMORY, "")
    try:
        # In another namespace the path is that of another file.
        if _NAME in os.readlink(path) and local_rank < _REGIONS:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pass  # the launcher has ended, or is one of another user
    return None
