"""A training that kills itself: ``python -m bench.checkpoint.restart_trainer MIB KILLS``.

Each process says when its first step is done, saves, waits until a spare has had time for its imports, and dies.
"""

import contextlib
import os
import signal
import sys
import time

from bench.checkpoint.workload import make_state

from tiphys import checkpoint
from tiphys.protocol import environment

with contextlib.suppress(ImportError):
    import torch  # noqa: F401  its imports are what a restart waits for

SEED = 11
_SPARE_SECONDS = 8.0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(mib: int, kills: int) -> None:
    process = int(os.environ.get(environment.INCARNATION) or 1)
    with checkpoint.session() as session:
        state = session.restore(default=make_state(mib, SEED) if process == 1 else make_state(0, SEED))
        state["layer00"] = state["layer00"] + 1
        say(f"first {time.time():.4f}")
        session.save(process, state)
        session.flush()
        if process > kills:
            return
        time.sleep(_SPARE_SECONDS)
        say(f"killed {time.time():.4f}")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
