"""What other libraries cost on the same state and server: how long training stalls, and when the bytes are durable.

Each runs in an environment of its own outside of the project, made once; one
that cannot be installed is left out by name.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.checkpoint.workload import Workload
from bench.progress import say
from bench.samples import summary

PROGRAMS = Path(__file__).with_name("peer_programs")
CACHE = Path("~/.cache/tiphys-bench").expanduser()
TORCH = ("torch==2.15.0", "numpy==2.4.6", "s3fs==2026.9.0", "aiobotocore==3.10.0", "boto3==1.43.117")
ORBAX = ("jax==0.10.2", "orbax-checkpoint==0.12.8", "numpy==2.4.6", "boto3==1.44.5")
REPEATS = 3


class Peer(NamedTuple):
    packages: tuple[str, ...]
    """Empty for our own."""
    program: tuple[str, ...]


PEERS = {
    "tiphys": Peer((), ("tiphys_session.py",)),
    "torch.save, then upload": Peer(TORCH, ("torch_save.py",)),
    "DCP save": Peer(TORCH, ("dcp.py", "sync")),
    "DCP async_save": Peer(TORCH, ("dcp.py", "async")),
    "Orbax async save, then upload": Peer(ORBAX, ("orbax_async.py",)),
}


def measure(work: Workload) -> dict[str, Any]:
    found: dict[str, Any] = {"packages": {"torch": " ".join(TORCH), "orbax": " ".join(ORBAX)}, "left_out": {}}
    for name, peer in PEERS.items():
        try:
            python = _environment(peer.packages)
            found[name] = {
                "throttled": _run(work, python, peer, work.throttle),
                "free": _run(work, python, peer, None),
            }
        except subprocess.CalledProcessError as error:
            words = (error.stderr or "").strip().splitlines()
            found["left_out"][name] = words[-1] if words else str(error)
            say(f"{name} is left out: {found['left_out'][name]}")
    return found


def _environment(packages: tuple[str, ...]) -> Path:
    """The interpreter of an environment with these packages; our own for none."""
    if not packages:
        return Path(sys.executable)
    folder = CACHE / hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        say(f"installing {' '.join(packages)}")
        _uv("venv", "--clear", f"--python={sys.executable}", str(folder))
        _uv("pip", "install", f"--python={python}", *packages)
        (folder / "complete").touch()
    return python


def _uv(*arguments: str) -> None:
    # Away from the project, whose settings are none of theirs.
    uv = shutil.which(os.environ.get("UV", "uv")) or "uv"
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run([Path(uv).absolute(), *arguments], cwd=CACHE, check=True, capture_output=True, text=True)


def _run(work: Workload, python: Path, peer: Peer, network: float | None) -> dict[str, Any]:
    program, *more = peer.program
    command = [python, PROGRAMS / program, str(work.state_mib), str(REPEATS), *more]
    memory = Path("/dev/shm")
    with (
        work.server.at(network) as leads,
        tempfile.TemporaryDirectory(prefix="tiphys-bench-", dir=memory if memory.is_dir() else None) as scratch,
    ):
        environ = {**os.environ, **leads, "TMPDIR": scratch, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    work.server.empty()
    found = _times(json.loads(done.stdout.splitlines()[-1]))
    speed = f"{network:g} MB/s" if network else "full speed"
    stall, durable = found["stall_seconds"]["median"], found["durable_seconds"]["median"]
    say(f"{peer.program[0]} {' '.join(more)} at {speed}: stall {stall} s, durable after {durable} s")
    return found


def _times(measured: Mapping[str, list[float]]) -> dict[str, Any]:
    (first_stall, *stalls), (first_durable, *durable) = measured["stall"], measured["durable"]
    return {
        "first_stall_seconds": summary([first_stall]),
        "stall_seconds": summary(stalls),
        "first_durable_seconds": summary([first_durable]),
        "durable_seconds": summary(durable),
    }
