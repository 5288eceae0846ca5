"""Runs the wrapped program: restores its folder, starts it, commits its checkpoints, and exits as it did.

| event | exit code |
|---|---|
| the program ends | its own, or 128 and the signal, once the last complete checkpoint is committed |
| SIGTERM | 75, whatever the program exits with: 0 would say that the work is done |
| another attempt replaces this one | 76; the program is killed, since nothing that it writes counts any more |
"""

import signal
import time
from collections.abc import Callable, Mapping

from tiphys.checkpoint.exec.arrange import CommitSelection
from tiphys.checkpoint.exec.options import ExecOptions
from tiphys.checkpoint.exec.output import ProgramOutput
from tiphys.checkpoint.exec.restore import SET_ASIDE_FOLDER, set_aside
from tiphys.checkpoint.exec.save import BackgroundCommit
from tiphys.checkpoint.exec.store import FileCheckpointStore
from tiphys.checkpoint.exec.watch import FolderWatch
from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import StoreError
from tiphys.launch.processes import DEFAULT_GRACE_SECONDS, NOT_EXECUTABLE, NOT_FOUND, ChildProcess, SignalQueue
from tiphys.protocol import environment
from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL
from tiphys.store.layout import MAX_GLOBAL_STEP

_EXIT_MARGIN_SECONDS = 1.0
_TICK_SECONDS = 0.02
_HURRY_SECONDS = 0.2
"""Time between two scans after SIGTERM."""


class StopRequestedError(Exception):
    """SIGTERM arrived before the program started."""


class ProgramRunner:
    """Runs one program, with its signals, its exit code and the commits of its checkpoints.

    Args:
        options: The command line of ``tiphys-exec``.
        checkpoints: Restores and commits checkpoints.
        signals: Source of the signals to forward.
        stop_signal: Requested by this runner when SIGTERM arrives.
        output: Pipes for the output of the program; None: it writes to the streams of this process.
        grace_seconds: Seconds between SIGTERM and SIGKILL; None for the default of Kubernetes.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        options: ExecOptions,
        checkpoints: FileCheckpointStore,
        signals: SignalQueue,
        stop_signal: StopSignal,
        output: ProgramOutput | None = None,
        *,
        grace_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._checkpoints = checkpoints
        self._signals = signals
        self._grace_seconds = DEFAULT_GRACE_SECONDS if grace_seconds is None else grace_seconds
        self._clock = clock
        self._watch = FolderWatch(options, clock)
        self._background_commit = BackgroundCommit(checkpoints, options.folder, self._watch, clock)
        self._counts_said = False
        self._stop_signal = stop_signal
        self._output = output

    def run(self, environ: Mapping[str, str]) -> int:
        """Restore the folder, run the program to its end, and return the exit code.

        Raises:
            TiphysError: the folder could not be restored, so the program was not started.
        """
        try:
            self._restore_folder()
        except StopRequestedError:
            self._stop_signal.request()
            return self._report_stop("before the program was started")
        # Without this variable a session in the program does nothing; it would commit beside this wrapper.
        environ = {name: value for name, value in environ.items() if name != environment.LINEAGE}
        try:
            file_actions = self._output.file_actions if self._output else ()
            child = ChildProcess(self._options.command, environ, file_actions, on_left=self._watch.scan)
        except OSError as error:
            log_message(f"{self._options.command[0]} cannot be started: {error.strerror}")
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        if self._output is not None:
            self._output.release()
        while child.exit_code is None and self._background_commit.fenced is None:
            self._wait_and_act(child)
        if self._output is not None and child.exit_code is not None:
            self._output.join()
        if self._background_commit.fenced is None:
            self._flush(child)
        return self._exit_code(child)

    def _restore_folder(self) -> None:
        folder = self._options.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the folder {folder} cannot be created: {error.strerror}; check --dir") from error
        leftovers = self._watch.find_leftovers()
        obsolete_names = [*leftovers, *self._watch.find_checkpoints()]
        index = self._checkpoints.restore(folder, obsolete_names, self._raise_if_stopping)
        try:
            if index is None and leftovers:
                set_aside(folder, leftovers)
                log_message(
                    f"an attempt that committed nothing left {len(leftovers)} files in {folder}, such as "
                    f"{leftovers[0]}; they may be incomplete, so they are in {SET_ASIDE_FOLDER} now"
                )
            self._watch.begin(index.entries if index else ())
        except OSError as error:
            raise StoreError(f"{folder} cannot be prepared: {error.strerror}; check permissions there") from error

    def _raise_if_stopping(self) -> None:
        if self._signals.is_stop_requested:
            raise StopRequestedError

    def _wait_and_act(self, child: ChildProcess) -> None:
        """Wait for a signal or the next scan; then kill a program that overstays SIGTERM, or start a due commit."""
        # How processes that SIGTERM ends, or a program leaves behind, have left their files shows in scans until then.
        self._forward_signals(child, min(self._options.interval_seconds, max(child.look_seconds, _HURRY_SECONDS)))
        if child.exit_code is not None:
            return
        if self._stop_signal.is_requested and self._seconds_left() <= self._reserve_seconds():
            log_message("the program did not end in time after SIGTERM, so it is killed")
            self._watch.scan()
            child.send_signal(signal.SIGKILL)
            return
        self._watch.scan()
        if self._background_commit.is_ready:
            self._commit(self._watch.select(self._clock()))
            self._report_hindrance()

    def _forward_signals(self, child: ChildProcess, seconds: float) -> None:
        number = self._signals.wait_next(seconds)
        while number is not None:
            if number == signal.SIGTERM:
                self._stop_signal.request()
                if child.exit_code is None:
                    self._watch.scan()  # the program may end at once: a file that is closed now is complete
            if number != signal.SIGCHLD:
                child.send_signal(number)
            number = self._signals.wait_next(0.0)
        child.reap()

    def _commit(self, selection: CommitSelection | None) -> bool:
        """Start to commit ``selection``; return whether there is one."""
        if selection is None:
            return False
        checkpoint, base = selection.checkpoint, self._checkpoints.committer.base_checkpoint
        step = checkpoint.step
        if step is None or step > MAX_GLOBAL_STEP or (base is not None and step <= base.global_step):
            count = base.global_step + 1 if base else 1
            if step is not None and not self._counts_said:
                self._counts_said = True
                why = f"above {MAX_GLOBAL_STEP}" if step > MAX_GLOBAL_STEP else "not above the newest commit's"
                log_message(f"the number {step} of {checkpoint.name} is {why}, so it is committed as step {count}")
            step = count
        self._background_commit.start(selection, step, "sigterm" if self._stop_signal.is_requested else "due")
        return True

    def _flush(self, child: ChildProcess) -> None:
        """Commit the checkpoint that was complete when the program ended; after SIGTERM only while time is left."""
        ended_at, ended_wall_ns = self._clock(), time.time_ns()
        self._wait_for_saving(child)
        self._watch.scan(ended_wall_ns)
        if self._background_commit.is_busy:
            return
        how = {"has_finished": child.has_finished, "has_killed": child.has_killed}
        if self._commit(self._watch.select(ended_at, has_ended=True, **how)):
            self._wait_for_saving(child)
        self._report_hindrance(has_ended=True)
        if child.exit_code == 0 and not self._stop_signal.is_requested:
            self._watch.end()

    def _report_hindrance(self, *, has_ended: bool = False) -> None:
        if why := self._watch.report_hindrance(has_ended=has_ended):
            self._checkpoints.report_hindrance(why)

    def _wait_for_saving(self, child: ChildProcess) -> None:
        while self._background_commit.is_busy and not (self._stop_signal.is_requested and self._seconds_left() <= 0):
            self._forward_signals(child, _TICK_SECONDS)
        if self._background_commit.is_busy:
            log_message("the grace period ended before the last checkpoint was stored; set a longer grace for the step")

    def _exit_code(self, child: ChildProcess) -> int:
        if self._background_commit.fenced is not None:
            log_message(f"{self._background_commit.fenced}; the program is killed")
            child.send_signal(signal.SIGKILL)
            while child.exit_code is None:
                self._forward_signals(child, 1.0)
            return EX_FENCED
        self._forward_signals(child, 0.0)
        assert child.exit_code is not None  # the loop in `run` ends only after the program
        return (
            self._report_stop(f"the program ended with {child.exit_code}")
            if self._stop_signal.is_requested
            else child.exit_code
        )

    def _report_stop(self, how: str) -> int:
        """Record what was committed within the grace period; return the exit code that requests another attempt."""
        base, seconds_left = self._checkpoints.committer.base_checkpoint, self._seconds_left()
        spent = self._grace_seconds - _EXIT_MARGIN_SECONDS - seconds_left
        have = self._checkpoints.committer.newest
        message = f"stopped by SIGTERM {spent:.1f} s ago (grace period {self._grace_seconds:g} s), {how}; {have}"
        event = self._checkpoints.event_log.make_event(
            "checkpoint.preempted",
            message,
            choice="files",
            committed=str(base) if base else None,
            seconds=round(spent, 3),
            spare_seconds=round(seconds_left + _EXIT_MARGIN_SECONDS, 3),
        )
        self._checkpoints.event_log.record([event], store=seconds_left > 0)
        return EX_TEMPFAIL

    def _seconds_left(self) -> float:
        """Seconds until this wrapper must begin to exit; the whole period before SIGTERM."""
        now = self._clock()
        requested_at = self._stop_signal.requested_at
        waited = 0.0 if requested_at is None else now - requested_at
        return self._grace_seconds - _EXIT_MARGIN_SECONDS - waited

    def _reserve_seconds(self) -> float:
        """Seconds of the grace period to reserve for a last commit, estimated from the duration of the previous one."""
        return min(max(1.0, 1.5 * self._background_commit.last_commit_seconds), self._grace_seconds / 2)
