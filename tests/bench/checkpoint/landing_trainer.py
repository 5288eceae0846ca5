"""A training program that will be told to stop: ``python -m bench.checkpoint.landing_trainer MIB SITUATION``.

It says a word on standard output when it is where the benchmark wants to meet it.
"""

import sys
import time

from bench.checkpoint.situations import Situation
from bench.checkpoint.workload import make_state

from tiphys import checkpoint

STEP_SECONDS = 0.02
SEED = 11


def main(mib: int, situation: Situation) -> None:
    with checkpoint.session() as session:
        state = session.restore(default=make_state(mib, SEED))
        for step in range(1, 1_000_000):
            state["layer00"] += 1
            time.sleep(STEP_SECONDS)
            if step == 1 and situation.saves:
                save = session.save(step, state)
                if save and situation is not Situation.FIRST_SAVE:
                    save.wait()
            if step == 2 and situation is Situation.LATER_SAVE:
                session.save(step, state)
            if step == 2:
                sys.stdout.write("ready\n")
                sys.stdout.flush()
            session.step(step, state)


if __name__ == "__main__":
    main(int(sys.argv[1]), Situation(sys.argv[2]))
