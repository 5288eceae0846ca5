"""The ledger on a real API server: schema, compare-and-swap, size, and what kubectl shows."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.builders.ledger import ask, queues, spec
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.flavors import Flavor
from tiphys_plugin.quota.lease import Admitted, Deferred, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.ledger_object import LedgerObject
from tiphys_plugin.quota.ledger.status_codec import encode_state
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import load_queues, parse_queues

from hera_pipelines.cli import main
from tiphys.errors import ConflictError, StoreError, UsageError
from tiphys.kube import KubeApi, connect_to_cluster
from tiphys.kube.resources import GPU_LEDGER_RECORDS, GPU_LEDGERS
from tiphys.kube.whole_ledger import WholeLedgerReader
from tiphys.records import utc_now

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EIGHT = queues(research={"A100": 8, "*": 4}, nightly={"*": 2})
SHARED = {"name": "a", "gpus": {"A100": 8}, "cohort": "lab"}
THREADS, GRANTS = 4, 5


@pytest.fixture
def ledger(api: KubeApi) -> KubernetesLedger:
    declare(api)
    return KubernetesLedger(api, api.namespace)


def declare(api: KubeApi) -> None:
    inventory = {"A100": {"count": 8, "memory_mb": 81920}, "T4": {"count": 4}}
    document = {"metadata": {"name": "default"}, "spec": {**spec(EIGHT), "inventory": inventory}}
    api.create(GPU_LEDGERS, api.namespace, document)


def test_ledger_without_queues_is_made_by_the_service(api):
    ledger = KubernetesLedger(api, api.namespace)
    assert isinstance(ledger.request(ask(100)), Admitted)
    assert KubernetesLedger(api, api.namespace).snapshot() == ledger.snapshot()


def test_decisions_are_kept_as_they_were_made(api, ledger):
    first = ledger.request(ask(8, min_gpu_memory_mb=40000, priority=5))
    second = ledger.request(ask(2, "u2"))
    restarted = KubernetesLedger(api, api.namespace)
    assert isinstance(first, Admitted)
    assert isinstance(second, Deferred)
    assert restarted.snapshot() == ledger.snapshot()
    assert restarted.request(ask(8, min_gpu_memory_mb=40000, priority=5)) == Admitted(first.lease, "A100")
    restarted.release(first.lease)
    assert isinstance(ledger.request(ask(2, "u2")), Admitted)


def test_edit_of_the_spec_leaves_the_status_alone_and_counts_at_once(api, ledger):
    ledger.request(ask(4))
    found = api.get(GPU_LEDGERS, api.namespace, "default")
    assert found is not None
    lowered = {**found, "spec": spec(queues(research={"A100": 4})), "status": {"version": 1}}
    api.replace(GPU_LEDGERS, api.namespace, lowered)
    assert len(ledger.snapshot().leases) == 1
    assert isinstance(ledger.request(ask(1, "u2")), Deferred)


def test_write_on_an_old_version_is_refused(api, ledger):
    one, other = (LedgerObject(api, api.namespace, "default") for _ in range(2))
    old, lease = one.read(), Lease("one", ask(8), "A100", utc_now(), utc_now())
    other.write(other.read(), LedgerState((lease,)))
    with pytest.raises(ConflictError):
        one.write(old, LedgerState())
    assert one.read().state.leases == (lease,)


def test_services_never_hold_more_than_the_quota_together(api, cluster, ledger):
    def service(number: int) -> int:
        own = connect_to_cluster(cluster.kubeconfig)
        mine, most = KubernetesLedger(own, api.namespace), 0
        for n in range(GRANTS):
            request = ask((1, 3, 5)[n % 3], uid=f"{number}-{n}")
            while not isinstance(answer := insist(lambda: mine.request(request)), Admitted):  # noqa: B023
                pass
            most = max(most, sum(lease.request.gpus for lease in mine.snapshot().leases))
            insist(lambda: mine.release(answer.lease))
        return most

    with ThreadPoolExecutor(THREADS) as pool:
        assert max(pool.map(service, range(THREADS))) <= 8
    assert ledger.snapshot().leases == ledger.snapshot().pending == ()


def insist(call):
    """Ask again, as Argo does, when others were faster every time."""
    while True:
        try:
            return call()
        except StoreError as error:
            assert "changed by others" in str(error), error


def test_thousands_of_entries_are_kept_in_records_that_are_deleted_after_a_snapshot(api, ledger):
    now = utc_now()
    requests = [ask(8, f"{n:08}-1111-2222-3333-444444444444", run="r" * 40) for n in range(6000)]
    waiting = tuple(PendingRequest(request, n + 1, now, now) for n, request in enumerate(requests))
    kept = LedgerObject(api, api.namespace, "default")
    version = kept.write(kept.read(), LedgerState(pending=waiting[:3000]))
    for end in range(3100, 6001, 100):
        version = kept.write(version, LedgerState(pending=waiting[:end]))
    assert LedgerObject(api, api.namespace, "default").read().state.pending == waiting
    kept.take_snapshot(version)
    version = kept.write(version, LedgerState(pending=waiting[1:]))
    before = len(api.list(GPU_LEDGER_RECORDS, api.namespace).items)
    assert kept.delete_unused_records() > 20
    assert len(api.list(GPU_LEDGER_RECORDS, api.namespace).items) < before - 20
    assert LedgerObject(api, api.namespace, "default").read().state.pending == waiting[1:]


def test_a_record_is_never_changed_and_goes_with_its_ledger(api, cluster, ledger):
    kept = LedgerObject(api, api.namespace, "default")
    version = kept.write(kept.read(), LedgerState(pending=(PendingRequest(ask(8), 1, utc_now(), utc_now()),)))
    kept.take_snapshot(version)
    [record] = api.list(GPU_LEDGER_RECORDS, api.namespace).items
    with pytest.raises(UsageError, match="a record is never changed"):
        api.replace(GPU_LEDGER_RECORDS, api.namespace, {**record, "spec": {**record["spec"], "sha256": "0"}})
    api.delete(GPU_LEDGERS, api.namespace, "default")
    cluster.wait("it goes with the ledger", lambda: not api.list(GPU_LEDGER_RECORDS, api.namespace).items)


def test_a_deleted_record_is_healed_without_a_restart(api, ledger):
    requests = [ask(1, f"u{n}", queue="nightly", gpu_type="T4", run="r" * 60) for n in range(40)]
    for request in requests:
        ledger.request(request)
    expected = [one.request.uid for one in ledger.snapshot().pending]
    api.delete(
        GPU_LEDGER_RECORDS, api.namespace, api.list(GPU_LEDGER_RECORDS, api.namespace).items[0]["metadata"]["name"]
    )
    late = KubernetesLedger(api, api.namespace)
    with pytest.raises(LedgerLostError, match="is missing"):
        late.snapshot()
    with pytest.raises(LedgerLostError):
        late.begin_recovery()
    assert [one.request.uid for one in ledger.snapshot().pending] == expected
    late.begin_recovery()
    late.end_recovery()
    assert [one.request.uid for one in late.snapshot().pending] == expected


@pytest.mark.parametrize(
    ("queues", "says"),
    [
        ([{"name": "a", "gpus": {"A100": -1}}], "greater than or equal to 0"),
        ([{"name": "a", "gpus": {"A100": "8"}}], "must be of type integer"),
        ([{"name": "", "gpus": {}}], "should be at least 1 chars long"),
        ([{"name": "a"}], "Required value"),
        ([{"name": "a", "gpus": {"A100": 8}, "lending_limit": {"A100": 1}}], "no queue to borrow from or to lend to"),
        ([{**SHARED, "borrowing_limit": {"T4": 1}}], "a GPU type of which the queue has no quota"),
        ([{**SHARED, "lending_limit": {"A100": 9}}], "lending_limit is more than the queue's quota"),
        ([{**SHARED, "weight": 0}], "should be greater than 0"),
        ([{**SHARED, "order": "shortest"}], "Unsupported value"),
        ([{**SHARED, "attained_gpu_hours": [1]}], "goes by arrival has no levels of GPU time"),
        ([{**SHARED, "preempts_longer": True}], "goes by arrival has no levels of GPU time"),
        ([{**SHARED, "order": "attained", "attained_gpu_hours": [8, 1]}], "have to rise from one to the next"),
        ([{**SHARED, "order": "attained", "attained_gpu_hours": [8, 8]}], "Duplicate value"),
        ([{"name": "a", "gpus": {}}, {"name": "a", "gpus": {}}], "Duplicate value"),
        (None, "Required value"),
    ],
)
def test_wrong_queues_are_refused_by_the_server(api, queues, says):
    body = {"metadata": {"name": "default"}, "spec": {"queues": queues} if queues is not None else {}}
    with pytest.raises(UsageError, match=says):
        api.create(GPU_LEDGERS, api.namespace, body)


def test_every_field_of_a_queue_file_is_kept(api, cluster, tmp_path):
    """A field that the kind does not declare would be dropped in silence."""
    text = (DOCS / "queues.md").read_text()
    file = tmp_path / "queues.yaml"
    place = ["-n", api.namespace, "--kubeconfig", str(cluster.kubeconfig)]
    queues, flavors = set(), set()
    for written in (block.split("```")[0] for block in text.split("```yaml\n")[1:]):
        if "queues:" not in written:
            continue
        file.write_text(written)
        assert main(["queues", "apply", "-f", str(file), *place]) == 0
        kept = parse_queues(api.get(GPU_LEDGERS, api.namespace, "default")["spec"], "the ledger")
        assert kept == load_queues(file)
        queues |= {field for queue in kept.queues for field in queue.model_fields_set}
        flavors |= {field for flavor in kept.flavors for field in flavor.model_fields_set}
    assert queues == set(Queue.model_fields)
    assert flavors == set(Flavor.model_fields)


def test_status_keeps_what_a_later_version_writes(api, ledger):
    ledger.request(ask(8))
    found = api.get(GPU_LEDGERS, api.namespace, "default")
    assert found is not None
    newer = {**found["status"], "log": {**found["status"]["log"], "cohort": "b"}}
    assert api.replace(GPU_LEDGERS, api.namespace, {**found, "status": newer}, "status")["status"] == newer
    with pytest.raises(StoreError, match=r"status of GPULedger .* is damaged: log: Extra inputs"):
        ledger.request(ask(1, "u2"))


def test_ledger_that_was_deleted_is_not_begun_anew(api, ledger):
    ledger.request(ask(8))
    api.delete(GPU_LEDGERS, api.namespace, "default")
    with pytest.raises(StoreError, match="was deleted while leases were kept in it"):
        ledger.request(ask(8, "u2"))
    declare(api)
    with pytest.raises(StoreError, match="is another object of the same name"):
        ledger.request(ask(8, "u2"))


def test_kubectl_shows_what_is_held_and_what_waits(api, cluster, ledger):
    ledger.request(ask(8))
    ledger.request(ask(2, "u2", queue="nightly", gpu_type="T4"))
    ledger.request(ask(2, "u3"))
    header, row = cluster.kubectl("get", "gpul", "--namespace", api.namespace).splitlines()
    assert header.split() == ["NAME", "GPUS", "HELD", "LEASES", "WAITING", "AGE"]
    assert row.split()[:6] == ["default", "10", "nightly", "2,", "research", "8"]
    assert row.split()[6:8] == ["2", "1"]


def test_queues_are_applied_and_shown_from_a_desk(api, cluster, tmp_path, capsys):
    file = tmp_path / "queues.yaml"
    place = ["-n", api.namespace, "--kubeconfig", str(cluster.kubeconfig)]
    for quota in (8, 4):
        file.write_text(f"queues: [{{name: research, gpus: {{A100: {quota}}}}}]\n")
        assert main(["queues", "apply", "-f", str(file), *place]) == 0
        KubernetesLedger(api, api.namespace).request(ask(8))
    assert "warning: queue research holds 8 A100 and may hold 4" in capsys.readouterr().err
    assert main(["queues", "show", *place]) == 0
    assert ["research", "A100", "4", "4", "8", "0"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_stored_ledger_equals_the_state_of_the_service(api, ledger):
    ledger.request(ask(8))
    whole = WholeLedgerReader(api, api.namespace, "default").read()
    assert whole is not None
    assert whole["status"] == encode_state(LedgerState(ledger.snapshot().leases))
