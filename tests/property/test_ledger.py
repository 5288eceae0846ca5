"""A ledger in memory, in a file or in a cluster keeps every law of `support.checks.ledger_walk`; a broken one does not.

In the cluster either of two services is asked; the API server refuses writes, others write in between, answers get
lost, and who got no answer asks again, as Argo does.

Each planted bug is one that somebody's quota system has had, or that an edit of
this one could bring. A suite that passes with any of them would prove nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest
from support.builders.ledger import LedgerApi, ledger_api
from support.builders.seeds import SEED
from support.checks.ledger_walk import MOST_OF_A_SHARE, PATIENCE, RULES, Walk
from support.stories.plugin import Clock
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Admitted, LeaseRequest, LedgerState
from tiphys_plugin.quota.ledger import kubernetes_ledger, ledger_object, room, sqlite_ledger, transitions
from tiphys_plugin.quota.ledger.backend import MemoryLedger
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.ledger_object import LedgerObject
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.scheduler import pending_queues
from tiphys_plugin.quota.scheduler.backfill import Reservation
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.cycle import _SchedulingCycle
from tiphys_plugin.quota.scheduler.entry_index import EntryIndex

from tiphys.errors import StoreError
from tiphys.kube import ledger_log

STEPS = 200
PLANTED_SEED = 20_261_121
"""Of the walks that have to meet a planted bug: another seed may miss it."""
Opening = Callable[[Clock], Callable[[], AdmissionBackend]]


class Services:
    """Two services on one ledger object, a call to either of them, and faults of the API server that it meets."""

    def __init__(self, api: LedgerApi, random: Random, clock: Clock) -> None:
        self._random, self._later = random, list[Callable[[], None]]()
        self._faults: list[str] = []
        api.meanwhile = lambda: self._faults.pop() if self._faults else ""
        options: dict[str, Any] = {"forget_after": PATIENCE, "run_in_background": self._later.append}
        self._services = [
            KubernetesLedger(api, "tiphys", clock=clock, pause=lambda _: None, **options)  # type: ignore[arg-type]
            for _ in range(2)
        ]

    def close(self) -> None:
        """A service that ends leaves nothing to close."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            kinds = ("", "", "conflict", "refused", "lost")
            self._faults = self._random.choices(kinds, k=self._random.choice([0, 0, 6]))
            if self._random.random() < 0.1:  # snapshots of the log
                while self._later:
                    self._later.pop(0)()
            while True:  # each fault happens once
                try:
                    return getattr(self._random.choice(self._services), name)(*arguments)
                except StoreError:
                    continue

        return call


def in_cluster(clock: Clock) -> Callable[[], AdmissionBackend]:
    api, random = ledger_api(RULES), Random(PLANTED_SEED)
    return lambda: Services(api, random, clock)  # type: ignore[return-value]


def in_memory(clock: Clock) -> Callable[[], AdmissionBackend]:
    """What it holds lives as long as the process, so nothing is opened again."""
    ledger = MemoryLedger(RULES, clock=clock, forget_after=PATIENCE)
    return lambda: ledger


@pytest.fixture
def in_file(tmp_path) -> Opening:
    numbers = count()

    def opening(clock: Clock) -> Callable[[], AdmissionBackend]:
        path = tmp_path / f"{next(numbers)}.db"
        return lambda: SqliteLedger(path, RULES, clock=clock, forget_after=PATIENCE)

    return opening


@pytest.fixture(autouse=True)
def records_and_snapshots_happen_in_every_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_log, "SEGMENT_BYTES", 300)
    monkeypatch.setattr(ledger_log, "CHUNK_BYTES", 900)
    monkeypatch.setattr(ledger_object, "_MIN_SNAPSHOT_BYTES", 2000)


@pytest.fixture(autouse=True)
def rules_remember_no_bug() -> Iterator[None]:
    """All walks have the same rules, and these keep what follows from them."""
    yield
    for cache in RULES.pool_options_caches:
        cache.clear()
    RULES.feasibility_cache.clear()


def walk(opening: Opening, seed: int = PLANTED_SEED) -> None:
    for number in range(6):
        clock = Clock()
        Walk(seed + number, clock, opening(clock), shares_room=opening is in_cluster).run(STEPS)


def test_the_ledger_in_a_cluster_keeps_every_law():
    walk(in_cluster, SEED)


def test_the_ledger_in_a_file_keeps_every_law(in_file):
    walk(in_file, SEED)


def test_the_ledger_in_memory_keeps_every_law():
    walk(in_memory, SEED)


def holders_count_twice(plant):
    count_hold = Capacity._count
    plant(Capacity, "_count", lambda self, hold, gpus: count_hold(self, hold, 2 * gpus))


def borrowed_gpus_are_forgotten(plant):
    plant(Capacity, "available_in_cohort", lambda self, cohort, pool: self.queues.lendable_gpus[cohort, pool])


def the_borrowing_limit_is_not_read(plant):
    plant(Queue, "max_with_borrowing", lambda self, pool: math.inf)


def the_lending_limit_is_not_read(plant):
    plant(Queue, "guaranteed_quota", lambda self, pool: 0)


def the_inventory_is_not_read(plant):
    plant(Capacity, "_free_inventory", lambda self, wanted, existing: math.inf)


def nobody_can_borrow(plant):
    plant(Capacity, "available_gpus", lambda self, queue, pool: self.remaining_quota(queue, pool))


def a_stopped_queue_is_open(plant):
    plant(Queue, "__getattribute__", lambda self, name: name != "stopped" and object.__getattribute__(self, name))


def owners_of_a_queue_are_not_read(plant):
    plant(Queue, "is_usable_by", lambda self, namespace: True)


def a_name_that_begins_alike_is_an_owner(plant):
    plant(
        Queue,
        "is_usable_by",
        lambda self, namespace: any(one.startswith(namespace) for one in self.namespaces or ("",)),
    )


def the_highest_priority_is_not_read(plant):
    plant(Queue, "accepts", lambda self, namespace, priority: self.is_usable_by(namespace))


def the_share_of_the_ledger_is_not_read(plant):
    plant(kubernetes_ledger, "find_share_objection", lambda before, after, request, cache: None)


def all_namespaces_have_one_share(plant):
    plant(EntryIndex, "count", lambda self, entries, namespace: len(entries))


def a_share_is_used_up_twice_as_fast(plant):
    plant(room, "_share_entries", lambda rules: MOST_OF_A_SHARE // 2)


def nothing_is_kept_for_who_is_next(plant):
    plant(_SchedulingCycle, "_reserve", lambda self, queue, one, short: None)


def what_is_kept_is_given_away(plant):
    plant(Reservation, "is_delayed_by", lambda *_, is_promised: False)


def priority_is_not_read(plant):
    plant(pending_queues, "queue_position", lambda queue, one: (0, 0, math.inf, one.arrival))


def who_starts_takes_nothing(plant):
    plant(_SchedulingCycle, "_start", lambda self, request, hold, end: None)


def a_repeated_request_gets_another_lease(plant):
    plant(transitions, "_find_existing_lease", lambda book, request, cache: None)


def a_request_stands_behind_itself(plant):
    plant(LeaseRequest, "workflow_step", property(lambda request: object()))


def who_waits_holds_already(plant):
    admit = transitions.admit_or_queue

    def generous(book, request, now, lease, cache):
        after, answer = admit(book, request, now, lease, cache)
        if isinstance(answer, Admitted):
            return after, answer
        return replace(after, leases=(*after.leases, transitions.Lease(lease, request, "A100", now, now))), answer

    plant(kubernetes_ledger, "admit_or_queue", generous)


def a_release_frees_nothing(plant):
    plant(transitions, "release", lambda state, lease, now, cache: state)


def a_release_frees_more_than_its_own(plant):
    plant(transitions, "release", lambda state, lease, now, cache: replace(state, leases=()))


def gpus_come_back_when_they_are_looked_at(plant):
    check = transitions.record_check
    plant(transitions, "record_check", lambda state, due, gone, at, now: check(state, due, due, at, now))


def a_restart_forgets_the_line(plant):
    plant(KubernetesLedger, "__init__", forgetting(KubernetesLedger.__init__))


def forgetting(opened):
    def init(self, *arguments, **options):
        opened(self, *arguments, **options)
        version = self._ledger_object.read()
        self._ledger_object.write(version, replace(version.state, pending=()))

    return init


def a_write_wins_without_a_look_at_the_version(plant):
    """The answer is given and not kept."""
    plant(LedgerObject, "write", lambda self, version, state: version)


CORE = [
    holders_count_twice,
    borrowed_gpus_are_forgotten,
    the_borrowing_limit_is_not_read,
    the_lending_limit_is_not_read,
    the_inventory_is_not_read,
    nobody_can_borrow,
    nothing_is_kept_for_who_is_next,
    what_is_kept_is_given_away,
    priority_is_not_read,
    a_repeated_request_gets_another_lease,
    a_request_stands_behind_itself,
    who_waits_holds_already,
    a_release_frees_nothing,
    a_release_frees_more_than_its_own,
    gpus_come_back_when_they_are_looked_at,
    a_restart_forgets_the_line,
    a_write_wins_without_a_look_at_the_version,
    a_stopped_queue_is_open,
    owners_of_a_queue_are_not_read,
    a_name_that_begins_alike_is_an_owner,
    the_highest_priority_is_not_read,
    the_share_of_the_ledger_is_not_read,
    all_namespaces_have_one_share,
    a_share_is_used_up_twice_as_fast,
    who_starts_takes_nothing,
]


@pytest.mark.parametrize("bug", CORE, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    bug(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        walk(in_cluster)


def rows_are_never_deleted(plant):
    store = sqlite_ledger.store_state
    plant(sqlite_ledger, "store_state", lambda connection, before, after: store(connection, LedgerState(), after))


def leases_are_not_written(plant):
    store = sqlite_ledger.store_state
    plant(
        sqlite_ledger,
        "store_state",
        lambda connection, before, after: store(connection, before, replace(after, leases=before.leases)),
    )


def who_waits_is_not_written(plant):
    store = sqlite_ledger.store_state
    plant(
        sqlite_ledger,
        "store_state",
        lambda connection, before, after: store(connection, before, replace(after, pending=before.pending)),
    )


FILE = [rows_are_never_deleted, leases_are_not_written, who_waits_is_not_written]


@pytest.mark.parametrize("bug", FILE, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_the_file_is_caught(bug, monkeypatch, in_file):
    bug(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        walk(in_file)
