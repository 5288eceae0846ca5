"""Processes that a training program starts are not its session: not a forked child, and not one that imports it again.

A forked child, such as a worker of a data loader, inherits the signal handlers
of the session, whose threads it lacks. With these handlers the child would be
deaf to SIGTERM, and its end would look like that of the training. So each child
gets back what the program itself had installed, and every use of the session in the
child is refused.
"""

import os
import signal
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

OwnerT = TypeVar("OwnerT")

FORKED = (
    "this process was forked from process {}, which has opened a session; call the session in that process only, and "
    "return from the child what it has computed"
)
"""Why a forked child may not use a session, with the number of its parent process."""
_undo_by_owner: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()
_signal_masks: dict[int, set[int | signal.Signals]] = {}
"""The mask of each thread that forks now."""
_forked_from: int | None = None
"""The process with the session, if this one was forked from it."""


def undo_in_children(owner: OwnerT, undo: Callable[[OwnerT], object]) -> None:
    """Call ``undo(owner)`` at the start of each forked child, until `keep_in_children` or the end of ``owner``."""
    _undo_by_owner[owner] = undo


def keep_in_children(owner: object) -> None:
    """Take back `undo_in_children`."""
    _undo_by_owner.pop(owner, None)


def _block_sigterm() -> None:
    # CPython forgets signals that a child gets before its hooks run, so a SIGTERM waits until the handler is undone.
    if _undo_by_owner:
        _signal_masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _restore_mask() -> None:
    if (mask := _signal_masks.pop(get_ident(), None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _undo_all() -> None:
    global _forked_from
    if _undo_by_owner:
        _forked_from = os.getppid()
    for owner, undo in list(_undo_by_owner.items()):
        undo(owner)
    _restore_mask()


os.register_at_fork(before=_block_sigterm, after_in_parent=_restore_mask, after_in_child=_undo_all)


def find_parent_session() -> str:
    """Return why this process may not use a session of its own; empty if it may."""
    if _forked_from is not None:
        return FORKED.format(_forked_from)
    # multiprocessing imports the program again in a child that it does not fork; the attribute is private to it.
    process = getattr(sys.modules.get("multiprocessing.process"), "current_process", None)
    if process and getattr(process(), "_inheriting", False):
        return (
            "multiprocessing imports the program again in each process that it starts, which would train once more; "
            'put what opens the session and trains below if __name__ == "__main__":'
        )
    return ""
