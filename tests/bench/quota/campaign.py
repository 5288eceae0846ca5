"""Many processes on one ledger file, some of which are killed at any moment: is more ever held than may be?

Each asks, asks again for what it holds, and gives back. The parent kills one
after another, sweeps up what the dead have left, and looks at the book all the
time.
"""

import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from bench.progress import say
from bench.quota.asker import AskedLedger, owner, recover
from bench.quota.rules import RULES, within_limits
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger

from tiphys.errors import StoreError

CHECK_EVERY = timedelta(milliseconds=200)
_KILL_SECONDS = (0.1, 1.0)
_LOOK_SECONDS = 0.02
_TELL_SECONDS = 20.0


def campaign(requests: int, processes: int, seed: int) -> dict[str, Any]:
    """Counts of what must not be: GPUs beyond a limit, second leases, leases that nobody gets back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        ledger = SqliteLedger(path, RULES, check_every=CHECK_EVERY)
        try:
            return run(Askers(Path(folder), str(path), ledger, random.Random(seed)), requests, processes)
        finally:
            ledger.close()


def run(askers: "Askers", requests: int, processes: int, hurt: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Have ``processes`` make so many requests, and call ``hurt`` all the time meanwhile."""
    try:
        began = time.monotonic()
        askers.run(requests, processes, hurt)
        seconds = time.monotonic() - began
        _insist(askers, askers.count_leases)  # the damage is healed as long as the others live
        askers.end_all()
        leaks = _insist(askers, askers.count_leases)
    finally:
        askers.close()
    summary = askers.summary()
    return {
        "requests": summary.requests,
        "processes": processes,
        "kills": askers.kills,
        "swept": askers.swept,
        "looks": askers.looks,
        "over_admissions": askers.over,
        "double_grants": summary.doubles,
        "leaks": leaks,
        "unanswered": summary.unanswered,
        "lost": summary.lost,
        "per_second": round(summary.requests / seconds, 1),
    }


def _insist(askers: "Askers", call: Callable[[], int]) -> int:
    """Call until there is an answer: some of the last faults may still be to come."""
    while True:
        with askers.noting_faults():
            return call()
        time.sleep(_LOOK_SECONDS)


class Told(NamedTuple):
    """What the processes have told: second leases for one request, calls without an answer, and damaged ledgers met."""

    requests: int
    doubles: int
    unanswered: int
    lost: int


class Askers:
    """The processes; ``address`` is that of ``ledger`` for them."""

    def __init__(self, folder: Path, address: str, ledger: AskedLedger, draw: random.Random) -> None:
        self._address = address
        self._counts = folder / "counts"
        self._counts.mkdir()
        self._draw = draw
        self._numbers = count()
        self._living: dict[str, subprocess.Popen[bytes]] = {}
        self.ledger = ledger
        self.kills = self.swept = self.looks = self.over = 0

    def run(self, requests: int, processes: int, hurt: Callable[[], object]) -> None:
        kill_at = tell_at = time.monotonic()
        while (done := self.summary().requests) < requests:
            self._check()
            while len(self._living) < processes:
                self._begin()
            now = time.monotonic()
            if now >= kill_at:
                with self.noting_faults():
                    self._kill()
                kill_at = now + self._draw.uniform(*_KILL_SECONDS)
            if now >= tell_at:
                say(f"{done} of {requests} requests, {self.kills} kills")
                tell_at = now + _TELL_SECONDS
            with self.noting_faults():
                self._look()
                self.sweep()
            hurt()
            time.sleep(_LOOK_SECONDS)

    def sweep(self) -> None:
        """Take back what processes have held that are gone, and their places in the line."""
        self.swept += len(self.ledger.release_dead_leases(lambda lease: owner(lease) not in self._living))
        for one in self.ledger.snapshot().pending:
            if owner(one) not in self._living:
                self.ledger.withdraw(one.request.uid)

    @contextlib.contextmanager
    def noting_faults(self) -> Iterator[None]:
        """The ledger may be busy or damaged: the next turn does what this one could not do."""
        try:
            yield
        except LedgerLostError:
            recover(self.ledger)
        except StoreError:
            pass

    def count_leases(self) -> int:
        """Leases that remain after a sweep."""
        self.sweep()
        return len(self.ledger.snapshot().leases)

    def summary(self) -> Told:
        texts = [file.read_text().split() for file in self._counts.iterdir()]
        numbers = [tuple(map(int, one)) for one in texts if len(one) == len(Told._fields)]
        return Told(*(sum(one[place] for one in numbers) for place in range(len(Told._fields))))

    def end_all(self) -> None:
        """Have the living give back what they hold, and end."""
        for process in self._living.values():
            process.terminate()
        for name, process in self._living.items():
            code = process.wait(120)
            if code not in (0, -signal.SIGTERM):  # the latter had not begun to ask
                raise RuntimeError(f"process {name} of the campaign ended with {code}")
        self._living.clear()
        time.sleep(CHECK_EVERY.total_seconds())

    def close(self) -> None:
        for process in self._living.values():
            process.kill()
            process.wait()

    def _begin(self) -> None:
        name = f"p{next(self._numbers)}"
        command = [sys.executable, "-m", "bench.quota.asker", self._address, name, str(self._counts)]
        self._living[name] = subprocess.Popen(command)

    def _check(self) -> None:
        """Raise if one has ended that nobody has killed: it would never ask what is waited for."""
        for name, process in self._living.items():
            if (code := process.poll()) is not None:
                raise RuntimeError(f"process {name} of the campaign ended with {code} by itself")

    def _kill(self) -> None:
        """End one that has got as far as asking, and every second time one that holds GPUs."""
        asking = sorted(self._living.keys() & {file.name for file in self._counts.iterdir()})
        holding = sorted(self._living.keys() & {owner(lease) for lease in self.ledger.snapshot().leases})
        if not asking:
            return
        name = self._draw.choice(holding if holding and self.kills % 2 else asking)
        process = self._living[name]
        process.kill()
        process.wait()
        del self._living[name]  # only now may its leases be taken back
        self.kills += 1

    def _look(self) -> None:
        found = self.ledger.snapshot().leases
        self.looks += 1
        self.over += not within_limits(found)
