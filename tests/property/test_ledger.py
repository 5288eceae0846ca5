"""The ledger against a dictionary that knows only the laws: any order of requests, releases and restarts.

| law                                              | checked by                |
|--------------------------------------------------|---------------------------|
| never over quota, never over the inventory       | invariant                 |
| a deferred request holds nothing                 | invariant: holders match  |
| a repeated request gets the same lease           | rule ask                  |
| a request never counts itself                    | rule ask: head that fits  |
| a restart keeps every holder and every place     | rule restart              |
| only released or gone leases come back           | invariant: holders match  |
| who is at the head and fits is admitted          | rule ask                  |
| nobody is overtaken in its own line by who takes what it waits for | rule ask |
| who may not use a queue is rejected and holds nothing | rule ask                |
| no namespace has more of the ledger's room than its share | invariant, in a cluster |

The same search drives the ledger in a file and the one in a cluster. There, two
services take turns; others write in between, the API server refuses, answers
get lost, and who got no answer asks again, as Argo does.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.ledger import ask, ledger_api
from support.world import Clock
from tiphys_plugin.quota.lease import AdmissionBackend, AdmissionReason, Admitted, Deferred, LeaseRequest, Rejected
from tiphys_plugin.quota.ledger import ledger_object
from tiphys_plugin.quota.ledger.backend import MemoryLedger
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queues import Queues

from tiphys.errors import StoreError
from tiphys.kube import ledger_log
from tiphys.kube.whole_ledger import WholeLedgerReader

QUOTAS = {"research": {"A100": 8, "*": 4}, "nightly": {"A100": 4}}
OWNERS = {"nightly": ("ml",)}
HIGHEST_PRIORITY = {"nightly": 3}
INVENTORY = {"A100": {"count": 10}, "T4": {"count": 6}}


# Few names and round numbers, so that requests meet each other.
def ask_of_tenant(gpus: int, number: int, **wish: Any) -> LeaseRequest:
    return ask(gpus, f"u{number}", namespace="ml" if number < 5 else "vision", **wish)


requests = st.builds(
    ask_of_tenant,
    st.sampled_from([1, 2, 4, 8]),
    number=st.integers(0, 7),
    queue=st.sampled_from(["research", "research", "nightly"]),
    gpu_type=st.sampled_from(["A100", "A100", "T4"]),
    priority=st.sampled_from([0, 0, 0, 3, 5]),
)
MOST_ENTRIES = 3
"""Leases and waiting requests that one namespace may have in a cluster's ledger."""


def declare(inventory: dict[str, dict[str, int]] | None) -> Queues:
    declared = [
        {
            "name": name,
            "gpus": gpus,
            "namespaces": OWNERS.get(name),
            "max_priority": HIGHEST_PRIORITY.get(name),
            "backfill": "strict",
        }
        for name, gpus in QUOTAS.items()
    ]
    share = MOST_ENTRIES / 100_000
    return Queues.model_validate({"queues": declared, "inventory": inventory, "ledger_share": share})


def is_allowed(request: LeaseRequest) -> bool:
    owners, highest = OWNERS.get(request.queue), HIGHEST_PRIORITY.get(request.queue, 5)
    return (owners is None or request.namespace in owners) and request.priority <= highest


def pool_of(request: LeaseRequest) -> str:
    return "A100" if request.gpu_type == "A100" else "*"


class Ledger(RuleBasedStateMachine):
    """``holders`` and ``line`` are the oracle: who was told yes, and who was told to wait, in order of arrival."""

    @initialize(with_inventory=st.booleans())
    def open(self, with_inventory: bool) -> None:
        self.clock = Clock()
        self.queues = declare(INVENTORY if with_inventory else None)
        self.holders: dict[str, tuple[str, LeaseRequest]] = {}
        self.line: dict[str, LeaseRequest] = {}
        self._make()
        self._open()

    def _make(self) -> None:
        self.folder = tempfile.TemporaryDirectory()

    def _open(self) -> None:
        self.ledger: AdmissionBackend = SqliteLedger(
            Path(self.folder.name) / "ledger.db", self.queues, clock=self.clock
        )

    def _close(self) -> None:
        assert isinstance(self.ledger, SqliteLedger)
        self.ledger.close()

    def _answer(self, call: Callable[[AdmissionBackend], Any]) -> Any:
        return call(self.ledger)

    @rule(asked=st.lists(requests, min_size=1, max_size=4))
    def ask(self, asked: list[LeaseRequest]) -> None:
        for request in asked:
            self._ask(request)

    def _ask(self, request: LeaseRequest) -> None:
        self.clock.advance(1)
        known = self.holders.get(request.uid)
        answer = self._answer(lambda ledger: ledger.request(request))
        if known is not None:
            assert isinstance(answer, Admitted)
            assert answer.lease == known[0]
            return
        if not is_allowed(request):
            assert isinstance(answer, Rejected)
            self.line.pop(request.uid, None)
            return
        if isinstance(answer, Deferred) and answer.reason is AdmissionReason.LEDGER_SHARE_EXCEEDED:
            assert request.uid not in self.line
            assert self._entries_of(request.namespace) + 1 > MOST_ENTRIES
            return
        ahead = self._ahead_of(request)
        if isinstance(answer, Admitted):
            before = [self.line[uid] for uid in ahead if self._same_line(self.line[uid], request)]
            assert self._fits(request, before), "it took what somebody before it waits for"
            self.holders[request.uid] = (answer.lease, request)
            self.line.pop(request.uid, None)
        elif isinstance(answer, Deferred):
            self.line[request.uid] = request
            assert ahead or not self._fits(request), answer
            assert answer.position <= len(ahead) + 1
            if answer.reason in (AdmissionReason.BEHIND_EARLIER_REQUEST, AdmissionReason.BEHIND_HIGHER_PRIORITY):
                assert ahead, "behind somebody, but nobody waits"
        else:
            self.line.pop(request.uid, None)
            assert request.gpus > self._ceiling(request)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holders:
            uid = data.draw(st.sampled_from(sorted(self.holders)))
            lease, _ = self.holders.pop(uid)
            self._answer(lambda ledger: ledger.release(lease))

    @rule(data=st.data())
    def end_workflow(self, data: st.DataObject) -> None:
        if self.holders:
            uid = data.draw(st.sampled_from(sorted(self.holders)))
            self._answer(lambda ledger: ledger.release_workflow(uid))
            alive = data.draw(st.booleans())
            self._answer(
                lambda ledger: ledger.release_dead_leases(lambda lease: lease.request.uid == uid and not alive)
            )
            self.line.pop(uid, None)
            if not alive:
                self.holders.pop(uid)

    @rule()
    def restart(self) -> None:
        self._close()
        self._open()

    @invariant()
    def holders_are_exactly_those_told_yes(self) -> None:
        if hasattr(self, "holders"):
            kept = {lease.request.uid: lease.id for lease in self.ledger.snapshot().leases}
            assert kept == {uid: lease for uid, (lease, _) in self.holders.items()}

    @invariant()
    def those_told_to_wait_wait_in_order_of_arrival(self) -> None:
        if hasattr(self, "line"):
            assert {w.request.uid for w in self.ledger.snapshot().pending} == set(self.line)

    @invariant()
    def nothing_is_over_quota_or_inventory(self) -> None:
        if not hasattr(self, "holders"):
            return
        held = [request for _, request in self.holders.values()]
        for queue, gpus in QUOTAS.items():
            for pool, quota in gpus.items():
                assert sum(r.gpus for r in held if r.queue == queue and pool_of(r) == pool) <= quota
        if self.queues.inventory is not None:
            for gpu_type, stock in self.queues.inventory.items():
                assert sum(r.gpus for r in held if r.gpu_type == gpu_type) <= stock.count

    @invariant()
    def no_namespace_has_more_than_its_share(self) -> None:
        if hasattr(self, "holders"):
            assert all(self._entries_of(namespace) <= MOST_ENTRIES for namespace in ("ml", "vision"))

    def _entries_of(self, namespace: str) -> int:
        """Entries of the namespace in a ledger whose room is shared; other ledgers have no limit."""
        return 0

    def _ceiling(self, request: LeaseRequest) -> int:
        quota = QUOTAS[request.queue].get(pool_of(request), 0)
        stock = self.queues.inventory[request.gpu_type].count if self.queues.inventory else quota
        return min(quota, stock)

    def _ahead_of(self, request: LeaseRequest) -> list[str]:
        """Who waits and may have a better place: in its queue by priority and arrival, in others whoever it is."""
        order = list(self.line)
        mine = order.index(request.uid) if request.uid in order else len(order)

        def is_before(place: int, other: LeaseRequest) -> bool:
            return other.queue != request.queue or (-other.priority, place) < (-request.priority, mine)

        return [uid for place, uid in enumerate(order) if uid != request.uid and is_before(place, self.line[uid])]

    @staticmethod
    def _same_line(one: LeaseRequest, other: LeaseRequest) -> bool:
        return one.queue == other.queue and pool_of(one) == pool_of(other)

    def _fits(self, request: LeaseRequest, before: Sequence[LeaseRequest] = ()) -> bool:
        held = [*(r for _, r in self.holders.values() if r is not request), *before]
        of_pool = sum(r.gpus for r in held if self._same_line(r, request))
        of_type = sum(r.gpus for r in held if r.gpu_type == request.gpu_type)
        stock = self.queues.inventory[request.gpu_type].count if self.queues.inventory else 10**6
        return of_pool + request.gpus <= QUOTAS[request.queue][pool_of(request)] and of_type + request.gpus <= stock

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self._close()
            self._unmake()

    def _unmake(self) -> None:
        self.folder.cleanup()


class LedgerInCluster(Ledger):
    """Every call goes to one of two services, and what is drawn happens to its writes."""

    def _make(self) -> None:
        self.api = ledger_api(self.queues)
        self.faults: list[str] = []
        self.api.meanwhile = lambda: self.faults.pop() if self.faults else ""
        # So small that records, snapshots and their deletion happen in every walk.
        self.sizes = ExitStack()
        self.sizes.enter_context(patch.object(ledger_log, "SEGMENT_BYTES", 300))
        self.sizes.enter_context(patch.object(ledger_log, "CHUNK_BYTES", 900))
        self.sizes.enter_context(patch.object(ledger_object, "_MIN_SNAPSHOT_BYTES", 2000))

    def _open(self) -> None:
        options = {"clock": self.clock, "pause": lambda _: None, "run_in_background": self._later}
        self.services = [KubernetesLedger(self.api, "tiphys", **options) for _ in range(2)]
        self.ledger = self.services[0]
        self.later: list[Callable[[], None]] = []

    def _later(self, work: Callable[[], None]) -> None:
        self.later.append(work)

    @rule()
    def snapshots_are_taken(self) -> None:
        works, self.later = self.later, []
        for work in works:
            work()

    def _close(self) -> None:
        pass

    def _unmake(self) -> None:
        self.sizes.close()

    def _entries_of(self, namespace: str) -> int:
        ledger = WholeLedgerReader(self.api, "tiphys", "default").read()
        status = (ledger or {}).get("status") or {"leases": (), "waiting": ()}
        return sum(one["namespace"] == namespace for one in (*status["leases"], *status["waiting"]))

    @rule(faults=st.lists(st.sampled_from(["", "", "conflict", "refused", "lost"]), max_size=6))
    def trouble_ahead(self, faults: list[str]) -> None:
        self.faults = faults

    @rule()
    def another_service_is_asked(self) -> None:
        self.services.reverse()
        self.ledger = self.services[0]

    def _answer(self, call: Callable[[AdmissionBackend], Any]) -> Any:
        while True:  # every fault happens once
            try:
                return call(self.ledger)
            except StoreError:
                self.another_service_is_asked()


class LedgerInMemory(Ledger):
    """What it holds lives as long as the process, so nothing is opened again."""

    def _make(self) -> None:
        self.kept = MemoryLedger(self.queues, clock=self.clock)

    def _open(self) -> None:
        self.ledger = self.kept

    def _close(self) -> None:
        pass

    def _unmake(self) -> None:
        pass


TestLedgerInMemory = LedgerInMemory.TestCase
TestLedgerInMemory.settings = settings(max_examples=40, stateful_step_count=20)
TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=25, stateful_step_count=20)
TestLedgerInCluster = LedgerInCluster.TestCase
TestLedgerInCluster.settings = settings(max_examples=25, stateful_step_count=20)
