"""Named places where a test can make the process die, hang or fail.

A promise such as "an acknowledged checkpoint is never lost" can only be tested
by a failure between two writes. Code calls ``failpoint("name")`` between them,
which does nothing unless ``TIPHYS_FAILPOINTS`` names it:

    TIPHYS_FAILPOINTS="checkpoint.before_manifest=crash@2;conclude.after_failure=raise"

``crash`` kills the process with SIGKILL, ``raise`` raises `InjectedFaultError`,
``hang:SECONDS`` sleeps. ``@n`` acts at the n-th call only (default 1). Every
action is first written to the file named by ``TIPHYS_FAILPOINTS_LOG``, so that
a test can assert that the fault happened. The design follows etcd's gofail.
"""

import os
import signal
import time
from collections import Counter
from pathlib import Path

from tiphys.errors import TiphysError

_calls: Counter[str] = Counter()


class InjectedFaultError(TiphysError):
    """Raised by a failpoint whose action is ``raise``."""


def failpoint(name: str) -> None:
    """Run the action that ``TIPHYS_FAILPOINTS`` names for ``name``; do nothing without one.

    Raises:
        InjectedFaultError: the action is ``raise``, or unknown.
    """
    plan = os.environ.get("TIPHYS_FAILPOINTS")
    if not plan:
        return
    # All entries count this call before the first one acts, because an action may not return.
    for action in [action for entry in plan.split(";") if (action := _matching_action(name, entry))]:
        _act(name, action)


def _matching_action(name: str, entry: str) -> str | None:
    """Count this call for ``entry``; return its action if the count matches."""
    point, _, action = entry.partition("=")
    if point.strip() != name:
        return None
    action, _, nth = action.strip().partition("@")
    _calls[entry] += 1
    return action if _calls[entry] == int(nth or 1) else None


def _act(name: str, action: str) -> None:
    if log := os.environ.get("TIPHYS_FAILPOINTS_LOG"):
        with Path(log).open("a") as stream:
            stream.write(f"{name}={action}\n")
    verb, _, argument = action.partition(":")
    match verb:
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(float(argument))
        case "raise":
            raise InjectedFaultError(f"failpoint {name} is set to raise by TIPHYS_FAILPOINTS")
        case _:
            raise InjectedFaultError(f"failpoint {name}: unknown action {action!r}; use crash, raise or hang:SECONDS")
