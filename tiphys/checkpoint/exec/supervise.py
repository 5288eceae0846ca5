"""The life of a wrapped program: fill the folder, start it, watch, and end as it did.

| what happens | exit code |
|---|---|
| the program ends | its own, or 128 and the signal, once the last whole checkpoint is committed |
| SIGTERM | 75, whatever the program makes of it: 0 would say that the work is done |
| another attempt took this one's place | 76; the program is killed, since nothing of it counts any more |

The program as a child: it gets every signal that we get, and we pass on how it ended.

It stays in our process group, as a shell's child does, so that whoever ends the
group ends both. Signals are not handled but waited for: none is lost between
two looks, and no handler runs while bytes travel.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from tiphys.checkpoint.exec.detect import Found, Watch, checkpoints_in, global_step
from tiphys.checkpoint.exec.files import look
from tiphys.checkpoint.exec.options import Options
from tiphys.checkpoint.exec.save import Saving
from tiphys.checkpoint.exec.store import Keeper
from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import StoreError
from tiphys.protocol import environment
from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a shell for a program that it cannot start."""

FORWARDED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
)
_WAITED_FOR = FORWARDED | {signal.SIGCHLD}
# Python ignores these, and what is ignored would stay so in the program.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Signals:
    """Within the block, signals wait until they are asked for. Open it before any thread is started."""

    def __enter__(self) -> "Signals":
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.next(0.0) is not None:
            pass  # nobody is left to whom it could matter
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def next(self, seconds: float) -> int | None:
        """The next signal; None if none comes within ``seconds``."""
        found = signal.sigtimedwait(_WAITED_FOR, max(0.0, seconds))
        return found.si_signo if found else None

    @property
    def told_to_stop(self) -> bool:
        """Whether SIGTERM waits; any thread may ask."""
        return signal.SIGTERM in signal.sigpending()


class Child:
    """A started program. ``code`` is its exit code as a shell has it, None while it runs."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Raises OSError if there is no such program."""
        self.code: int | None = None
        self.signalled = False
        """Whether a signal ended it, so that it may have been in the middle of anything."""
        self._pid = os.posix_spawnp(
            command[0], list(command), environ, setsigmask=(), setsigdef=(*_WAITED_FOR, *_IGNORED_BY_PYTHON)
        )

    def send(self, number: int) -> None:
        """Pass a signal on, unless the program has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def reap(self) -> None:
        """Take note of children that have ended; as process 1 also of those that others left behind."""
        anyone = os.getpid() == 1
        while self.code is None or anyone:
            try:
                pid, status = os.waitpid(-1 if anyone else self._pid, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._note(status)

    def _note(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        self.signalled = code < 0
        self.code = 128 - code if code < 0 else code


_GRACE_SECONDS = 30.0
"""What Kubernetes gives where nobody said more."""
_LEAVING_SECONDS = 1.0
_TICK_SECONDS = 0.02


class StopRequestedError(Exception):
    """SIGTERM came before the program was started."""


class Loop:
    """One run of one program."""

    def __init__(
        self,
        options: Options,
        keeper: Keeper,
        signals: Signals,
        *,
        grace_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._keeper = keeper
        self._signals = signals
        self._grace_seconds = _GRACE_SECONDS if grace_seconds is None else grace_seconds
        self._clock = clock
        self._watch = Watch(options)
        self._saving = Saving(keeper, options, clock)
        self._stop_asked_at: float | None = None
        self._started = False

    @property
    def stopping(self) -> bool:
        """Whether SIGTERM has come."""
        return self._stop_asked_at is not None

    def run(self, environ: Mapping[str, str]) -> int:
        """Restore, run the program to its end, and answer the exit code.

        Raises:
            TiphysError: the folder could not be filled, so the program was not started.
        """
        try:
            self._fill()
        except StopRequestedError:
            self._stop_asked_at = self._clock()
            return self._told_to_stop("before the program was started")
        # The sessions of a program that knows Tiphys would commit what this wrapper commits.
        environ = {name: value for name, value in environ.items() if name != environment.LINEAGE}
        try:
            child = Child(self._options.command, environ)
        except OSError as error:
            tell(f"{self._options.command[0]} cannot be started: {error.strerror}")
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        while child.code is None and self._saving.fenced is None:
            self._turn(child)
        if self._saving.fenced is None:
            self._flush(child)
        return self._exit_code(child)

    def _fill(self) -> None:
        folder = self._options.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the folder {folder} cannot be made: {error.strerror}; check --dir") from error
        listing = look(folder, self._options.ignored)
        found = checkpoints_in(listing, self._options)
        whole = sorted({path.partition("/")[0] for path in listing})
        self._keeper.restore(folder, [one.name for one in found] if self._options.checkpoint else whole, self._go_on)
        # What is there before the program has begun is none of its doing.
        self._watch.settle(checkpoints_in(look(folder, self._options.ignored), self._options))

    def _go_on(self) -> None:
        if self._signals.told_to_stop:
            raise StopRequestedError

    def _turn(self, child: Child) -> None:
        """Wait for a signal or for the next look, and do what is to be done."""
        self._pass_on(child, self._options.interval_seconds)
        if child.code is not None:
            return
        if self.stopping and self._seconds_left() <= self._reserve_seconds():
            tell("the program did not end in time after SIGTERM, and is killed")
            child.send(signal.SIGKILL)
            return
        self._look()
        if self._saving.ready:
            self._commit_newest(self._watch.whole(self._clock()))

    def _pass_on(self, child: Child, seconds: float) -> None:
        number = self._signals.next(seconds)
        while number is not None:
            if number == signal.SIGTERM and not self.stopping:
                self._stop_asked_at = self._clock()
            if number != signal.SIGCHLD:
                child.send(number)
            number = self._signals.next(0.0)
        child.reap()

    def _look(self) -> None:
        found = checkpoints_in(look(self._options.folder, self._options.ignored), self._options)
        self._watch.observe(found, self._clock())

    def _commit_newest(self, whole: list[Found]) -> bool:
        """Begin to commit the newest of ``whole``, if there is any; the others it makes superfluous."""
        if not whole:
            return False
        *older, newest = whole
        base = self._keeper.base
        after = base.global_step if base else 0
        step = global_step(newest, self._options.step_from) if self._options.step_from else after + 1
        if step is None or step <= after:
            self._watch.settle(whole)
            why = "has no global step in its name" if step is None else f"is of step {step}"
            tell(f"{newest.name or self._options.folder} {why}, and is not committed; the newest is step {after}")
            return False
        self._watch.settle(older)
        reason = "sigterm" if self.stopping else "due"
        self._saving.start(newest, step, reason, lambda found: self._watch.settle([found]))
        return True

    def _flush(self, child: Child) -> None:
        """Commit what the program had finished when it ended; after SIGTERM only while there is time."""
        # It may have died while it wrote, unless it says that it has not.
        finished = child.code in (0, EX_TEMPFAIL) and not child.signalled
        ended_at = self._clock()
        self._wait_for_saving(child)
        self._look()
        if not self._saving.busy and self._commit_newest(self._watch.whole(ended_at, ended=True, finished=finished)):
            self._wait_for_saving(child)

    def _wait_for_saving(self, child: Child) -> None:
        while self._saving.busy and not (self.stopping and self._seconds_left() <= 0):
            self._pass_on(child, _TICK_SECONDS)

    def _exit_code(self, child: Child) -> int:
        if self._saving.fenced is not None:
            tell(f"{self._saving.fenced}; the program is killed")
            child.send(signal.SIGKILL)
            while child.code is None:
                self._pass_on(child, 1.0)
            return EX_FENCED
        self._pass_on(child, 0.0)
        assert child.code is not None  # the loop ends no earlier
        return self._told_to_stop(f"the program ended with {child.code}") if self.stopping else child.code

    def _told_to_stop(self, how: str) -> int:
        """Report on the landing, and ask to be tried again."""
        base, left = self._keeper.base, self._seconds_left()
        spent = self._grace_seconds - _LEAVING_SECONDS - left
        have = f"the newest checkpoint is {base.words}" if base else "no checkpoint exists yet"
        message = f"told to stop (SIGTERM) {spent:.1f} s of {self._grace_seconds:g} s ago, {how}; {have}"
        event = self._keeper.journal.event(
            "checkpoint.preempted",
            message,
            choice="files",
            committed=str(base) if base else None,
            seconds=round(spent, 3),
            spare_seconds=round(left + _LEAVING_SECONDS, 3),
        )
        self._keeper.journal.record([event], store=left > 0)
        return EX_TEMPFAIL

    def _seconds_left(self) -> float:
        """Until we must begin to leave, once SIGTERM has come."""
        asked = self._clock() if self._stop_asked_at is None else self._stop_asked_at
        return self._grace_seconds - _LEAVING_SECONDS - (self._clock() - asked)

    def _reserve_seconds(self) -> float:
        """Of the grace period, for a commit after the program has ended; judged by the last one."""
        return min(max(1.0, 1.5 * self._saving.last_seconds), self._grace_seconds / 2)
