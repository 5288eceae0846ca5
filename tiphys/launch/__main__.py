"""``python -P -m tiphys.launch [--mlflow] -- PROGRAM ARGS…``: runs the program of a training to its end.

`tiphys.launch.processes` says what signals the processes of the program get, and that none
outlives it. Around that, where the environment or an option asks for it, a member
of a gang fetches its inputs and stores its outputs (`tiphys.launch.member_files`),
and the run of MLflow is opened and closed (`tiphys.launch.mlflow_run`). Both are
imported only then: the launcher waits beside the training, in its memory.
"""

import os
import sys
from collections.abc import Mapping

from tiphys.launch.near_memory import hold_near_memory
from tiphys.launch.processes import DEFAULT_GRACE_SECONDS, SignalQueue, log_line
from tiphys.launch.restart import run_program
from tiphys.protocol import environment

MLFLOW_OPTION = "--mlflow"
_USAGE = 2
_TORCHRUN_GRACE = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""Of its command, and of its Python interface."""


def main(arguments: list[str] | None = None) -> int:
    """Run the program after ``--``; return the exit code of the step."""
    words = sys.argv[1:] if arguments is None else arguments
    separator = words.index("--") if "--" in words else len(words)
    options, command = words[:separator], words[separator + 1 :]
    if not command or set(options) - {MLFLOW_OPTION}:
        log_line(f"unknown arguments {words}; write: python -P -m tiphys.launch [{MLFLOW_OPTION}] -- PROGRAM ARGS…")
        return _USAGE
    environ = dict(os.environ)
    # torchrun gives its ranks 30 s by default, however long the grace period is.
    grace = environ.get(environment.GRACE_SECONDS) or f"{DEFAULT_GRACE_SECONDS:.0f}"
    environ = {**dict.fromkeys(_TORCHRUN_GRACE, grace), **environ, **hold_near_memory(environ)}
    run = run_program
    with SignalQueue() as signals:
        if MLFLOW_OPTION in options:
            from tiphys.launch.mlflow_run import run_tracked as run
        if environment.FILES in environ:
            from tiphys.launch.member_files import run_member

            return run_member(run, command, environ, signals)
        code = run(command, environ, signals).code
    if code == 0:
        _warn_of_outputs(environ)
    return code


def _warn_of_outputs(environ: Mapping[str, str]) -> None:
    """Name what Argo will not store of the output folders: links it drops without a word."""
    paths = [path for name, path in environ.items() if name.startswith(environment.output_path_variable(""))]
    for folder in filter(os.path.isdir, paths):
        from pathlib import Path

        from tiphys.errors import UsageError
        from tiphys.store import list_output_files

        try:
            list_output_files(Path(folder), "", f"output {folder}")
        except UsageError as error:
            log_line(str(error))


if __name__ == "__main__":
    sys.exit(main())
