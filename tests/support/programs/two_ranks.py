"""Two ranks that step together: ``python -m support.programs.two_ranks TELL`` forwards SIGTERM to rank TELL alone.

The barrier stands for the collectives of a real training: no rank gets ahead of
another, and one that left alone would strand the others.
"""

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.synchronize import Barrier

from support.programs.trainer import initial_state, say, train_step
from tiphys import checkpoint

RANKS = 2
PATIENCE_SECONDS = 120
PAUSE_SECONDS = 0.05
"""After each step. Ranks stop so many steps ahead as they did in the seconds before, so their pace may not double at
once, as it would on a machine that has just become idle, were it their arithmetic alone."""


def rank(number: int, together: Barrier) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(RANKS)}
    with checkpoint.session() as session:
        state = session.restore(default=initial_state())
        say(f"starts {state['step']}")
        while True:
            together.wait(PATIENCE_SECONDS)
            train_step(state)
            session.step(state["step"], state)
            time.sleep(PAUSE_SECONDS)


def main(tell: int) -> None:
    spawning = multiprocessing.get_context("spawn")
    together = spawning.Barrier(RANKS)
    ranks = [spawning.Process(target=rank, args=(number, together)) for number in range(RANKS)]
    for process in ranks:
        process.start()
    signal.signal(signal.SIGTERM, lambda *_: ranks[tell].terminate())
    for process in ranks:
        process.join()
    codes = [process.exitcode for process in ranks]
    sys.exit(75 if codes == [75] * RANKS else f"ranks ended with {codes}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
