"""Against which quota leases and requests count, by flavor or GPU type: sums from the ledger as it is stored.

The words are those of the service, which decides: a test holds these sums
against its own.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from tiphys.kube import Object

ANY_TYPE = "*"
Sums = defaultdict[str, Counter[str]]
"""GPUs by queue and pool."""


class Counting:
    """Sums under the queues and flavors of ``spec``."""

    def __init__(self, spec: Object) -> None:
        self.flavors: dict[str, Object] = {one["name"]: one for one in spec.get("flavors") or ()}
        self._queues: dict[str, Object] = {one["name"]: one for one in spec.get("queues") or ()}

    def held(self, leases: Iterable[Object]) -> Sums:
        """What leases hold."""
        return _summed((one, self._pool(one, one["pool"])) for one in leases)

    def pending(self, waiting: Iterable[Object]) -> Sums:
        """What is waited for: of flavors, the first that suits."""
        return _summed((one, next(self._suiting(one), None) or self._pool(one, ANY_TYPE)) for one in waiting)

    def _pool(self, one: Object, given: str) -> str:
        queue = self._queues.get(one["queue"])
        kind = given if given in self.flavors and queue is not None else one.get("gpuType") or given
        if queue is None or kind in queue["gpus"]:
            return str(kind)
        alike = (name for name in self._named(queue) if self.flavors and self._type(name) == self._type(kind))
        return next(alike, ANY_TYPE)

    def _suiting(self, one: Object) -> Iterator[str]:
        queue = self._queues.get(one["queue"])
        names = self._named(queue) if self.flavors and queue is not None else []
        if one.get("spot") == "avoided":
            names.sort(key=lambda name: bool(self.flavors.get(name, {}).get("spot")))
        for name in names:
            flavor = self.flavors.get(name, {})
            uses = ("allowed", "only", "avoided") if flavor.get("spot") else ("no", "allowed", "avoided")
            memory = flavor.get("memory_mb") or one.get("minGpuMemoryMb", 0)
            suits = one.get("gpuType") in (None, self._type(name)) and memory >= one.get("minGpuMemoryMb", 0)
            if suits and (not flavor or one.get("spot", "no") in uses):
                yield name

    def _named(self, queue: Object) -> list[str]:
        """Its pools but ``*``, in the order in which they are tried."""
        first, declared = queue.get("flavor_order") or [], list(self.flavors)
        rest = [name for name in queue["gpus"] if name != ANY_TYPE and name not in first]
        return [*first, *sorted(rest, key=lambda name: (_place(declared, name), name))]

    def _type(self, kind: str) -> Any:
        return self.flavors[kind]["gpu_type"] if kind in self.flavors else kind


def _place(declared: list[str], name: str) -> int:
    return declared.index(name) if name in declared else len(declared)


def _summed(entries: Iterable[tuple[Object, str]]) -> Sums:
    sums: Sums = defaultdict(Counter)
    for one, pool in entries:
        sums[one["queue"]][pool] += one["gpus"]
    return sums
