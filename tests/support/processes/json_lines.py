"""A process that loads everything once and then answers questions, each by a line of JSON for a line of JSON."""

import json
import os
import subprocess
import sys
from typing import Any, ClassVar, Self


class JsonLineProcess:
    """The end of those who ask; use it in a ``with`` block."""

    MODULE: ClassVar[str]
    """What runs as ``python -m``."""
    ENVIRON: ClassVar[dict[str, str]] = {}

    def __enter__(self) -> Self:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("TIPHYS_")}
        environ |= {"PYTHONPATH": os.pathsep.join(sys.path), **self.ENVIRON}
        command = [sys.executable, "-m", self.MODULE]
        self._process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{json.dumps(question)}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())
