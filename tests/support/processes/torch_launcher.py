"""Programs as the ranks of one training, forked from a process that has PyTorch loaded once.

``python -m support.processes.torch_launcher MODULE …`` imports modules for all ranks, takes an order in each
line of its standard input and answers with what became of the ranks. It ends with its input, thus
also when the tests are killed; ranks that outlive their deadline are killed.
"""

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  the first DTensor takes seconds to import it: here once, not in each rank
import torch.distributed as dist

from support.programs import torch_programs

SECONDS = 600.0
"""A machine may be slow; only a deadlock takes so long."""


def run(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one world of ranks to its end: for each its exit code, what it returned and what it said."""
    folder = Path(order["folder"])
    folder.mkdir(parents=True)
    codes = wait([start(order, folder, rank) for rank in range(order["world"])])
    return [{"exit": code, "result": result(folder, rank), "said": said(folder, rank)} for rank, code in codes.items()]


def start(order: dict[str, Any], folder: Path, rank: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = rank_main(order, folder, rank)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001  DCP's own is no Exception; this is where the process ends
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def rank_main(order: dict[str, Any], folder: Path, rank: int) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    world = order["world"]
    os.environ.update({**order["environ"], "RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"})
    os.environ.update(order.get("of_rank", {}).get(str(rank), {}))
    where = f"file://{folder / 'init'}"
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS / 2)
    )
    returned = getattr(torch_programs, order["program"])(**order["arguments"])
    (folder / f"{rank}.json").write_text(json.dumps(returned))
    dist.destroy_process_group()
    return 0


def wait(pids: list[int]) -> dict[int, int]:
    """Exit codes by rank, negative for a signal."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + SECONDS
    while len(codes) < len(pids):
        if time.monotonic() > deadline:
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
        for rank, pid in enumerate(pids):
            if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.01)
    return dict(sorted(codes.items()))


def result(folder: Path, rank: int) -> Any:
    path = folder / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


def said(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.log").read_text(errors="replace")


if __name__ == "__main__":
    for module in sys.argv[1:]:
        import_module(module)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line))) + "\n")
        sys.stdout.flush()
