"""What the sessions of a program tell its launcher, which sees only processes and exit codes."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from tiphys.launch.process_table import ProcessStat
from tiphys.protocol import environment

_REGISTRY_NAME = "tiphys-sessions"
PREEMPTED, COMMITTED, IMPORTED, CLOSED, _RANK = "preempted", "committed", "imported", "closed", "rank"
"""Notes of a session: it saved and ends because of SIGTERM; it has committed a checkpoint; a save came due, which
another rank makes; the program has left it; its rank."""
NEEDS_NEW_POD = "needs-new-pod"
"""A failure that no process of this pod could avoid, such as that of a broken GPU."""
_FAILED = "failed"


class SessionRegistry:
    """Processes with an open session, which a launcher of ranks may hide: a file in memory, to which each adds a line.

    The variable of the program names the file. A launcher closes inherited descriptors, but hands variables on.

    Args:
        tells_sessions: Whether SIGTERM concerns the sessions; an elastic torchrun alone can tell the other nodes that
            its ranks leave.
    """

    def __init__(self, *, tells_sessions: bool) -> None:
        self.variables: dict[str, str] = {}
        self._forgotten, self.tells_sessions = 0, tells_sessions
        try:
            self._descriptor = os.memfd_create(_REGISTRY_NAME)
            self.variables[environment.LAUNCHER] = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        except OSError:  # a sandbox without this call: the program alone gets SIGTERM
            self._descriptor = os.open(os.devnull, os.O_RDONLY)

    def _notes(self) -> list[list[str]]:
        """Of each line: number and start of the process, the kind of what it said, and the rest, if anything."""
        text = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).decode()
        return [line.split(maxsplit=3) for line in text.splitlines()]

    def sessions(self) -> set[tuple[int, int]]:
        """Identities of processes to tell of SIGTERM, also of those that have ended."""
        return self._identities() if self.tells_sessions else set()

    def lost_sessions(self) -> set[tuple[int, int]]:
        """Identities of processes that ended without a word, as by a signal, if all have ended."""
        return self._identities() - self._identities(CLOSED, PREEMPTED, _FAILED)

    def complete_sessions(self) -> set[tuple[int, int]]:
        """Identities of processes whose sessions the program has left at the end of its training."""
        return self._identities(CLOSED) - self._identities(PREEMPTED, _FAILED)

    def _identities(self, *kinds: str) -> set[tuple[int, int]]:
        notes = [words for words in self._notes() if len(words) > 1 and (not kinds or {*words[2:3]} & {*kinds})]
        return {(int(words[0]), int(words[1])) for words in notes if "".join(words[:2]).isdecimal()}

    def has_preempted(self) -> bool:
        return self.tells_sessions and self._count_preempted() > self._forgotten

    def forget_preempted(self) -> None:
        self._forgotten = self._count_preempted()

    def has_committed(self) -> bool:
        return any(words[2:3] == [COMMITTED] for words in self._notes())

    def first_rank(self) -> int | None:
        """The rank of the first process of this pod that opened a session last; None if none has said it."""
        ranks = [words[3] for words in self._notes() if words[2:3] == [_RANK] and len(words) > 3]
        return int(ranks[-1]) if ranks and ranks[-1].isdecimal() else None

    def imports(self) -> "ProgramImports | None":
        """What the program had imported at its first save, and the variables that it had changed; None before."""
        notes = (words[3].split() for words in self._notes() if len(words) > 3 and words[2] in (COMMITTED, IMPORTED))
        return next(map(ProgramImports, notes), None)

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


def note_open_session(environ: Mapping[str, str]) -> None:
    """Tell the launcher that this process opens a session, and its rank if it is the first of its pod; never raises."""
    words = (_RANK, environ.get("RANK", "0")) if environ.get("LOCAL_RANK", "0") == "0" else ()
    register_session(environ, *words)


def note_failure(environ: Mapping[str, str], cause: str) -> None:
    """Tell the launcher why a session of this process fails: a `tiphys.records.Cause`, or `NEEDS_NEW_POD`."""
    register_session(environ, _FAILED, cause)


class ProgramImports:
    """What a spare imports, and with which variables.

    Args:
        words: As `describe_imports` returns them.
    """

    def __init__(self, words: Sequence[str]) -> None:
        from urllib.parse import unquote

        self.modules = [word for word in words if "=" not in word]
        """Installed modules, in the order in which the program began to import them."""
        pairs = (word.partition("=") for word in words if "=" in word)
        self._changes = {unquote(name): unquote(value[1:]) if value else None for name, _, value in pairs}

    def apply_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """``environ`` with what the program has changed of its variables."""
        changed = {**environ, **self._changes}
        return {name: value for name, value in changed.items() if value is not None}


def describe_imports(initial: bytes, environ: Mapping[str, str]) -> list[str]:
    """Words for the launcher: the modules of this process that are installed, and the variables that it has changed.

    Not the modules of the author: importing them may begin to train.

    Args:
        initial: What ``/proc/self/environ`` holds: the variables at the start of the process.
        environ: The variables now.
    """
    import sysconfig  # the launcher, which starts with each training, needs this module and not those
    from urllib.parse import quote

    folders = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    modules = [name for name, file in files.items() if file.startswith(folders) or name.partition(".")[0] == "tiphys"]
    before = dict(os.fsdecode(pair).split("=", 1) for pair in initial.split(b"\0") if b"=" in pair)
    changed = [f"{quote(name, '')}=+{quote(value, '')}" for name, value in environ.items() if before.get(name) != value]
    removed = [f"{quote(name, '')}=" for name in before if name not in environ]
    return [*modules, *changed, *removed]


def note_save(environ: Mapping[str, str], kind: str) -> None:
    """Tell the launcher that this process has got further than its checkpoint, or another rank has; never raises.

    What the program has imported says the first rank of a pod for all. ``kind`` is `COMMITTED` or `IMPORTED`.
    """
    words: list[str] = []
    if environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as initial:
            words = describe_imports(initial.read(), environ)
    register_session(environ, kind, *words)
