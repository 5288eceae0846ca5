"""Our own session, measured as its peers are; it hashes every byte, and commits."""

from bench.checkpoint.workload import session
from protocol import Wait, arrays, report

state = arrays()

with session() as opened:
    opened.restore(default=state)

    def save(number: int) -> Wait:
        begun = opened.save(number + 1, state)
        assert begun is not None
        return lambda: _committed(begun.wait())

    def _committed(checkpoint: object) -> None:
        assert checkpoint is not None, "the save was not committed"

    report(save)
