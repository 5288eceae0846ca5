"""What the actors share: the clock, the bucket, the API server, the faults under way, and the history.

A `Fault` is drawn by `chaos.faults` and counts only once something met it. Everything that the checker reads is plain
data: the history is a list of JSON objects, the bucket a mapping of keys to bytes.
"""

import bisect
import builtins
import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from chaos.scheduler import Process, Scheduler
from tiphys.errors import ObjectExistsError, ObjectMissingError, StoreError, StoreFullError, UsageError
from tiphys.store import ObjectInfo, check_key

NAMESPACE = "ml"
_IS_JUDGED = re.compile(r"/attempts/|/manifests/|\.bound\.json")
"""Records whose content the checker reads in the history, because they may be gone at the end."""
_Result = TypeVar("_Result")


@dataclass
class Fault:
    """One fault: for how long, and for whom; ``process`` empty: for all."""

    number: int
    kind: str
    until: float = 0.0
    process: str = ""
    was_met: bool = False


class World:
    """The state of one simulation.

    Args:
        scheduler: Scheduler of the actors.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.random = scheduler.random
        self.objects: dict[str, tuple[bytes, str]] = {}
        """Bytes and version of each object in the bucket."""
        self.keys: list[str] = []
        """All keys, sorted."""
        self.history: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        """Those under way."""
        self.before_write: Callable[[Process, str], None] = lambda *_: None
        """Called before each write of a process with the key of the object, empty for one of the API server."""
        self.after_write: Callable[[Process, str], None] = lambda *_: None
        """Called after each write of a process to the bucket, with its key."""
        self._numbers = 0

    def keys_below(self, prefix: str, last: str = "") -> Iterator[str]:
        """Keys with this prefix after ``last``."""
        first = bisect.bisect_right(self.keys, last) if last else bisect.bisect_left(self.keys, prefix)
        for index in range(first, len(self.keys)):
            if not self.keys[index].startswith(prefix):
                return
            yield self.keys[index]

    def record(self, event: str, **fields: Any) -> None:
        """Add an event to the history."""
        entry = {"t": round(self.scheduler.now, 3), "by": self.scheduler.current.process.name, "event": event, **fields}
        self.history.append(entry)
        self.scheduler.note(f"{event} {sorted(fields.items())}")

    def begin_fault(self, kind: str, seconds: float = 0.0, process: str = "") -> Fault:
        """A fault of ``kind`` is under way for some seconds; `meet` says that it happened."""
        self._numbers += 1
        fault = Fault(self._numbers, kind, self.scheduler.now + seconds, process)
        self.faults = [old for old in self.faults if old.until > self.scheduler.now] + [fault] * (seconds > 0)
        return fault

    def meet(self, fault: Fault) -> None:
        """Something met the fault: only now it counts."""
        if not fault.was_met:
            fault.was_met = True
            self.record("fault", kind=fault.kind, number=fault.number, process=fault.process)

    def active(self, kind: str, process: Process) -> Fault | None:
        """A fault of ``kind`` that is under way for ``process``."""
        for fault in self.faults:
            if fault.kind == kind and fault.until > self.scheduler.now and fault.process in ("", process.name):
                return fault
        return None

    def meets(self, kind: str, process: Process, chance: float = 1.0) -> bool:
        """Whether a call of ``process`` meets a fault of ``kind``."""
        fault = self.active(kind, process)
        if fault is None or self.random.random() >= chance:
            return False
        self.meet(fault)
        return True

    def travel(self, slow_kind: str, process: Process) -> None:
        """The time that a request or its answer takes."""
        seconds = self.random.uniform(0.005, 0.03)
        if self.random.random() < 0.01:
            seconds = self.random.uniform(0.5, 5.0)
        if self.meets(slow_kind, process):
            seconds *= self.random.choice((10, 100, 400))
        self.scheduler.sleep(seconds)


class SimulatedStore:
    """The bucket as one process sees it. A listing shows one moment per page, as that of S3."""

    url = "sim://bucket"
    namespace = NAMESPACE

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._page = world.random.choice((3, 7, 1000))

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        check_key(key)

        def effect() -> None:
            if key in self._world.objects:
                raise ObjectExistsError(f"{self.url} already has an object {key}; objects are never overwritten")
            if self._world.meets("store full", self._process, chance=0.5):
                raise StoreFullError(f"{self.url}: no room for {key}")
            self.put(key, bytes(data))

        self._call("create", key, effect)

    def put(self, key: str, data: bytes) -> None:
        """Write an object whatever is there, at once, as Argo's programs do with artifacts."""
        digest = hashlib.sha256(data).hexdigest()
        if key not in self._world.objects:
            bisect.insort(self._world.keys, key)
        self._world.objects[key] = (data, digest[:32])
        body = {"body": data.decode()} if key.endswith(".json") and _IS_JUDGED.search(key) else {}
        self._world.record("create", key=key, size=len(data), sha256=digest, **body)

    def create_from_file(self, key: str, path: Any) -> None:
        self.create(key, path.read_bytes())

    def read(self, key: str) -> bytes:
        check_key(key)

        def effect() -> bytes:
            if key not in self._world.objects:
                raise ObjectMissingError(f"{self.url} has no object {key}")
            return self._world.objects[key][0]

        return self._call("read", key, effect)

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        data = self.read(key)
        for start in range(0, len(data), size_bytes):
            yield data[start : start + size_bytes]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        last, rows = "", [ObjectInfo("", 0)]
        while rows:
            rows = self._call("list", prefix, partial(self._rows, prefix, last))
            yield from rows[: self._page]
            if len(rows) <= self._page:
                return
            last = rows[self._page - 1].key

    def prefixes(self, prefix: str) -> Iterator[str]:
        def effect() -> "builtins.list[str]":
            found = (key[len(prefix) :].partition("/") for key in self._world.keys_below(prefix))
            return sorted({f"{prefix}{head}/" for head, slash, _ in found if slash})

        yield from self._call("list", prefix, effect)

    def delete(self, key: str) -> None:
        check_key(key)

        def effect() -> None:
            if self._world.objects.pop(key, None) is not None:
                self._world.keys.remove(key)
                self._world.record("delete", key=key)

        self._call("delete", key, effect)

    def artifact_key(self, key: str) -> str:
        return check_key(key)

    def from_artifact_key(self, key: str) -> str | None:
        with contextlib.suppress(UsageError):
            return check_key(key)
        return None

    def _rows(self, prefix: str, last: str) -> "builtins.list[ObjectInfo]":
        """One row more than a page."""
        if "/attempts/" in prefix:
            self._world.record("list", prefix=prefix, page=0 if not last else 1)
        found = (
            (key, self._world.objects[key]) for key in islice(self._world.keys_below(prefix, last), self._page + 1)
        )
        return [ObjectInfo(key, len(data), version) for key, (data, version) in found]

    def _call(self, operation: str, key: str, effect: Callable[[], _Result]) -> _Result:
        world, process = self._world, self._process
        if operation in ("create", "delete"):
            world.before_write(process, key)
        world.travel("store slow", process)
        for kind, chance in (("store down", 1.0), ("cut off from the store", 1.0), ("store errors", 0.3)):
            if world.meets(kind, process, chance):
                world.scheduler.sleep(world.random.uniform(0.2, 12.0))
                raise StoreError(f"{self.url}: {operation} of {key} failed: 503 Slow Down")
        result = effect()
        if operation in ("create", "delete"):
            world.after_write(process, key)
        world.travel("store slow", process)
        if operation in ("create", "delete") and world.meets("store answers lost", process, 0.3):
            if operation == "create" and world.random.random() < 0.5:  # the client has sent it again
                raise ObjectExistsError(f"{self.url} already has an object {key}")
            raise StoreError(f"{self.url}: {operation} of {key} failed: connection reset by peer")
        return result
