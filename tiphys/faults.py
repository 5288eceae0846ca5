"""Named places where a test can make the process die, hang or fail.

A promise such as "an acknowledged checkpoint is never lost" is only worth what
happens between two writes. Each such place calls ``failpoint("name")``, which
does nothing unless ``TIPHYS_FAILPOINTS`` names it:

    TIPHYS_FAILPOINTS="checkpoint.before_manifest=crash@2;settle.after_end=raise"

``crash`` kills the process with SIGKILL, ``raise`` raises `InjectedFaultError`,
``hang:SECONDS`` sleeps. ``@n`` acts at the n-th passage only (default 1). Every
action is first written to the file named by ``TIPHYS_FAILPOINTS_LOG``, so that
a test can assert that the fault really happened. The idea is etcd's gofail.
"""

import os
import signal
import time
from collections import Counter
from pathlib import Path

from tiphys.errors import TiphysError

_passages: Counter[str] = Counter()


class InjectedFaultError(TiphysError):
    """Raised by a failpoint whose action is ``raise``."""


def failpoint(name: str) -> None:
    """Act as ``TIPHYS_FAILPOINTS`` says for ``name``; otherwise do nothing."""
    plan = os.environ.get("TIPHYS_FAILPOINTS")
    if not plan:
        return
    # Every entry counts the passage before one of them acts, since an action may not return.
    for action in [due for entry in plan.split(";") if (due := _due(name, entry))]:
        _act(name, action)


def _due(name: str, entry: str) -> str | None:
    """Count this passage for ``entry``; its action if this is the one."""
    point, _, action = entry.partition("=")
    if point.strip() != name:
        return None
    action, _, nth = action.strip().partition("@")
    _passages[entry] += 1
    return action if _passages[entry] == int(nth or 1) else None


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
            raise InjectedFaultError(f"failpoint {name} was told to fail")
        case _:
            raise InjectedFaultError(f"failpoint {name}: unknown action {action!r}; use crash, raise or hang:SECONDS")
