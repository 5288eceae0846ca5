"""A scheduler of actors of which exactly one runs, on a clock that only it moves.

Each actor is a thread that owns the baton while it runs, and gives it away where it sleeps, waits or calls storage or
cluster. Who comes next is decided by virtual time and by the seed alone, so a seed gives the same history each time.
Actors of one `Process` live, stop and die together.
"""

import hashlib
import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

MOST_SWITCHES = 400_000
"""Ten times what a simulation takes: two actors that wake each other for ever are a bug."""


class ProcessKilledError(BaseException):
    """The process of the actor is dead; unlike an error, nothing in the program may handle it."""


class Process:
    """What lives and dies together: a program, a replica of a service, a person's command."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.stopped_until = 0.0
        """SIGSTOP: none of its actors runs before this time."""
        self.skew_seconds = 0.0
        """How far its clock of the day is ahead."""


class Actor:
    """One thread of a process. ``error`` is what ended it; None for an end as it should be."""

    def __init__(self, process: Process, name: str, work: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.work = work
        self.baton = threading.Semaphore(0)
        self.ticket = 0
        self.predicate: Callable[[], bool] | None = None
        self.wake = 0.0
        """Until when it sleeps, or is not yet started."""
        self.has_ended = False
        self.result: Any = None
        self.error: BaseException | None = None


class Scheduler:
    """Runs actors one at a time.

    Args:
        seed: Seed of everything that is drawn in the simulation.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.switches = 0
        self.crashes: list[tuple[str, BaseException]] = []
        """Errors that no actor should have raised: bugs of the simulation or of the product."""
        self._heap: list[tuple[float, float, int, Actor, int]] = []
        self._numbers = itertools.count()
        self._parked: list[Actor] = []
        self._digest = hashlib.sha256()
        self._actors: dict[Actor, None] = {}
        self._main = Actor(Process("simulation"), "main", lambda: None)
        self.current = self._main

    @property
    def digest(self) -> str:
        """Digest of every decision of the scheduler so far."""
        return self._digest.hexdigest()

    def note(self, text: str) -> None:
        """Make ``text`` a part of the digest."""
        self._digest.update(text.encode())

    def spawn(
        self,
        process: Process,
        name: str,
        work: Callable[[], object],
        expected: tuple[type[BaseException], ...] = (),
        delay_seconds: float = 0.0,
    ) -> Actor:
        """Start an actor; errors of the types ``expected`` end it and are no crash."""
        actor = Actor(process, name, work)
        self._actors[actor] = None

        def run() -> None:
            actor.baton.acquire()
            try:
                if process.is_alive:
                    actor.result = work()
            except ProcessKilledError as killed:
                actor.error = killed
            except BaseException as error:  # noqa: BLE001  an actor must hand the baton on, whatever ended it
                actor.error = error
                if process.is_alive and not isinstance(error, expected):
                    self.crashes.append((f"{process.name}/{name} at {self.now:.3f} s", error))
            actor.has_ended = True
            del self._actors[actor]
            self.changed()
            self._next().baton.release()

        actor.wake = self.now + delay_seconds
        self._push(actor, actor.wake)
        threading.Thread(target=run, name=name, daemon=True).start()
        return actor

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the running actor."""
        self.check()
        actor, wake = self.current, self.now + max(0.0, seconds)
        actor.wake = wake
        if (self._heap and self._heap[0][0] <= wake) or actor.process.stopped_until > wake:
            self._push(actor, wake)
            self._switch(actor)
        else:
            self.now = wake
        self.check()

    def wait_for(self, predicate: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        """Park the running actor until ``predicate`` holds or the time is over; return whether it holds."""
        self.check()
        if predicate():
            return True
        actor = self.current
        actor.predicate = predicate
        if timeout_seconds is not None:
            self._push(actor, self.now + max(0.0, timeout_seconds))
        else:
            actor.ticket += 1
        self._parked.append(actor)
        self._switch(actor)
        self.check()
        return predicate()

    def changed(self) -> None:
        """Something changed that parked actors may wait for."""
        for actor in [actor for actor in self._parked if actor.predicate is not None and actor.predicate()]:
            self._unpark(actor)

    def kill(self, process: Process) -> None:
        """SIGKILL: no actor of the process does anything any more."""
        process.is_alive = False
        process.stopped_until = 0.0
        for actor in [actor for actor in self._actors if actor.process is process and actor is not self.current]:
            if actor in self._parked:
                self._unpark(actor)
            else:
                self._push(actor, self.now)
        self.check()

    def resume(self, process: Process) -> None:
        """SIGCONT: the actors of the process go on, each not before it would have."""
        process.stopped_until = 0.0
        for actor in [actor for actor in self._actors if actor.process is process and actor is not self.current]:
            if actor not in self._parked:
                self._push(actor, max(self.now, actor.wake))

    def check(self) -> None:
        """Raise `ProcessKilledError` if the process of the running actor is dead."""
        if not self.current.process.is_alive:
            raise ProcessKilledError

    def run_until(self, predicate: Callable[[], bool], limit_seconds: float, poll_seconds: float = 5.0) -> bool:
        """Let the actors run until ``predicate`` holds or virtual time is at ``limit_seconds``."""
        while not predicate() and self.now < limit_seconds and not self.crashes:
            self._push(self._main, min(limit_seconds, self.now + poll_seconds))
            self._switch(self._main)
        return predicate()

    def close(self) -> None:
        """End all actors."""
        for process in {actor.process: None for actor in self._actors}:
            self.kill(process)
        while self._actors:
            self._push(self._main, self.now)
            self._switch(self._main)

    def _push(self, actor: Actor, wake: float) -> None:
        actor.ticket += 1
        heapq.heappush(self._heap, (wake, self.random.random(), next(self._numbers), actor, actor.ticket))

    def _unpark(self, actor: Actor) -> None:
        self._parked.remove(actor)
        actor.predicate = None
        self._push(actor, self.now)

    def _next(self) -> Actor:
        """The actor that runs next; it becomes the current one."""
        while True:
            wake, _, _, actor, ticket = heapq.heappop(self._heap)
            if ticket != actor.ticket or actor.has_ended:
                continue
            if actor.process.is_alive and actor.process.stopped_until > wake:
                self._push(actor, actor.process.stopped_until)
                continue
            self.now = max(self.now, wake)
            if actor.predicate is not None:  # its time is over
                self._parked.remove(actor)
                actor.predicate = None
            self.switches += 1
            if self.switches == MOST_SWITCHES:
                error = RuntimeError(f"no end after {self.switches:,} switches, at {self.now:.0f} s in {actor.name}")
                self.crashes.append(("simulation", error))
                self._push(actor, self.now)
                actor = self._main
            self._digest.update(b"%d %.6f %s\n" % (self.switches, self.now, actor.name.encode()))
            self.current = actor
            return actor

    def _switch(self, actor: Actor) -> None:
        following = self._next()
        if following is not actor:
            following.baton.release()
            actor.baton.acquire()
