"""The plugin as a process of its own, so that it can be killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from support.processes.forking import ForkedProcess, ForkingProcess

TOKEN = "service-token"
FORKED_MODULES = (
    *("tiphys_plugin.core", "tiphys_plugin.server.app"),
    *("uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.on"),
)
_PROGRAM = "import runpy; runpy.run_module('support.processes.embedded_plugin', run_name='__main__', alter_sys=True)"


class Service:
    """`support.processes.embedded_plugin` over the folders of a `support.stories.plugin.World`.

    It is forked if there is a process ``forking`` of `FORKED_MODULES`.
    """

    def __init__(
        self,
        root: Path,
        failpoints: str = "",
        log: Path | None = None,
        queues: Path | None = None,
        forking: ForkingProcess | None = None,
    ) -> None:
        self._forking = forking
        self.command = [
            *(sys.executable, "-m", "support.processes.embedded_plugin"),
            *("--store", str(root / "store"), "--cluster-dir", str(root / "cluster")),
            *("--ledger", str(root / "ledger.db")),
            *(("--queues", str(queues)) if queues else ()),
        ]
        faults = {"TIPHYS_FAILPOINTS": failpoints, "TIPHYS_FAILPOINTS_LOG": str(log)} if failpoints else {}
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TIPHYS_PLUGIN_TOKEN": TOKEN,
            **faults,
        }
        self.url = ""

    def __enter__(self) -> "Service":
        self.process = self._start()
        assert self.process.stderr is not None
        for line in self.process.stderr:
            started = json.loads(line)
            assert started["event"] == "service.started", line
            self.url = started["url"]
            return self
        raise AssertionError(f"the service ended with {self.process.wait()} before it was ready")

    def _start(self) -> ForkedProcess | subprocess.Popen[str]:
        if self._forking:
            return self._forking.start(_PROGRAM, self.command[3:], environ=self.environment)
        return subprocess.Popen(self.command, env=self.environment, stderr=subprocess.PIPE, text=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=120)

    def killed(self) -> bool:
        """Whether it died of SIGKILL, which is what a failpoint's crash is."""
        return self.process.wait(timeout=120) == -signal.SIGKILL

    def terminate(self) -> tuple[int, str]:
        """Ask it to stop; its exit code and what it logged since it was ready."""
        self.process.terminate()
        _, log = self.process.communicate(timeout=120)
        return self.process.returncode, log
