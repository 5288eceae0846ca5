"""The log of a ledger: what a decision writes, what readers follow, and what happens if a part of it is lost.

| what happens                                             | what follows                                          |
|----------------------------------------------------------|-------------------------------------------------------|
| a decision in a ledger of thousands                      | a few kilobytes are written                           |
| services write in turn                                   | each of them, and a new one, has the same state       |
| an answer is lost, of a record or of the head            | one entry, one lease                                  |
| a snapshot is taken while others write                   | the records before it go; a slow reader loads it      |
| a record is deleted, changed, cut off or empty           | refused, and no GPU is granted                        |
| a service still has all leases                           | it writes them anew; all go on, nothing is restarted  |
| no service that runs needs the lost record               | one of them writes a new log all the same             |
| no service has them                                      | the log begins again after the live pods are recorded |
| the head loses entries, or goes back                     | refused                                               |
| two services find the log damaged at once                 | one of them repairs it                                |
"""

import base64
import json
import random
import zlib
from datetime import timedelta
from typing import Any

import pytest
from support.builders.ledger import NOW, LedgerApi, ask, deferral, ledger_api, queues
from support.servers.kube_store import Collection, Place
from support.stories.plugin import Clock
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger import ledger_object, transitions
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.ledger_object import REPAIR_SECONDS, LedgerObject
from tiphys_plugin.quota.ledger.log_entry import StateCodec, encode_changes
from tiphys_plugin.quota.scheduler.cache import SchedulerCache

from tiphys.errors import StoreError
from tiphys.kube import ledger_log
from tiphys.kube.ledger_log import LedgerBook, apply_entries
from tiphys.kube.resources import GPU_LEDGER_RECORDS
from tiphys.kube.whole_ledger import WholeLedgerReader

MANY = queues(research={"A100": 10_000}).model_copy(update={"ledger_share": 1})
LEDGER = Place(Collection("tiphys.dev", "gpuledgers"), "tiphys", "default")
RECORDS = Collection("tiphys.dev", "gpuledgerrecords")
SEED = 20_261_123


@pytest.fixture
def api() -> LedgerApi:
    return ledger_api(MANY)


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Records and snapshots after few entries."""
    monkeypatch.setattr(ledger_log, "SEGMENT_BYTES", 300)
    monkeypatch.setattr(ledger_log, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(ledger_object, "_MIN_SNAPSHOT_BYTES", 10**9)


class Service(KubernetesLedger):
    """A service whose snapshots are taken when `take_snapshots` is called."""

    def __init__(self, api: LedgerApi, clock: Clock) -> None:
        self.due: list[Any] = []
        super().__init__(api, "tiphys", clock=clock, pause=lambda _: None, run_in_background=self.due.append)

    def take_snapshots(self) -> None:
        due = self.due.copy()
        self.due.clear()
        for work in due:
            work()


def names(api: LedgerApi) -> list[str]:
    return sorted(place.name for place in api.store.places() if place.collection == RECORDS)


def log_records(api: LedgerApi) -> list[str]:
    return [name for name in names(api) if name.count(".") == 2]


def drop(api: LedgerApi, name: str) -> None:
    api.delete(GPU_LEDGER_RECORDS, "tiphys", name)


def change(api: LedgerApi, name: str, spec: dict[str, Any]) -> None:
    place = Place(RECORDS, "tiphys", name)
    api.store.write(place, "", lambda before: {**before, "spec": spec})


def change_head(api: LedgerApi, **log: Any) -> None:
    def make(before: Any) -> Any:
        return {**before, "status": {**before["status"], "log": {**before["status"]["log"], **log}}}

    api.store.write(LEDGER, "status", make)


def fill(ledger: KubernetesLedger, number: int, first: int = 0) -> list[str]:
    answers = [ledger.request(ask(1, f"u{n}")) for n in range(first, first + number)]
    return [answer.lease for answer in answers if isinstance(answer, Admitted)]


def uids(ledger: KubernetesLedger) -> list[str]:
    return [one.request.uid for one in ledger.snapshot().leases]


def test_a_decision_in_a_large_ledger_writes_little(api, clock):
    object_ = LedgerObject(api, "tiphys", "default", clock)
    held = tuple(Lease(f"{n:016x}", ask(1, f"holder-{n}"), "A100", NOW, NOW) for n in range(3000))
    line = tuple(PendingRequest(ask(1, f"waiter-{n}", queue="other"), n + 1, NOW, NOW) for n in range(3000))
    object_.write(object_.read(), LedgerState(held, line))
    ledger, written = Service(api, clock), []
    fill(ledger, 1)
    replace, create = api.replace, api.create
    api.replace = lambda resource, namespace, body, part="": (
        written.append(len(json.dumps(body))) or replace(resource, namespace, body, part)
    )
    api.create = lambda resource, namespace, body: (
        written.append(len(json.dumps(body))) or create(resource, namespace, body)
    )
    for lease in fill(ledger, 30, first=1):
        ledger.release(lease)
    assert sum(written) / 60 < 4096
    assert len(Service(api, clock).snapshot().pending) == 3000


def test_every_service_follows_what_the_others_write(api, clock, small_parts):
    draw = random.Random(SEED)
    services = [Service(api, clock) for _ in range(3)]
    held: list[str] = []
    for number in range(120):
        clock.advance(1)
        service = draw.choice(services)
        if held and draw.random() < 0.4:
            service.release(held.pop(draw.randrange(len(held))))
        else:
            held += fill(service, 1, first=number)
        if number % 40 == 39:
            assert services[0].snapshot() == services[1].snapshot() == services[2].snapshot()
            assert Service(api, clock).snapshot() == services[0].snapshot()
    assert len(log_records(api)) > 20
    assert sorted(one.id for one in services[0].snapshot().leases) == sorted(held)


@pytest.mark.parametrize("fault", ["lost", "refused"])
def test_a_lost_answer_of_any_write_makes_one_entry(api, clock, small_parts, fault):
    ledger, faults = Service(api, clock), 0
    for number in range(24):
        pending = [fault] if number % 3 == 0 else []
        api.meanwhile = lambda pending=pending: pending.pop() if pending else ""
        try:
            answer = ledger.request(ask(1, f"u{number}"))
        except StoreError:
            faults += 1
            answer = Service(api, clock).request(ask(1, f"u{number}"))
        assert isinstance(answer, Admitted)
    assert faults == 8
    assert uids(Service(api, clock)) == uids(ledger) == [f"u{number}" for number in range(24)]


def test_a_snapshot_ends_the_records_before_it_and_a_slow_reader_loads_it(api, clock, small_parts, monkeypatch):
    monkeypatch.setattr(ledger_object, "_MIN_SNAPSHOT_BYTES", 2000)
    ledger, slow = Service(api, clock), Service(api, clock)
    slow.snapshot()
    whole = WholeLedgerReader(api, "tiphys", "default")
    whole.read()
    fill(ledger, 10)
    before = log_records(api)
    assert ledger.due
    reader_of_the_middle = Service(api, clock)
    reader_of_the_middle.snapshot()
    fill(ledger, 2, first=10)
    ledger.take_snapshots()
    kept = log_records(api)
    assert len([name for name in before if name in kept]) < len(before) / 2
    assert any(name.count(".") == 3 for name in names(api))
    expected = [f"u{number}" for number in range(12)]
    for reader in (slow, reader_of_the_middle, Service(api, clock), ledger):
        assert uids(reader) == expected
    assert [one["request"]["uid"] for one in whole.read()["status"]["leases"]] == expected


def test_a_snapshot_that_fails_is_taken_later(api, clock, small_parts, monkeypatch):
    monkeypatch.setattr(ledger_object, "_MIN_SNAPSHOT_BYTES", 2000)
    ledger = Service(api, clock)
    fill(ledger, 10)
    api.meanwhile = lambda: "refused"
    ledger.take_snapshots()
    api.meanwhile = lambda: ""
    assert all(name.count(".") == 2 for name in names(api))
    fill(ledger, 20, first=10)
    ledger.take_snapshots()
    assert any(name.count(".") == 3 for name in names(api))
    assert uids(Service(api, clock)) == [f"u{number}" for number in range(30)]


def damage_of(kind: str, api: LedgerApi, name: str) -> None:
    spec = api.store.get(Place(RECORDS, "tiphys", name))["spec"]
    if kind == "deleted":
        drop(api, name)
    elif kind == "changed":
        change(api, name, {**spec, "data": spec["data"][:-4] + "AAA="})
    elif kind == "cut":
        change(api, name, {**spec, "data": spec["data"][: len(spec["data"]) // 2]})
    else:
        data = base64.b64encode(zlib.compress(b"[]")).decode()
        change(api, name, {"data": data, "sha256": ledger_log.hashlib.sha256(data.encode()).hexdigest()})


@pytest.mark.parametrize("kind", ["deleted", "changed", "cut", "empty"])
def test_a_damaged_record_is_refused_and_healed_by_a_service_that_has_the_leases(api, clock, small_parts, kind):
    healthy = Service(api, clock)
    fill(healthy, 12)
    damage_of(kind, api, log_records(api)[1])
    late = Service(api, clock)
    with pytest.raises(LedgerLostError, match=r"the log of GPULedger tiphys/default is damaged: .*No GPUs are granted"):
        late.request(ask(1, "new"))
    with pytest.raises(LedgerLostError):
        late.begin_recovery()
    assert uids(healthy) == [f"u{number}" for number in range(12)], "its read writes them to a new log"
    assert uids(late) == uids(Service(api, clock)) == [f"u{number}" for number in range(12)]
    assert deferral(late.request(ask(1, "new"))) is AdmissionReason.LEDGER_RECOVERING
    late.end_recovery()
    assert isinstance(late.request(ask(1, "new")), Admitted)


def test_a_reader_of_a_damaged_log_sees_the_leases_once_it_is_replaced(api, clock, small_parts):
    service = Service(api, clock)
    fill(service, 12)
    service.replace_damaged_log()
    drop(api, log_records(api)[1])
    whole = WholeLedgerReader(api, "tiphys", "default")
    with pytest.raises(
        StoreError, match=r"is missing, so the leases of GPULedger tiphys/default cannot be shown; .*repe"
    ):
        whole.read()
    service.replace_damaged_log()
    assert len(whole.read()["status"]["leases"]) == 12


def test_a_deleted_chunk_of_a_snapshot_is_healed_too(api, clock, small_parts, monkeypatch):
    monkeypatch.setattr(ledger_object, "_MIN_SNAPSHOT_BYTES", 2000)
    healthy = Service(api, clock)
    fill(healthy, 14)
    healthy.take_snapshots()
    drop(api, next(name for name in names(api) if name.count(".") == 3))
    late = Service(api, clock)
    with pytest.raises(LedgerLostError):
        late.begin_recovery()
    healthy.snapshot()
    assert len(uids(late)) == 14


@pytest.mark.parametrize("kind", ["deleted", "changed"])
@pytest.mark.parametrize("place", ["first", "middle", "last", "snapshot"])
def test_a_service_replaces_a_log_of_which_it_needs_no_record_itself(api, clock, small_parts, monkeypatch, place, kind):
    if place == "snapshot":
        monkeypatch.setattr(ledger_object, "_MIN_SNAPSHOT_BYTES", 2000)
    services = [Service(api, clock) for _ in range(2)]
    for turn, service in enumerate((*services, *services)):
        fill(service, 6, first=6 * turn)
    for service in services:
        service.take_snapshots()
    expected = uids(services[0])
    for service in services:
        service.replace_damaged_log()
    before = names(api)
    records = [name for name in before if name.count(".") == (3 if place == "snapshot" else 2)]
    damage_of(kind, api, {"first": records[0], "last": records[-1]}.get(place, records[len(records) // 2]))
    with pytest.raises(LedgerLostError):
        Service(api, clock).snapshot()
    services[1].replace_damaged_log()
    after = names(api)
    for service in (services[0], services[1]):
        service.replace_damaged_log()
    assert names(api) == after, "one new log is enough"
    assert uids(Service(api, clock)) == uids(services[0]) == uids(services[1]) == expected
    assert isinstance(services[0].request(ask(1, "new")), Admitted)


def test_a_log_is_not_replaced_because_a_snapshot_ended_its_records(api, clock, small_parts, monkeypatch):
    monkeypatch.setattr(ledger_object, "_MIN_SNAPSHOT_BYTES", 2000)
    writes, looks = Service(api, clock), Service(api, clock)
    for turn in range(6):
        fill(writes, 6, first=6 * turn)
        looks.replace_damaged_log()
        writes.take_snapshots()
    assert len({name.split(".")[1] for name in names(api)}) == 1
    assert len(uids(Service(api, clock))) == 36


def test_records_of_a_replaced_log_are_deleted_after_an_hour(api, clock, small_parts, monkeypatch):
    ledger = Service(api, clock)
    fill(ledger, 12)
    ledger.replace_damaged_log()
    old = names(api)
    drop(api, old[1])
    ledger.replace_damaged_log()
    monkeypatch.setattr(
        ledger_object, "_ABANDONED_AFTER", timedelta(days=-36_500)
    )  # the API server has a clock of its own
    monkeypatch.setattr(ledger_object, "_MIN_SNAPSHOT_BYTES", 2000)
    fill(ledger, 12, first=12)
    assert ledger.due
    ledger.take_snapshots()
    assert not set(old) & set(names(api))


def test_a_service_that_follows_does_not_skip_a_gap(api, clock, small_parts):
    writes, follows = Service(api, clock), Service(api, clock)
    fill(writes, 4)
    follows.snapshot()
    fill(writes, 8, first=4)
    drop(api, log_records(api)[-2])
    with pytest.raises(LedgerLostError, match="is missing"):
        follows.request(ask(1, "new"))


@pytest.mark.parametrize("later_seconds", [REPAIR_SECONDS, -3600], ids=["same clock", "clock set back"])
def test_a_log_that_cannot_be_healed_begins_again_and_every_service_records_live_pods_first(
    api, clock, small_parts, monkeypatch, later_seconds
):
    lost = Service(api, clock)
    held = fill(lost, 12)
    drop(api, log_records(api)[1])
    services = [Service(api, clock) for _ in range(2)]
    for _ in range(2):
        for service in services:
            with pytest.raises(LedgerLostError):
                service.begin_recovery()
        clock.advance(5)
    clock.advance(later_seconds)
    services[0].begin_recovery()
    assert deferral(services[0].request(ask(1, "new"))) is AdmissionReason.LEDGER_RECOVERING
    services[0].restore(held[0], ask(1, "u0"), "A100")
    with pytest.raises(LedgerLostError, match="begun without its leases"):
        lost.request(ask(1, "new"))
    services[1].begin_recovery()
    services[1].restore(held[1], ask(1, "u1"), "A100")
    for service in services:
        service.end_recovery()
        assert uids(service) == ["u0", "u1"]
    monkeypatch.setattr(ledger_object, "MAX_ENTRY_BYTES", 1)
    assert isinstance(services[0].request(ask(1, "new")), Admitted)
    with pytest.raises(LedgerLostError, match="begun without its leases"):
        lost.request(ask(1, "new"))  # also after another log has followed


def test_a_service_that_knew_the_state_before_a_loss_grants_nothing_before_its_own_recovery(api, clock, small_parts):
    knew = Service(api, clock)
    fill(knew, 12)
    name = log_records(api)[1]
    drop(api, name)
    broken = Service(api, clock)
    with pytest.raises(LedgerLostError):
        broken.begin_recovery()
    clock.advance(REPAIR_SECONDS + 1)
    broken.begin_recovery()
    broken.end_recovery()
    with pytest.raises(LedgerLostError):
        knew.request(ask(10_000, "greedy"))


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ({"number": 2, "entries": []}, "went back from entry"),
        ({"number": 40}, "their numbers do not end with the number of the log"),
        ({"chunks": -1}, "log: Input should be greater than or equal to 0"),
        ({"owner": "me"}, "log: Extra inputs"),
    ],
)
def test_a_head_that_is_wrong_is_refused(api, clock, small_parts, log, says):
    ledger = Service(api, clock)
    fill(ledger, 13)
    change_head(api, **log)
    with pytest.raises(StoreError, match=says):
        ledger.request(ask(1, "new"))
    if "number" not in log:
        with pytest.raises(StoreError):
            Service(api, clock).request(ask(1, "new"))


def test_entries_cut_from_the_head_are_missed_by_readers_that_need_them(api, clock, small_parts):
    ledger = Service(api, clock)
    fill(ledger, 13)
    change_head(api, entries=[])
    late = Service(api, clock)
    with pytest.raises(LedgerLostError, match="is missing"):
        late.begin_recovery()
    ledger.snapshot()
    assert len(uids(late)) == 13


@pytest.mark.parametrize("after_another", [True, False])
def test_a_change_that_is_too_large_for_an_entry_is_kept(api, clock, monkeypatch, after_another):
    monkeypatch.setattr(ledger_object, "MAX_ENTRY_BYTES", 5000)
    object_ = LedgerObject(api, "tiphys", "default", clock)
    one = LedgerState((Lease("one", ask(1, "u0"), "A100", NOW, NOW),))
    if after_another:
        object_.write(object_.read(), one)
    many = LedgerState((*one.leases, *(Lease(f"l{n}", ask(1, f"u{n}"), "A100", NOW, NOW) for n in range(1, 100))))
    object_.write(object_.read(), many)
    assert len(json.dumps(api.store.get(LEDGER))) < 5000
    assert LedgerObject(api, "tiphys", "default", clock).read().state == many
    assert object_.read().state == many


def test_changes_lead_from_one_state_to_the_next(clock):
    draw = random.Random(SEED)
    before, cache = LedgerState(queues=queues(research={"A100": 8})), SchedulerCache()
    book: LedgerBook[Lease, PendingRequest] = LedgerBook()
    for number in range(300):
        clock.advance(draw.choice([1, 60]))
        uid = f"u{draw.randrange(30)}"
        match draw.randrange(6):
            case 0 if before.leases:
                after = transitions.release(before, draw.choice(before.leases).id, clock.now, cache)
            case 1:
                after = transitions.withdraw(before, uid)
            case 2:
                after = transitions.record_check(before, before.leases, (), clock.now, clock.now)
            case 3:
                after = transitions.record_repeats(before, {one.request.key: clock.now for one in before.pending})
            case _:
                asked = ask(draw.choice([1, 4, 8]), uid, priority=draw.choice([0, 1]))
                after, _ = transitions.admit_or_queue(before, asked, clock.now, f"l{number}", cache)
        entry = json.loads(json.dumps(encode_changes(before, after, cache)))
        book = apply_entries(book, [entry], StateCodec())
        assert LedgerState(*book) == after
        before = after


def test_an_entry_that_does_not_fit_the_book_is_refused(api, clock):
    ledger = Service(api, clock)
    fill(ledger, 3)
    entries = api.store.get(LEDGER)["status"]["log"]["entries"]
    change_head(api, entries=[*entries[:-1], {"n": 3, "ended": ["unknown"]}])
    with pytest.raises(LedgerLostError, match="does not fit those before it"):
        Service(api, clock).snapshot()
