"""A process of the campaign: ``python -m bench.quota.asker LEDGER NAME FOLDER``; asks until it is told to end.

LEDGER is a file, or the URL of an API server. How far it is stands in a file, since it may be killed at any moment.
"""

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.quota.rules import RULES
from support.builders.ledger import ask
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.lease import Admitted, Lease, LeaseRequest, PendingRequest
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from urllib3 import PoolManager

from tiphys.errors import StoreError
from tiphys.kube import KubeApi

TELL_EVERY = 20
_MOST_HELD = 2
_GIVES_BACK = 0.2
_RECOVER_SECONDS = 0.05
NAMESPACE = "tiphys"
AskedLedger = SqliteLedger | KubernetesLedger


def main(address: str, name: str, folder: Path) -> None:
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    asker = _Asker(_open(address), name)
    while not told_to_end.is_set():
        asker.move()
        if asker.requests % TELL_EVERY == 0:
            (folder / name).write_text(asker.summary)
    asker.leave()
    (folder / name).write_text(asker.summary)


def _open(address: str) -> AskedLedger:
    if address.startswith("http"):
        return KubernetesLedger(KubeApi(address, PoolManager(), NAMESPACE), NAMESPACE)
    return SqliteLedger(Path(address), RULES)


def recover(ledger: AskedLedger) -> bool:
    """Whether another service has healed the damaged log, which is asked for it.

    No lease is recorded again: the campaign damages only what others still know.
    """
    if not isinstance(ledger, KubernetesLedger):
        return True
    try:
        ledger.begin_recovery()
    except StoreError:
        return False
    ledger.end_recovery()
    return True


class _Asker:
    def __init__(self, ledger: AskedLedger, name: str) -> None:
        self._ledger = ledger
        self._name = name
        self._draw = random.Random(name)
        self._held: list[str] = []
        self.requests = 0
        self.doubles = 0
        self.unanswered = 0
        self.lost = 0

    def move(self) -> None:
        request = self._next()
        answer = self._request(request)
        if not isinstance(answer, Admitted):
            self._insist(lambda: self._ledger.withdraw(request.uid))
        else:
            again = self._request(request)
            self.doubles += not isinstance(again, Admitted) or again.lease != answer.lease
            self._held.append(answer.lease)
        if len(self._held) > _MOST_HELD or (self._held and self._draw.random() < _GIVES_BACK):
            lease = self._held.pop(0)
            self._insist(lambda: self._ledger.release(lease))

    @property
    def summary(self) -> str:
        return f"{self.requests} {self.doubles} {self.unanswered} {self.lost}"

    def leave(self) -> None:
        for lease in self._held:
            self._insist(lambda lease=lease: self._ledger.release(lease))  # type: ignore[misc]

    def _insist(self, change: Callable[[], object]) -> None:
        while True:
            try:
                change()
            except StoreError as error:
                self._take_up(error)
            else:
                return

    def _take_up(self, error: StoreError) -> None:
        """Note an error, and go on as a service does."""
        self.unanswered += 1
        if isinstance(error, LedgerLostError):
            self.lost += 1
            while not recover(self._ledger):
                time.sleep(_RECOVER_SECONDS)

    def _next(self) -> LeaseRequest:
        queue = self._draw.choice(["one", "two"])
        gpu_type = self._draw.choice(["A100", "T4"]) if queue == "two" else "A100"
        return ask(self._draw.choice([1, 2, 4]), f"{self._name}-{self.requests}", queue=queue, gpu_type=gpu_type)

    def _request(self, request: LeaseRequest) -> object:
        """Ask until there is an answer, as Argo does: a file that many write to may be busy for long."""
        while True:
            self.requests += 1
            try:
                return self._ledger.request(request)
            except StoreError as error:
                self._take_up(error)


def owner(one: Lease | PendingRequest) -> str:
    """Name of the process that holds the lease, or waits."""
    return one.request.uid.rpartition("-")[0]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
