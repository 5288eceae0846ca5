"""A program below the launcher of trainings, as Argo's executor starts and signals it."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

PATIENCE_SECONDS = 300.0


class Launched:
    """A program below the launcher, in a process group of its own, and all that it starts."""

    def __init__(self, command, grace="60", ready=1, *, only_ready=True, **environ):
        self.token = f"TEST_TOKEN={uuid.uuid4()}"
        name, value = self.token.split("=")
        own = {"PYTHONPATH": os.pathsep.join(sys.path), "TIPHYS_GRACE_SECONDS": grace, name: value, **environ}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tiphys.launch", "--", *command],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.printed = []
        while self.printed.count("ready\n") < ready and (line := self.process.stdout.readline()):
            self.printed.append(line)
        assert self.printed.count("ready\n") == ready, self.printed
        assert not only_ready or len(self.printed) == ready, self.printed

    def signal_group(self, number=signal.SIGTERM):
        os.killpg(self.process.pid, number)

    def ended(self):
        """The exit code and the rest of the output, once nothing of the program is left, nor was when it ended."""
        out, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        assert self.alive() == []
        return self.process.returncode, out

    def lines(self):
        """The command lines of the processes that have the token of this program in their environment, by process."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self.token.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def alive(self):
        return list(self.lines().values())

    def names(self, word):
        return [line for line in self.alive() if word in line]
