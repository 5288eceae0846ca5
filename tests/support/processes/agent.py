"""The shared agent as a process on this machine, against a real API server."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from support.processes.polling import until


class AgentProcess:
    """``python -m tiphys_plugin agent`` between ``__enter__`` and ``__exit__``; ``url`` is that of its probes."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "tiphys_plugin", "agent", "--host=127.0.0.1", "--port=0", *arguments]
        self._environment = {**os.environ, **environment}
        self.log: list[dict[str, Any]] = []
        self.noise: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return next((str(entry["url"]) for entry in self.log if entry.get("event") == "agent.started"), "")

    def said(self, event: str) -> bool:
        return any(entry.get("event") == event for entry in self.log)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self) -> int:
        """Wait for its end; its exit code."""
        return self._process.wait(timeout=120)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, env=self._environment, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        until(lambda: self.url or self._process.poll() is not None, seconds=300)
        if not self.url:
            self._reader.join()  # it has ended, and may have been ready before
        assert self.url, f"the agent ended before it was ready: {self.noise or self.log}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.noise.append(line)
