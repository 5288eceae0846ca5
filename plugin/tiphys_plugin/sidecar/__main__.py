"""The sidecar as a process; see the package for what it needs."""

import os
import signal
import sys
import threading

from tiphys.errors import UsageError
from tiphys_plugin.sidecar.server import SidecarServer
from tiphys_plugin.sidecar.settings import SidecarSettings, log


def main() -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit code."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # Linux ignores them in process 1 unless it has a handler
        signal.signal(number, lambda *_: stop.set())
    try:
        server = SidecarServer(SidecarSettings.from_environment(os.environ))
    except UsageError as error:
        log("error", "sidecar.failed", error=str(error))
        return error.exit_code
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    log("info", "sidecar.started", port=server.port, service=server.service.url)
    stop.wait()
    server.drain()
    log("info", "sidecar.stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
