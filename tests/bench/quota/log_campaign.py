"""Many processes, each a service of its own, on one `GPULedger` and its log, which is damaged all the time.

The API server stands on the loopback device. Beside kills there are lost and refused
answers, and parts of the log are deleted, cut off and emptied: records, chunks of a
snapshot, and entries of the head. Each time the parent has read the log to its end
before, so one service still has all leases, and must write them anew.
"""

import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.quota.asker import NAMESPACE
from bench.quota.campaign import CHECK_EVERY, Askers, run
from bench.quota.rules import RULES
from support.builders.ledger import spec
from support.servers.kube_server import KubeServer, serving
from support.servers.kube_store import Collection, Place
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger

from tiphys.errors import StoreError
from tiphys.kube.ledger_log import LogHead, parse_head
from tiphys.kube.resources import DEFAULT_LEDGER_NAME, GPU_LEDGERS

_LEDGER = Place(Collection("tiphys.dev", "gpuledgers"), NAMESPACE, DEFAULT_LEDGER_NAME)
_RECORDS = Collection("tiphys.dev", "gpuledgerrecords")
_FAULT_SECONDS = (0.05, 0.3)
_DAMAGE_SECONDS = (1.0, 3.0)
DAMAGES = ("deleted record", "cut record", "emptied record", "deleted chunk", "cut head")


def log_campaign(requests: int, processes: int, seed: int) -> dict[str, Any]:
    """As `campaign`; also the faults by kind, and how often a log was written anew."""
    with tempfile.TemporaryDirectory() as folder, serving() as server:
        api = server.api(NAMESPACE)
        api.create(GPU_LEDGERS, NAMESPACE, {"metadata": {"name": DEFAULT_LEDGER_NAME}, "spec": spec(RULES)})
        ledger = KubernetesLedger(api, NAMESPACE, check_every=CHECK_EVERY)
        faults = LogFaults(server, ledger, random.Random(seed))
        found = run(Askers(Path(folder), server.url, ledger, random.Random(seed)), requests, processes, faults.hurt)
        return {**found, "faults": dict(sorted(faults.counts.items())), "healed": len(faults.logs) - 1}


class LogFaults:
    """Faults at an API server, each after a drawn time."""

    def __init__(self, server: KubeServer, ledger: KubernetesLedger, draw: random.Random) -> None:
        self._server = server
        self._ledger = ledger
        self._draw = draw
        self._fault_at = self._damage_at = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.logs: set[str] = set()
        """Ids of the logs that there were; each after the first was written because the one before was damaged."""

    def hurt(self) -> None:
        now = time.monotonic()
        if now >= self._fault_at:
            self._fail_an_answer()
            self._fault_at = now + self._draw.uniform(*_FAULT_SECONDS)
        if now >= self._damage_at and self._damage(self._draw.choice(DAMAGES)):
            self._server.compact()  # nobody watches, and old versions take memory
            self._damage_at = now + self._draw.uniform(*_DAMAGE_SECONDS)

    def _fail_an_answer(self) -> None:
        verb, plural = self._draw.choice([("update", "gpuledgers"), ("create", "gpuledgerrecords")])
        kind = self._draw.choice(["lost answer", "closed connection", "refused"])
        self._server.fail_next(503 if kind == "refused" else 0, verb=verb, plural=plural, done=kind == "lost answer")
        self.counts[f"{kind} to {verb} {plural}"] += 1

    def _damage(self, kind: str) -> bool:
        """Damage something that a service needs which starts now; False if there is none, or others have just written.

        The parent has read all of the log then.
        """
        try:
            self._ledger.snapshot()
        except StoreError:
            return False
        read = self._ledger._ledger_object.last_version
        with self._server.store.changed:  # nobody writes meanwhile
            status = self._server.store.get(_LEDGER).get("status")
            if status is None or read is None:
                return False
            head = parse_head(status)
            if read.head != head or head.repair_asked_at is not None:
                return False
            self.logs.add(head.id)
            if kind == "cut head":
                self._change_head(entries=[])
            elif names := self._list_needed(head, chunks=kind == "deleted chunk"):
                self._damage_record(kind, self._draw.choice(names))
            else:
                return False
            self.counts[kind] += 1
            return True

    def _list_needed(self, head: LogHead, *, chunks: bool) -> list[str]:
        """The records of the log that begins with the newest snapshot, or the chunks of that."""
        first = f"{DEFAULT_LEDGER_NAME}.{head.id}.{head.snapshot if chunks else head.snapshot_first:012d}"
        names = (place.name for place in self._server.store.places() if place.collection == _RECORDS)
        if chunks:
            return sorted(name for name in names if name.startswith(f"{first}."))
        own = f"{DEFAULT_LEDGER_NAME}.{head.id}."
        return sorted(name for name in names if name.startswith(own) and name.count(".") == 2 and name >= first)

    def _damage_record(self, kind: str, name: str) -> None:
        place = Place(_RECORDS, NAMESPACE, name)
        if kind.startswith("deleted"):
            self._server.store.delete(place, {})
            return

        def change(before: dict[str, Any]) -> dict[str, Any]:
            data = before["spec"]["data"]
            return {
                **before,
                "spec": {**before["spec"], "data": "" if kind.startswith("emptied") else data[: len(data) // 2]},
            }

        self._server.store.write(place, "", change)

    def _change_head(self, **log: Any) -> None:
        def change(before: dict[str, Any]) -> dict[str, Any]:
            return {**before, "status": {**before["status"], "log": {**before["status"]["log"], **log}}}

        self._server.store.write(_LEDGER, "status", change)
