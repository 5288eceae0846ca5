"""The daemons of a cluster: started on a node, known by number and start time, ended one by one for the tests that
want to see what happens without them.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from .errors import HarnessError
from .machine import wait_until
from .namespaces import child_of, enter, recorded, start_time
from .settings import Node, Settings

# What a person's shell holds (proxies, certificates, credentials) must not reach a daemon.
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}


def start(settings: Settings, node: Node, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
    """Start a daemon on a node; its output is appended to its log."""
    settings.logs.mkdir(parents=True, exist_ok=True)
    with log_of(settings, name).open("ab") as output:
        process = subprocess.Popen(
            enter(node, *command),
            env={**_ENVIRONMENT, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o022,  # a stricter one would reach into the images that are unpacked
        )
    _pid_file(settings, name).write_text(f"{process.pid} {start_time(process.pid)}")


def stop(settings: Settings, name: str, number: signal.Signals = signal.SIGTERM) -> None:
    """End a daemon; by force if it does not go within 20 seconds."""
    waiter = recorded(_pid_file(settings, name))
    for each in (number, signal.SIGKILL):
        if not (process := child_of(waiter)):
            break
        with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile
            os.kill(process, each)
        try:
            wait_until(f"{name} has ended", lambda: not recorded(_pid_file(settings, name)), seconds=20)
        except HarnessError:
            continue
    _pid_file(settings, name).unlink(missing_ok=True)


def runs(settings: Settings, name: str) -> bool:
    return bool(recorded(_pid_file(settings, name)))


def wait_for(settings: Settings, name: str, what: str, holds: Callable[[], bool]) -> None:
    """Wait for something that a daemon brings about; a failure shows the end of its log."""
    try:
        wait_until(what, lambda: holds() or not runs(settings, name))
    except HarnessError as error:
        raise HarnessError(f"{error}\n{tail(settings, name)}") from error
    if not holds():
        raise HarnessError(f"{name} has ended before {what}\n{tail(settings, name)}")


def log_of(settings: Settings, name: str) -> Path:
    return settings.logs / f"{name}.log"


def tail(settings: Settings, name: str) -> str:
    path = log_of(settings, name)
    lines = path.read_text(errors="replace").splitlines()[-30:]
    return "\n".join([f"the end of {path}:", *lines])


def _pid_file(settings: Settings, name: str) -> Path:
    return settings.logs / f"{name}.pid"
