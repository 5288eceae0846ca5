"""What the sessions of a program tell its launcher, which sees only processes and exit codes."""

import os
import sys
import sysconfig
from collections.abc import Mapping

from tiphys.launch.process_table import ProcessStat
from tiphys.protocol import environment

_REGISTRY_NAME = "tiphys-sessions"
PREEMPTED, COMMITTED = "preempted", "committed"
"""Notes of a session: it saved and ends because of SIGTERM; it has committed a checkpoint."""
NEEDS_NEW_POD = "needs-new-pod"
"""A failure that no process of this pod could avoid, such as that of a broken GPU."""
_FAILED = "failed"


class SessionRegistry:
    """Processes with an open session, which a launcher of ranks may hide: a file in memory, to which each adds a line.

    The variable of the program names the file. A launcher closes inherited descriptors, but hands variables on.
    """

    def __init__(self, *, is_offered: bool) -> None:
        self.variables: dict[str, str] = {}
        self._forgotten = 0
        try:
            self._descriptor = os.memfd_create(_REGISTRY_NAME)
            if is_offered:
                self.variables[environment.LAUNCHER] = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        except OSError:  # a sandbox without this call: the program alone gets SIGTERM
            self._descriptor = os.open(os.devnull, os.O_RDONLY)

    def _notes(self) -> list[list[str]]:
        """Words of each line: number and start of the process, and what it said, if anything."""
        return [line.split() for line in os.pread(self._descriptor, 1 << 20, 0).decode().splitlines()]

    def sessions(self) -> set[tuple[int, int]]:
        """Identities of processes, also of those that have ended."""
        numbers = [words[:2] for words in self._notes() if len(words) > 1]
        return {(int(pair[0]), int(pair[1])) for pair in numbers if "".join(pair).isdecimal()}

    def has_preempted(self) -> bool:
        return self._count_preempted() > self._forgotten

    def forget_preempted(self) -> None:
        self._forgotten = self._count_preempted()

    def has_committed(self) -> bool:
        return any(words[2:3] == [COMMITTED] for words in self._notes())

    def modules(self) -> list[str]:
        """What the program had imported at its first commit, in the order in which it did."""
        return next((words[3:] for words in self._notes() if words[2:3] == [COMMITTED]), [])

    def failures(self) -> frozenset[str]:
        """What the sessions said with `note_failure`."""
        return frozenset(words[3] for words in self._notes() if words[2:3] == [_FAILED] and len(words) > 3)

    def _count_preempted(self) -> int:
        return sum(words[2:3] == [PREEMPTED] for words in self._notes())

    def close(self) -> None:
        os.close(self._descriptor)


def register_session(environ: Mapping[str, str], *notes: str) -> None:
    """Tell the launcher that this process has a session, and ``notes`` about it; never raises."""
    path = environ.get(environment.LAUNCHER, "")
    try:
        if _REGISTRY_NAME in os.readlink(path):  # in another namespace the path is that of another file
            stat = ProcessStat("self")
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, f"{' '.join((str(stat.pid), str(stat.started), *notes))}\n".encode())
            finally:
                os.close(descriptor)
    except OSError:
        return  # no launcher, or one of another user


def note_failure(environ: Mapping[str, str], cause: str) -> None:
    """Tell the launcher why a session of this process fails: a `tiphys.records.Cause`, or `NEEDS_NEW_POD`."""
    register_session(environ, _FAILED, cause)


def list_installed_modules() -> list[str]:
    """Modules of this process that are installed, in the order in which it began to import them.

    Not those of the author: importing them may begin to train.
    """
    folders = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return [name for name, file in files.items() if file.startswith(folders) or name.partition(".")[0] == "tiphys"]
