"""Training processes by the hundred: one process loads everything once, and forks for each.

``python -m support.zygote`` reads one JSON object per line: ``environ`` for the
program, ``steps``, and the file that takes ``started`` and ``saved`` lines. It
answers with the exit code, negative for a signal. Forked before any thread
runs, each child is a process of its own that a failpoint can kill.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

from support.answering import Answering
from support.trainer import digest_of, initial_state, train_step
from tiphys import checkpoint


def train(steps: int, log: int) -> None:
    with checkpoint.session() as session:
        state = session.restore(default=initial_state())
        os.write(log, f"started {state['step']}\n".encode())
        last = None
        while state["step"] < steps:
            train_step(state)
            last = session.step(state["step"], state) or last
            if last and last.done and (ref := last.wait()):
                os.write(log, f"saved {ref.global_step}\n".encode())
                last = None
    os.write(log, f"digest {digest_of(state)}\n".encode())


def child(job: dict[str, Any]) -> None:
    os.environ.update(job["environ"])
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(job["log"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    code = 1
    try:
        train(job["steps"], log)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        os._exit(code)


def main() -> None:
    # What a SIGKILL leaves behind does not depend on it, and a disk takes its time.
    os.fsync = lambda descriptor: None
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


class Zygote(Answering):
    """The other end; use it in a ``with`` block."""

    MODULE = "support.zygote"
    ENVIRON: ClassVar[dict[str, str]] = {"OPENBLAS_NUM_THREADS": "1"}

    def run(self, steps: int, log: Path, environ: dict[str, str]) -> int:
        """Run one program to its end; its exit code."""
        return int(self.ask({"steps": steps, "log": str(log), "environ": environ}))


if __name__ == "__main__":
    main()
