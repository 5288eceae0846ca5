"""The plugin as a process: ``python -m tiphys_plugin``. It has no other duty than to start the one that is chosen."""

import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

import prometheus_client

from tiphys.errors import TiphysError
from tiphys.logs import log_json
from tiphys_plugin import commands
from tiphys_plugin.collecting import collect_seldom


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; answer the calls under way, then return the exit code."""
    options = commands.parser().parse_args(arguments)
    log_json()
    collect_seldom()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        getattr(import_module(options.module), options.function)(options, stop)
    except TiphysError as error:
        print(f"tiphys-plugin: {error}", file=sys.stderr)  # noqa: T201  this is the command's own voice
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
