"""Puts the simulation's clock, chance and threads in the place of those that the product imports.

The product takes most clocks as arguments; what it reads of `time`, `datetime`, `secrets`, `random` and `threading`
itself is replaced by name in its modules, for as long as a simulation runs. Nothing of Python itself is changed.
"""

import contextlib
import functools
import queue
import random
import secrets
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from support.servers import kube_store

from chaos.scheduler import Actor, Scheduler
from tiphys import threads
from tiphys.checkpoint.telemetry import events
from tiphys.records import base

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_PREFIXES = ("tiphys", "support.servers.kube_store")


class _Namespace:
    """A module of which some names are others."""

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Lock:
    """A lock that gives the baton away where it waits; ``reentrant`` for the same actor."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._owner: Actor | None = None
        self._depth = 0
        self._reentrant = reentrant

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        actor = self._scheduler.current
        if self._reentrant and self._owner is actor:
            self._depth += 1
            return True
        if self._owner is not None:
            limit = None if blocking and timeout < 0 else timeout if blocking else 0.0
            if not self._scheduler.wait_for(lambda: self._owner is None, limit):
                return False
        self._owner, self._depth = actor, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._scheduler.changed()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition:
    def __init__(self, scheduler: Scheduler, lock: _Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or _Lock(scheduler, reentrant=True)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = self._scheduler.now + (float("inf") if timeout is None else timeout)
        while not (result := predicate()) and self._scheduler.now < deadline:
            self._lock.release()
            left = None if timeout is None else deadline - self._scheduler.now
            self._scheduler.wait_for(lambda: bool(predicate()) and not self._lock.locked(), left)
            self._lock.acquire()
        return result

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        self._scheduler.sleep(min(timeout or 1.0, 1.0))
        self._lock.acquire()
        return True

    def notify(self, _: int = 1) -> None:
        self._scheduler.changed()

    def notify_all(self) -> None:
        self._scheduler.changed()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._scheduler.changed()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait_for(self.is_set, timeout)


class _SimpleQueue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._scheduler.changed()

    def get(self) -> Any:
        self._scheduler.wait_for(lambda: bool(self._items))
        return self._items.pop(0)


class _Semaphore:
    def __init__(self, scheduler: Scheduler, value: int = 1) -> None:
        self._scheduler = scheduler
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if not self._scheduler.wait_for(lambda: self._value > 0, timeout if blocking else 0.0):
            return False
        self._value -= 1
        return True

    def release(self) -> None:
        self._value += 1
        self._scheduler.changed()


class _BackgroundThread:
    """`tiphys.threads.BackgroundThread` as an actor of the process that starts it."""

    def __init__(self, scheduler: Scheduler, work: Callable[[], object]) -> None:
        self._scheduler = scheduler
        self._actor = scheduler.spawn(scheduler.current.process, "background", work)

    def is_alive(self) -> bool:
        return not self._actor.has_ended

    def join(self, timeout_seconds: float | None = None) -> bool:
        return self._scheduler.wait_for(lambda: self._actor.has_ended, timeout_seconds)


class _InlineExecutor:
    """A pool whose work is done by whoever hands it in."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **given: Any) -> Any:
        future: Any = Future()
        try:
            future.set_result(work(*args, **given))
        except Exception as error:  # noqa: BLE001  as a future keeps it
            future.set_exception(error)
        return future

    def map(self, work: Callable[..., Any], *items: Any) -> Iterator[Any]:
        return iter([work(*item) for item in zip(*items, strict=False)])

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "_InlineExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _future(scheduler: Scheduler) -> type[Future]:  # type: ignore[type-arg]
    class SimulatedFuture(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> Any:
            scheduler.wait_for(self.done, timeout)
            return super().result(0)

        def set_result(self, result: Any) -> None:
            super().set_result(result)
            scheduler.changed()

        def set_exception(self, exception: BaseException | None) -> None:
            super().set_exception(exception)
            scheduler.changed()

    return SimulatedFuture


def _datetime(scheduler: Scheduler) -> type[datetime]:
    class SimulatedDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            seconds = scheduler.now + scheduler.current.process.skew_seconds
            return (EPOCH + timedelta(seconds=seconds)).astimezone(tz)

    return SimulatedDatetime


def _replacements(scheduler: Scheduler) -> dict[int, Any]:
    """What stands in the place of each object, by its identity."""

    def now() -> float:
        return scheduler.now

    def wall() -> float:
        return EPOCH.timestamp() + scheduler.now + scheduler.current.process.skew_seconds

    chance = scheduler.random
    simulated_time = _Namespace(
        time, monotonic=now, perf_counter=now, time=wall, sleep=scheduler.sleep, time_ns=lambda: int(wall() * 1e9)
    )
    return {
        id(time): simulated_time,
        id(time.monotonic): now,
        id(time.perf_counter): now,
        id(time.time): wall,
        id(time.sleep): scheduler.sleep,
        id(secrets): _Namespace(
            secrets,
            token_hex=lambda size=16: chance.randbytes(size).hex(),
            token_bytes=lambda size=16: chance.randbytes(size),
            choice=chance.choice,
            randbelow=chance.randrange,
        ),
        id(random): _Namespace(random, uniform=chance.uniform, random=chance.random, choice=chance.choice),
        id(uuid): _Namespace(uuid, uuid4=lambda: uuid.UUID(bytes=chance.randbytes(16))),
        id(threading): _Namespace(
            threading,
            Lock=lambda: _Lock(scheduler),
            RLock=lambda: _Lock(scheduler, reentrant=True),
            Condition=lambda lock=None: _Condition(scheduler, lock),
            Event=lambda: _Event(scheduler),
            Semaphore=lambda value=1: _Semaphore(scheduler, value),
            BoundedSemaphore=lambda value=1: _Semaphore(scheduler, value),
        ),
        id(queue): _Namespace(queue, SimpleQueue=lambda: _SimpleQueue(scheduler)),
        id(Future): _future(scheduler),
        id(ThreadPoolExecutor): _InlineExecutor,
        id(threads.map_parallel): lambda work, items, threads: [work(i, item) for i, item in enumerate(items)],
        id(threads.BackgroundThread): lambda work: _BackgroundThread(scheduler, work),
        id(threads.start_background_thread): lambda work: _BackgroundThread(scheduler, work),
        id(events.log_message): lambda message: None,
    }


@contextlib.contextmanager
def simulated(scheduler: Scheduler) -> Iterator[None]:
    """Have the modules of the product use the clock, chance and threads of ``scheduler``."""
    undo: list[Any] = []
    _replace_names(scheduler, undo)
    try:
        yield
    finally:
        for target, attribute, value in reversed(undo):
            if isinstance(target, dict):
                target[attribute] = value
            else:
                setattr(target, attribute, value)


def _replace_names(scheduler: Scheduler, undo: list[Any]) -> None:
    """Replace them in all modules of the product, and note in ``undo`` what was there."""
    new = _replacements(scheduler)
    for module in (base, kube_store):  # all that ask for the time of day
        undo.append((vars(module), "datetime", module.datetime))
        vars(module)["datetime"] = _datetime(scheduler)
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(_PREFIXES) or name == "tiphys.threads":
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in new and not attribute.startswith("__"):
                undo.append((vars(module), attribute, value))
                vars(module)[attribute] = new[id(value)]
            for cached in _cached_properties(module, value):
                undo.append((cached, "lock", cached.lock))
                cached.lock = contextlib.nullcontext()
            for function in _functions(module, value):
                for defaults in ("__defaults__", "__kwdefaults__"):
                    _replace_defaults(function, defaults, new, undo)


def _functions(module: types.ModuleType, value: Any) -> Iterator[types.FunctionType]:
    if getattr(value, "__module__", None) != module.__name__:
        return
    for candidate in [value, *(vars(value).values() if isinstance(value, type) else ())]:
        if isinstance(candidate, types.FunctionType):
            yield candidate


def _cached_properties(module: types.ModuleType, value: Any) -> Iterator[Any]:
    """Those with the lock that Python 3.11 holds for all instances; here it would join processes."""
    if isinstance(value, type) and value.__module__ == module.__name__:
        for candidate in vars(value).values():
            if isinstance(candidate, functools.cached_property) and hasattr(candidate, "lock"):
                yield candidate


def _replace_defaults(function: types.FunctionType, kind: str, new: dict[int, Any], undo: list[Any]) -> None:
    given = getattr(function, kind)
    if not given:
        return
    values = given.values() if isinstance(given, dict) else given
    if any(id(value) in new for value in values):
        undo.append((function, kind, given))
        changed = [new.get(id(value), value) for value in values]
        setattr(function, kind, dict(zip(given, changed, strict=True)) if isinstance(given, dict) else tuple(changed))
