"""What the harness asks of the machine it runs on: root, a few Debian packages, commands that succeed."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .errors import HarnessError

# Commands, and the Debian packages that bring them.
NEEDED = {
    "containerd": "containerd",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "runc": "runc",
}
CNI = Path("/usr/lib/cni")
PATIENCE_SECONDS = 600
"""A deadline, never a duration: both cores may be busy, and whoever waits for a daemon notices when it ends."""


def say(sentence: str) -> None:
    """Progress goes to standard error: standard output is for the shell that evaluates it."""
    print(f"cluster: {sentence}", file=sys.stderr, flush=True)  # noqa: T201  a command's own voice


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, text: str = "") -> str:
    """Run a command to its end; its standard output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HarnessError(f"`{' '.join(words)}` ended with {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}")
    return done.stdout


def wait_until(what: str, holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Poll a condition; a slow machine only makes this longer."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise HarnessError(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(0.2)


def require_root() -> None:
    if os.geteuid() != 0:
        raise HarnessError("namespaces and mounts need root: run it as root, or use a cluster of yours by KUBECONFIG")


def install_packages() -> None:
    """Bring what is missing; Debian and its descendants only."""
    missing = {package for command, package in NEEDED.items() if not shutil.which(command)}
    if not CNI.exists():
        missing.add("containernetworking-plugins")
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise HarnessError(f"this machine lacks {', '.join(sorted(missing))} and has no apt-get: install them")
    say(f"apt-get update, and install {', '.join(sorted(missing))}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-qq", env=quiet)
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *sorted(missing), env=quiet)


def load_kernel_modules() -> None:
    """Where they are modules; elsewhere they are built in, and modprobe may not even exist."""
    if shutil.which("modprobe"):
        for module in ("overlay", "br_netfilter", "nf_conntrack", "xt_comment"):
            subprocess.run(["modprobe", "--quiet", module], capture_output=True, check=False)
