"""The processes below the launcher, as ``/proc`` describes them, and which of them get SIGTERM now."""

import os
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

PATIENCE_SECONDS = 2.0
"""Time for a signalled shell or launcher to hand the signal on, and for what is left of a program that has ended."""
SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "busybox"})


class Process:
    """A running process below this one, as ``/proc`` describes it.

    Args:
        pid: Its number.
        name: The name of the file that it executes; for a script that of its interpreter.
        started: When it was started, in ticks of the system clock. Another process may have its number later.
        handles_sigterm: Whether it has a handler of SIGTERM.
        reads_pipe: Whether its standard input is a pipe, and not that of this process.
        children: The processes that it has started.
    """

    def __init__(
        self,
        pid: int,
        name: str = "",
        *,
        started: int = 0,
        handles_sigterm: bool = False,
        reads_pipe: bool = False,
        children: Sequence["Process"] = (),
    ) -> None:
        self.pid, self.name, self.identity = pid, name, (pid, started)
        self.handles_sigterm, self.reads_pipe, self.children = handles_sigterm, reads_pipe, children

    def descendants(self) -> Iterator["Process"]:
        """All processes below it."""
        for child in self.children:
            yield child
            yield from child.descendants()

    def sessions_below(self, sessions: Collection[int]) -> list[int]:
        """Which of the processes ``sessions`` are below it."""
        return [descendant.pid for descendant in self.descendants() if descendant.pid in sessions]

    def is_launcher(self, sessions: Collection[int]) -> bool:
        """Whether it is a launcher of ranks: no session, and no shell, but above one."""
        return self.pid not in sessions and self.name not in SHELLS and bool(self.sessions_below(sessions))


def choose_receivers(
    orphans: Iterable[Process],
    sent: Mapping[int, float],
    sessions: Collection[int],
    now: float,
    *,
    has_session_ended: bool = False,
) -> list[int]:
    """Return the processes that get SIGTERM now. Pure.

    Args:
        orphans: The program, and what is left of it: the children of its launcher.
        sent: When each process got SIGTERM; processes that are absent had none.
        sessions: Processes with an open session.
        now: The time, on the clock of ``sent``.
        has_session_ended: Whether a session has ended since the first SIGTERM, before its training was complete.
    """
    chosen: list[int] = []

    def visit(process: Process) -> None:
        below = process.sessions_below(sessions)
        is_shell = process.name in SHELLS
        if process.is_launcher(sessions):
            # The death of a launcher may interrupt the ranks. A signalled torchrun gives them PET_SHUTDOWN_TIMEOUT,
            # which older versions do not know; otherwise it kills those that live 30 s after the first has ended.
            chosen.extend(below)
            if has_session_ended and process.handles_sigterm:
                chosen.append(process.pid)
        elif process.pid not in sent:
            if process.pid in sessions or below or not process.reads_pipe:
                chosen.append(process.pid)
        elif is_shell and now - sent[process.pid] >= PATIENCE_SECONDS:
            for child in process.children:
                visit(child)

    for orphan in orphans:
        visit(orphan)
    return [pid for pid in dict.fromkeys(chosen) if pid not in sent]


class ProcessStat:
    """What ``/proc/<entry>/stat`` says of a process; raises OSError if it has ended (see proc_pid_stat(5))."""

    def __init__(self, entry: str) -> None:
        descriptor = os.open(f"/proc/{entry}/stat", os.O_RDONLY)  # `open` takes three times as long
        try:
            head, _, tail = os.read(descriptor, 4096).decode(errors="replace").rpartition(") ")
        finally:
            os.close(descriptor)
        pid, _, self.name = head.partition(" (")
        fields = tail.split()
        self.pid, self.state, self.parent, self.group = int(pid), fields[0], int(fields[1]), int(fields[2])
        self.started, handled = int(fields[19]), int(fields[31])
        self.handles_sigterm = bool(handled >> (signal.SIGTERM - 1) & 1)


def read_children(parent: int = 0, helpers: int | None = None) -> list[Process]:
    """The children of ``parent`` with all that is below them; by default those of this process.

    Children of this process that are in its own group, or in the group ``helpers``, are left out.
    """
    own, other_groups = os.getpid(), (os.getpgrp(), helpers)
    found: dict[int, list[ProcessStat]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = ProcessStat(entry)
        except OSError:
            continue
        if stat.parent != own or stat.group not in other_groups:
            found.setdefault(stat.parent, []).append(stat)
    own_input = _read_link("/proc/self/fd/0")

    def build(parent: int) -> list[Process]:
        return [
            Process(
                stat.pid,
                # The name of a process is that of its script, and a shell may run that.
                _read_link(f"/proc/{stat.pid}/exe").rpartition("/")[2] or stat.name,
                started=stat.started,
                handles_sigterm=stat.handles_sigterm,
                reads_pipe=(standard_input := _read_link(f"/proc/{stat.pid}/fd/0")).startswith("pipe:")
                and standard_input != own_input,
                children=build(stat.pid),
            )
            for stat in found.get(parent, ())
            if stat.state not in "ZX" or parent == own
        ]

    return build(parent or own)


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
