"""``tiphys-exec``, and ``python -m tiphys.checkpoint.exec``."""

import os
import sys
from collections.abc import Sequence

from tiphys.checkpoint.exec.options import Options, parse
from tiphys.checkpoint.exec.store import Keeper
from tiphys.checkpoint.exec.supervise import NOT_EXECUTABLE, NOT_FOUND, Loop, Signals
from tiphys.checkpoint.settings import Settings, open_stores
from tiphys.checkpoint.telemetry.events import tell
from tiphys.checkpoint.telemetry.metrics import open_metrics
from tiphys.errors import FencedError, StoreError, TiphysError, UsageError
from tiphys.protocol.environment import EX_FENCED, EX_UNAVAILABLE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program; return the exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        settings = Settings.from_environment(os.environ)
        return _become(options) if settings is None else _wrap(options, settings)
    except FencedError as error:
        return _told(error, EX_FENCED)
    except StoreError as error:
        return _told(error, EX_UNAVAILABLE)
    except TiphysError as error:
        return _told(error, error.exit_code)


def _wrap(options: Options, settings: Settings) -> int:
    if (rank := os.environ.get("RANK") or "0") != "0":
        raise UsageError(
            f"tiphys-exec was started in rank {rank}: one per attempt watches the folder; put it before the launcher, "
            "as in: tiphys-exec --dir /ckpt -- torchrun train.py"
        )
    with Signals() as signals:
        metrics = open_metrics(os.environ)
        loop: Loop | None = None
        run_store, store = open_stores(settings)
        keeper = Keeper(
            settings,
            os.environ,
            run_store=run_store,
            store=store,
            metrics=metrics,
            in_a_hurry=lambda: loop is not None and loop.stopping,
        )
        loop = Loop(options, keeper, signals, grace_seconds=settings.grace_seconds)
        try:
            return loop.run(os.environ)
        finally:
            metrics.close()


def _become(options: Options) -> int:
    """Outside of Tiphys there is nothing to keep: the program takes our place."""
    try:
        os.execvp(options.command[0], options.command)  # noqa: S606  running programs is what this one is for
    except OSError as error:
        tell(f"{options.command[0]} cannot be started: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def _told(error: TiphysError, code: int) -> int:
    tell(str(error))
    return code


if __name__ == "__main__":
    sys.exit(main())
