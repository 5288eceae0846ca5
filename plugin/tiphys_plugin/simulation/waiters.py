"""Those who wait, kept so that a look need not go through all of them.

Thousands may wait, and no more of those that are alike can start at once than
there are GPUs for. So of each kind only the first few are looked at: what comes
of them is the same, and a trace of years takes seconds.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from tiphys_plugin.ledger.model import LeaseRequest, Waiting

Place = tuple[float, ...]
"""Where one stands among those of its queue; the smallest is next. No two have the same."""
Kind = tuple[str, str | None, int, int, int | None, str]
"""Queue, GPU type, GPUs, members, and the longest that it takes: of two that agree in these, the one with the better
place starts first."""
_Placed = tuple[Place, Waiting]


class Waiters:
    """``place`` gives the order within a queue; it is asked once for each."""

    def __init__(self, place: Callable[[Waiting], Place]) -> None:
        self._place = place
        self._kinds: dict[Kind, list[_Placed]] = {}

    def __iter__(self) -> Iterator[Waiting]:
        return (one for line in self._kinds.values() for _, one in line)

    @property
    def heads(self) -> list[Waiting]:
        """Who is next of each kind."""
        return [line[0][1] for line in self._kinds.values()]

    def add(self, one: Waiting) -> None:
        insort(self._kinds.setdefault(_kind(one.request), []), (self._place(one), one), key=_by_place)

    def remove(self, one: Waiting) -> None:
        kind = _kind(one.request)
        line = self._kinds[kind]
        del line[bisect_left(line, self._place(one), key=_by_place)]
        if not line:
            del self._kinds[kind]

    def first(self, gpus: int) -> list[Waiting]:
        """All who can matter to what becomes of so many GPUs, in the order of arrival."""
        found = [one for kind, line in self._kinds.items() for _, one in line[: _most(kind, gpus)]]
        return sorted(found, key=lambda one: one.arrival)

    def of_queue(self, name: str, gpus: int) -> list[Waiting]:
        """The same of one queue, the best place first."""
        lines = [line[: _most(kind, gpus)] for kind, line in self._kinds.items() if kind[0] == name]
        return [one for _, one in sorted((placed for line in lines for placed in line), key=_by_place)]


def _most(kind: Kind, gpus: int) -> int:
    """One more than can start on so many GPUs: it is the one for whom the rest is kept."""
    return gpus // kind[2] + 1


def _kind(request: LeaseRequest) -> Kind:
    return (request.queue, request.gpu_type, request.gpus, request.members, request.seconds, request.spot)


def _by_place(placed: _Placed) -> Place:
    return placed[0]
