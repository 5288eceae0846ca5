"""Checkpoints for a training program, in under ten lines.

    from tiphys import checkpoint

    with checkpoint.session() as session:
        state = session.restore(default=initial_state())
        while state["step"] < total:
            loss = train_one_step(state)
            state["step"] += 1
            session.step(state["step"], state, metrics={"loss": loss})

`Session.step` takes the number of *completed* steps, so that a restored state
continues with the next one. A state is any nesting of dict, list, tuple and
dataclass around NumPy arrays, numbers, text and bytes; what shares memory or is
one object at two places stays so. Put the state of every random generator into
it, and a resumed run is bit-identical to an uninterrupted one.
Outside of a compiled step the session does nothing.
"""

from tiphys.checkpoint.lifecycle.out_of_memory import batch_scale
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.session import Session, session

__all__ = ["Save", "Session", "batch_scale", "session"]
