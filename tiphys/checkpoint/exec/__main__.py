"""The program ``tiphys-exec``, also ``python -m tiphys.checkpoint.exec``.

It wires the parts together inside a training step; outside of Tiphys it only
executes the program.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiphys.checkpoint.exec.options import INSTALL_OPTION, ExecOptions, parse_options
from tiphys.checkpoint.exec.output import open_program_output
from tiphys.checkpoint.exec.runtime import install_runtime
from tiphys.checkpoint.exec.store import FileCheckpointStore
from tiphys.checkpoint.exec.supervise import ProgramRunner
from tiphys.checkpoint.lifecycle.incarnation import record_incarnation
from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.settings import CheckpointSettings, explain_no_checkpoints, open_stores
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.checkpoint.telemetry.metrics import NoMetrics, open_metrics
from tiphys.errors import FencedError, StoreError, TiphysError, UsageError, report_error
from tiphys.launch.processes import NOT_EXECUTABLE, NOT_FOUND, SignalQueue
from tiphys.launch.restart import ProgramEnd, restart_while_useful
from tiphys.protocol.environment import EX_FENCED, EX_UNAVAILABLE, SPARE
from tiphys.store import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the program; return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if len(words) == 2 and words[0] == INSTALL_OPTION:
            install_runtime(Path(words[1]))
            return 0
        options = parse_options(words)
        settings = CheckpointSettings.from_environment(os.environ)
        if settings is None:
            log_message(explain_no_checkpoints(os.environ))
            return _exec_program(options)
        return _run_wrapped(options, settings)
    except FencedError as error:
        return report_error(error, EX_FENCED)
    except StoreError as error:
        return report_error(error, EX_UNAVAILABLE)
    except TiphysError as error:
        return report_error(error, error.exit_code)


def _run_wrapped(options: ExecOptions, settings: CheckpointSettings) -> int:
    if (rank := os.environ.get("RANK") or "0") != "0":
        raise UsageError(
            f"tiphys-exec was started in rank {rank}, but one per attempt watches the folder; put it before the "
            "launcher, as in: tiphys-exec --dir /ckpt -- torchrun train.py"
        )
    with SignalQueue() as signals:
        if os.environ.get(SPARE) == "on":
            log_message("no spare: tiphys-exec does not know what the program imports; drop spare=True")
        metrics = open_metrics(os.environ, settings.save_every.longest_seconds)
        stop_signal, stores = StopSignal(time.monotonic), open_stores(settings)
        try:
            return restart_while_useful(
                lambda environ: _run_once(options, environ, stores, metrics, signals, stop_signal), os.environ, signals
            )
        finally:
            metrics.close()


def _run_once(
    options: ExecOptions,
    environ: Mapping[str, str],
    stores: tuple[Store, Store],
    metrics: NoMetrics,
    signals: SignalQueue,
    stop_signal: StopSignal,
) -> ProgramEnd:
    """Run one incarnation of the program, with what belongs to it alone."""
    run_store, store = stores
    settings = CheckpointSettings.from_environment(environ)
    assert settings is not None  # `main` has read them
    checkpoints = FileCheckpointStore(
        settings, os.environ, run_store=run_store, store=store, metrics=metrics, stop_signal=stop_signal
    )
    record_incarnation(run_store, settings, environ, checkpoints.event_log)
    output = open_program_output(run_store, settings, os.environ)
    runner = ProgramRunner(options, checkpoints, signals, stop_signal, output, grace_seconds=settings.grace_seconds)
    try:
        code = runner.run(environ)
        return ProgramEnd(code, has_committed=checkpoints.last_committed is not None)
    finally:
        if output is not None:
            output.close(hurried=stop_signal.is_requested)
        checkpoints.close()


def _exec_program(options: ExecOptions) -> int:
    """Replace this process by the program: outside of Tiphys there are no checkpoints to commit."""
    try:
        os.execvp(options.command[0], options.command)  # noqa: S606  the user asked to run this command
    except OSError as error:
        log_message(f"{options.command[0]} cannot be started: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main())
