"""Starts the programs of a gang again in their pods: those of all members, as one incarnation, or none.

The launchers of the members meet in storage, below ``gang-restarts/<step>/<attempt>/<incarnation>/``:

| object | written by | says |
|---|---|---|
| ``request.json`` | the first launcher whose program died | that all are to start this incarnation, and why |
| ``ready/<member>`` | each launcher, once no process of its program is left | whether it had committed, or is gone |
| ``decision.json`` | that of the host, or one that cannot go on | whether they are started, and where they meet |

The host is the first member. An elastic gang that has lost it goes on without it: a host that is asked to end writes
the request when its program has ended, and one that takes no connections is missed by the others
(`tiphys.launch.rendezvous`). The first of the members that are ready decides then, and is the host from then on.

A member that comes later into an elastic gang writes its number below ``gang-restarts/<step>/<attempt>/joined/``, and
starts its program as the incarnation that the others run.

Each object is created once. The first decision counts for all, so no member starts alone, and none while a process of
the incarnation before is left anywhere. A member that is not ready in time, is asked to end, or whose program failed
for a reason that no new process cures, decides against it. Then all launchers end with the exit code of that program,
and the attempt ends by its cause.

While the program runs, its launcher reads one key, that of the next request, at most twice a second.
"""

import contextlib
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tiphys.errors import ObjectExistsError, TiphysError
from tiphys.launch.member_files import member_number
from tiphys.launch.processes import SignalQueue, log_line
from tiphys.launch.rendezvous import ENDPOINT, HOST_LOST_SECONDS, PORT_VARIABLES, Rendezvous
from tiphys.launch.restart import FINAL_CODES, ProgramEnd, choose_exit_code, choose_restart_cause
from tiphys.protocol import environment
from tiphys.records import Cause, GangRestartDecision, GangRestartRequest, utc_now
from tiphys.store import RunLayout, Store, claim_record, find_record, open_store
from tiphys.store.incarnations import gang_decision_key, gang_restart_prefix, joined_members_prefix
from tiphys.threads import start_background_thread

_POLL_SECONDS, _POLLS_PER_SECOND = 0.5, 400.0
"""Shortest time between two polls of a member, and how many polls all members make at most."""
READY_SECONDS = 30.0
"""How long the host waits until all are ready. A process with much pinned memory takes seconds to end."""
_DECISION_SECONDS, _STORE_SECONDS = 45.0, 75.0
"""How long the others wait for a decision, and for storage that does not answer."""
_OWN_END_SECONDS = 5.0
"""Time for a program whose session has failed to store its crash report, before it is ended."""
_PEER_SECONDS = 2.0
"""Time for a request of another member, after a program whose exit code alone says that it failed."""
_PORTS = 100
_COMMITTED, _GONE = "-committed", "-gone"


class GangMember:
    """The part of one launcher in the restarts of its gang.

    Args:
        environ: Variables of the member, as compile wrote them.
        signals: Those of the launcher.
        store: Store of the run; None to open the one that ``environ`` names, once it is needed.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        signals: SignalQueue,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environ, self.signals, self._given_store, self.clock = environ, signals, store, clock
        self.run, self.step = environ[environment.RUN], environ[environment.STEP]
        self.attempt = int(environ[environment.ATTEMPT])
        self.number = member_number(environ)
        self.members = int(environ[environment.MEMBERS])
        """Number of members at the start of the gang."""
        self.awaited = set(range(self.members))
        """The members that are to be ready: of an elastic gang those of the last time, and those that came since."""
        self._joined = set[int]()
        self.least = int(environ.get(environment.ELASTIC, "").partition(":")[0] or self.members)
        self.poll_seconds = max(_POLL_SECONDS, self.members / _POLLS_PER_SECOND)
        self.rendezvous = Rendezvous(environ, self.number, 4 * self.poll_seconds, clock)
        self._is_failure_logged = False

    @functools.cached_property
    def store(self) -> Store:
        """Store of the run."""
        return self._given_store or open_store(self._environ[environment.STORE], must_exist=True)

    @property
    def is_host(self) -> bool:
        """Whether this member decides, and all meet there."""
        return self.number == self.rendezvous.host

    def prefix(self, incarnation: int) -> str:
        """Prefix of the objects of one restart."""
        return gang_restart_prefix(RunLayout(self.run), self.step, self.attempt, incarnation)

    def find_request(self, incarnation: int) -> GangRestartRequest | None:
        """The request for ``incarnation``; None if there is none, or storage does not answer, which is logged once."""
        try:
            return find_record(self.store, f"{self.prefix(incarnation)}request.json", GangRestartRequest)
        except TiphysError as error:
            if not self._is_failure_logged:
                self._is_failure_logged = True
                log_line(f"this member cannot see whether another one asks for a restart, and tries again: {error}")
            return None

    def find_decision(self, incarnation: int) -> GangRestartDecision | None:
        """The decision about ``incarnation``; None while there is none. Raises `StoreError` without an answer."""
        key = gang_decision_key(RunLayout(self.run), self.step, self.attempt, incarnation)
        return find_record(self.store, key, GangRestartDecision)

    def decide(
        self, end: ProgramEnd, allowed: Collection[str], incarnation: int, *, lacked_memory: bool
    ) -> int | tuple[str, dict[str, str]]:
        """As `tiphys.launch.restart.decide_alone`, together with all other members."""
        following = incarnation + 1
        if self.signals.is_stop_requested:
            if end.code == 0:
                self.refuse(following, 0, "it is complete")
            elif end.was_ended or self.least < self.members:
                self.leave(following)
            return environment.EX_TEMPFAIL if end.was_ended else end.code
        # Whether the gang has committed is known once all members are ready.
        alone = ProgramEnd(end.code, end.failures, has_committed=True, was_ended=end.was_ended)
        cause = choose_restart_cause(alone, allowed, lacked_memory=lacked_memory)
        misses_host = end.code not in FINAL_CODES and self.rendezvous.misses_host()
        request = (
            self._ask(following, end.code, cause)
            if cause and not misses_host
            else self._await_request(following, end, misses_host=misses_host)
        )
        code = choose_exit_code(end, allowed, incarnation=incarnation, lacked_memory=lacked_memory)
        if request is None:
            self.refuse(following, code, f"its program ended with {code}")  # one that dies later need not wait for it
            return code
        if not cause and not may_follow(end, allowed, lacked_memory=lacked_memory):
            self.refuse(following, code, f"its program ended with {code}, which a new process does not cure")
            return code
        return self._agree(GangRestart(self, request, has_committed=end.has_committed))

    def join(self) -> dict[str, str]:
        """The variables of the incarnation that the others run, if this member came after the start of the gang.

        Raises:
            StoreError: storage does not answer.
        """
        layout, variables, incarnation = RunLayout(self.run), dict[str, str](), 1
        if self.number < self.members:
            return variables
        with contextlib.suppress(ObjectExistsError):
            self.store.create(f"{joined_members_prefix(layout, self.step, self.attempt)}{self.number:05d}", b"")
        # A restart that is decided after this one has looked ends its program as that of the others (`RequestWatch`).
        while True:
            incarnation += 1
            decision = self.find_decision(incarnation)
            if decision is None or decision.exit_code is not None:
                return variables
            variables = {environment.INCARNATION: str(incarnation), **self.rendezvous.move(decision)}

    def find_awaited(self) -> set[int]:
        """Add the members that came since to `awaited`, and return it."""
        if environment.ELASTIC in self._environ:
            joined = self._list_joined()
            self.awaited |= joined - self._joined
            self._joined = joined
        return self.awaited

    def note_ready(self, numbers: Collection[int]) -> None:
        """Await these members the next time: the others are lost."""
        self.awaited = set(numbers)

    def _list_joined(self) -> set[int]:
        folder = joined_members_prefix(RunLayout(self.run), self.step, self.attempt)
        return _parse_numbers(info.key.removeprefix(folder) for info in self.store.list(folder))

    def watch(self, incarnation: int) -> "RequestWatch":
        """Begin to look for a request of another member to start ``incarnation``."""
        return RequestWatch(self, incarnation)

    def refuse(self, incarnation: int, code: int, reason: str) -> None:
        """Decide that no member starts ``incarnation``, or, if it can be spared, waits for this one; never raises."""
        try:
            if self._is_spared() and not self.is_host:
                self._note_gone(incarnation)
            else:
                self.claim_decision(incarnation, exit_code=code, reason=f"member {self.number}: {reason}")
        except TiphysError as error:
            log_line(f"the other members wait for this one, because storage does not take its decision: {error}")

    def leave(self, incarnation: int) -> None:
        """`refuse` because this member was asked to end; the host of an elastic gang asks the others to go on."""
        if not (self.is_host and self._is_spared()):
            self.refuse(incarnation, environment.EX_TEMPFAIL, "it was asked to end")
            return
        try:
            self._note_gone(incarnation)
        except TiphysError as error:
            log_line(f"the other members wait for this one, because storage does not say that it has left: {error}")
        self._ask(incarnation, environment.EX_TEMPFAIL, Cause.PREEMPTION, is_gone=True)

    def _is_spared(self) -> bool:
        return self.least < self.members or (environment.ELASTIC in self._environ and bool(self._list_joined()))

    def _note_gone(self, incarnation: int) -> None:
        with contextlib.suppress(ObjectExistsError):  # the reply was lost
            self.store.create(f"{self.prefix(incarnation)}ready/{self.number:05d}{_GONE}", b"")

    def ask_without_host(self, incarnation: int) -> GangRestartRequest | None:
        """Ask that the members start ``incarnation`` without the host, which is lost; return what all answer.

        Nothing is asked of a host that has decided for all, as one whose program is complete.
        """
        with contextlib.suppress(TiphysError):
            if self.find_decision(incarnation):
                return None
        log_line(f"member {self.rendezvous.host}, at which the others meet, takes no connections")
        return self._ask(incarnation, 128 + signal.SIGKILL, Cause.INFRASTRUCTURE, is_gone=True)

    def claim_decision(
        self, incarnation: int, *, exit_code: int | None = None, reason: str = "", port: int | None = None
    ) -> GangRestartDecision:
        """Create the decision unless there is one; return the one that counts."""
        decision = GangRestartDecision(
            **self._identity(incarnation), exit_code=exit_code, reason=reason, port=port, host=self.number
        )
        key = gang_decision_key(RunLayout(self.run), self.step, self.attempt, incarnation)
        return claim_record(self.store, key, decision).record

    def _identity(self, incarnation: int) -> dict[str, Any]:
        return {"run": self.run, "step": self.step, "attempt": self.attempt, "incarnation": incarnation}

    def find_port(self) -> int | None:
        """A free port for the host to listen on, that of its variables if possible; None if they name none.

        Connections of the program before may keep its port from one that does not ask for reuse (TIME_WAIT). Only every
        other port is tried: of its range for both, Linux gives the odd ones to listeners and the even ones to
        connections, so a member that connects to an even one before the host listens may reach itself.
        """
        named = [self._environ.get(name, "") for name in PORT_VARIABLES]
        text = next(filter(None, named), self._environ.get(ENDPOINT, "").rpartition(":")[2])
        if not text.isdecimal():
            return None
        for port in range(int(text), min(int(text) + 2 * _PORTS, 1 << 16), 2):
            try:
                with socket.socket() as listener:
                    listener.bind(("", port))
                    return port
            except OSError:
                continue
        return int(text)

    def _await_request(self, incarnation: int, end: ProgramEnd, *, misses_host: bool) -> GangRestartRequest | None:
        """The request of another member, for which a program that failed without a word may be early.

        torchrun fails without its rendezvous. If the launcher of its host says nothing either, this member asks.
        """
        is_silent = end.code not in FINAL_CODES and not end.failures
        deadline = self.clock() + (HOST_LOST_SECONDS if misses_host else _PEER_SECONDS if is_silent else 0.0)
        while (request := self.find_request(incarnation)) is None and self.clock() < deadline:
            with contextlib.suppress(TiphysError):
                if misses_host and self.find_decision(incarnation):
                    return None
            self.signals.wait_next(self.poll_seconds / 2)
            if self.signals.is_stop_requested:
                return None
        return request or (self.ask_without_host(incarnation) if misses_host else None)

    def _ask(self, incarnation: int, code: int, cause: str, *, is_gone: bool = False) -> GangRestartRequest | None:
        request = GangRestartRequest(
            **self._identity(incarnation),
            cause=Cause(cause),
            exit_code=code,
            ended_at=utc_now(),
            member=self.rendezvous.host if is_gone else self.number,
            is_gone=is_gone,
        )
        try:
            return claim_record(self.store, f"{self.prefix(incarnation)}request.json", request).record
        except TiphysError as error:
            log_line(f"the other members cannot be asked to start again with this one: {error}")
            return self.find_request(incarnation)

    def _agree(self, restart: "GangRestart") -> int | tuple[str, dict[str, str]]:
        pause = self.poll_seconds / 10
        while (decision := restart.poll()) is None:
            self.signals.wait_next(pause)
            if self.signals.is_stop_requested:
                self.leave(restart.request.incarnation)
                return environment.EX_TEMPFAIL
            pause = min(1.5 * pause, self.poll_seconds)
        request = restart.request
        subject = "" if request.is_gone else "the program of "
        verb = "is gone" if request.is_gone else f"ended with {request.exit_code}"
        why = f"{subject}member {request.member} {verb} ({request.cause.display_name})"
        if decision.exit_code is not None:
            log_line(f"{why}; the gang gets new pods, because {decision.reason}")
            return (
                decision.exit_code or request.exit_code or 1
            )  # a member that was complete does not complete the others
        after = f"{request.cause} {request.exit_code} {request.ended_at.timestamp():.3f}"
        return why, {environment.RESTARTED_AFTER: after, **self.rendezvous.move(decision)}


def _parse_numbers(names: Iterable[str]) -> set[int]:
    return {int(name) for name in names if name.isascii() and name.isdecimal()}


def may_follow(end: ProgramEnd, allowed: Collection[str], *, lacked_memory: bool) -> bool:
    """Whether a member may start its program again because another member asks. Pure.

    A program whose sessions say nothing has failed because the other one did; one that ended well begins again, too.
    """
    is_final = end.code in FINAL_CODES and end.code != 0 and not end.was_ended
    return not is_final and not lacked_memory and set(end.failures) <= set(allowed)


class GangRestart:
    """One restart as one member sees it, from the end of its program to the decision.

    Args:
        member: The member.
        request: What all members answer.
        has_committed: Whether the program of this member has committed a checkpoint.
    """

    def __init__(self, member: GangMember, request: GangRestartRequest, *, has_committed: bool) -> None:
        self._member, self.request = member, request
        self._prefix = member.prefix(request.incarnation)
        self._own_key = f"{self._prefix}ready/{member.number:05d}{_COMMITTED if has_committed else ''}"
        self._is_ready = False
        self._began_at = member.clock()

    def poll(self) -> GangRestartDecision | None:
        """Do what is due, and return the decision; None while there is none."""
        try:
            return self._poll()
        except TiphysError as error:
            if self._waited < _STORE_SECONDS:
                return None
            # The end of this pod ends the gang, whatever the others have decided.
            return self._refusal(f"storage does not answer: {error}")

    @property
    def _waited(self) -> float:
        return self._member.clock() - self._began_at

    def _poll(self) -> GangRestartDecision | None:
        member, host, incarnation = self._member, self._member.rendezvous.host, self.request.incarnation
        if not self._is_ready:
            with contextlib.suppress(ObjectExistsError):  # the reply was lost
                member.store.create(self._own_key, b"")
            self._is_ready = True
        if decision := member.find_decision(incarnation):
            return decision
        is_late = self._waited >= READY_SECONDS
        if member.is_host or self.request.is_gone or is_late:
            folder = f"{self._prefix}ready/"
            ready = [info.key.removeprefix(folder) for info in member.store.list(folder)]
            gone = _parse_numbers(name.removesuffix(_GONE) for name in ready if name.endswith(_GONE))
            numbers = _parse_numbers(name.removesuffix(_COMMITTED) for name in ready) - gone
            if self.request.is_gone and self._waited >= HOST_LOST_SECONDS:
                gone.add(self.request.member)
            # torchrun gives the first ranks to the first node by name, so its rendezvous is best there.
            first = host if host in numbers else min(numbers, key=str, default=None)
            if first == member.number and (member.find_awaited() <= numbers | gone or is_late):
                return self._decide(numbers, has_committed=any(name.endswith(_COMMITTED) for name in ready))
        return self._refuse("no member has decided") if self._waited >= _DECISION_SECONDS else None

    def _decide(self, numbers: Collection[int], *, has_committed: bool) -> GangRestartDecision:
        member = self._member
        if len(numbers) < member.least:
            awaited = len(member.awaited)
            return self._refuse(f"{len(numbers)} of {awaited} members were ready after {self._waited:.0f} s")
        # One that is gone cannot say it, and costs the gang a member: so such restarts come to an end without a commit.
        if not has_committed and member.rendezvous.host in numbers:
            return self._refuse("no checkpoint was committed since its programs were started")
        member.note_ready(numbers)
        return member.claim_decision(self.request.incarnation, port=member.find_port())

    def _refuse(self, reason: str) -> GangRestartDecision:
        code = self.request.exit_code
        return self._member.claim_decision(self.request.incarnation, exit_code=code, reason=reason)

    def _refusal(self, reason: str) -> GangRestartDecision:
        fields = self.request.model_dump(include={"run", "step", "attempt", "incarnation", "exit_code"})
        return GangRestartDecision(**fields, reason=reason)


class RequestWatch:
    """Looks for the request of another member while the program of this one runs, on a thread of its own.

    Args:
        member: The member.
        incarnation: That which another member may ask for.
    """

    def __init__(self, member: GangMember, incarnation: int) -> None:
        self._member, self._incarnation = member, incarnation
        self._seen_at: float | None = None
        self.has_ended_program = False
        self._is_closed = threading.Event()
        self._thread = start_background_thread(self._look)
        if self._thread is None:
            log_line("no thread can be started, so this member learns of another one's end by its own")

    @property
    def look_seconds(self) -> float:
        """How long the launcher may wait for a signal before it calls `wants_end` again."""
        return _OWN_END_SECONDS / 10 if self._seen_at is not None else threading.TIMEOUT_MAX

    def wants_end(self, *, has_failed: bool) -> bool:
        """Whether the program is to be ended now; one of whose sessions ``has_failed`` gets time to end itself."""
        if self._seen_at is None or (has_failed and self._member.clock() - self._seen_at < _OWN_END_SECONDS):
            return False
        if not self.has_ended_program:
            self.has_ended_program = True
            log_line("another member asks that all start their programs again, so this one is ended")
        return True

    def close(self) -> None:
        """End the thread: there is none while the launcher starts a program."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(_OWN_END_SECONDS)

    def _look(self) -> None:
        member = self._member
        while not self._is_closed.wait(member.poll_seconds):
            request = member.find_request(self._incarnation)
            if request is None and member.rendezvous.is_host_lost():
                request = member.ask_without_host(self._incarnation)
            if request is not None:
                if member.signals.is_stop_requested:
                    member.leave(self._incarnation)
                self._seen_at = member.clock()
                os.kill(os.getpid(), signal.SIGCHLD)  # wakes the launcher, which waits for signals
                return
