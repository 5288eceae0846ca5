"""A real Kueue admits, evicts and counts the Workloads of Tiphys as `docs/kueue.md` says."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from support.processes.polling import until
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, LeaseRequest, Rejected

from tiphys.errors import StoreError
from tiphys.kube.resources import KUEUE_WORKLOADS

from .conftest import GPUS, Rig

SERVICES, ATTEMPTS, SEED = 3, 60, 7


def test_admitted_attempt_has_the_labels_of_its_flavor_until_it_is_released(rig: Rig) -> None:
    answer = rig.admitted(8)
    assert answer.pool == rig.name
    assert answer.flavor is not None
    assert answer.flavor.node_selector == {"nvidia.com/gpu.product": "A100", "pool": "reserved"}
    assert rig.service().request(rig.ask(8)) == answer, "another service gives the same answer"
    rig.wait_until_used(8)
    rig.backend.release(answer.lease)
    rig.wait_until_used(0)
    assert rig.backend.snapshot().leases == ()


def test_reasons_are_those_of_kueue(rig: Rig) -> None:
    rig.admitted(6)
    waiting = rig.wait_for_words(rig.ask(4, "u2"), "insufficient unused quota")
    assert (waiting.reason, waiting.position) == (AdmissionReason.WAITING_FOR_QUOTA, 1)
    large = rig.wait_for_words(rig.ask(16, "u3"), "maximum capacity")
    assert large.reason is AdmissionReason.EXCEEDS_MAX_QUOTA
    other = rig.wait_for_words(rig.ask(1, "u4", gpu_type="H100"), "doesn't match node affinity")
    assert other.reason is AdmissionReason.NO_MATCHING_GPU_TYPE


def test_unknown_local_queue_is_rejected(rig: Rig) -> None:
    answer = rig.backend.request(rig.ask(1, queue="reserch"))
    assert isinstance(answer, Rejected)
    assert "it has: research" in answer.message


def test_stopped_queue_defers_and_goes_on(rig: Rig) -> None:
    rig.patch_queue(stopPolicy="Hold")
    request = rig.ask(8)
    stopped = rig.wait_for_words(request, "is inactive")
    assert stopped.reason is AdmissionReason.QUEUE_STOPPED
    rig.patch_queue(stopPolicy="None")
    rig.wait_for(request, Admitted)


def test_preempted_attempt_keeps_its_gpus_until_it_is_released(rig: Rig) -> None:
    low = rig.admitted(8, "low")
    high = rig.ask(8, "high", priority=10)
    waiting = rig.wait_for_words(high, "preemption")
    assert waiting.reason is AdmissionReason.WAITING_FOR_PREEMPTED_CHECKPOINT
    [lease] = rig.backend.snapshot().leases
    assert lease.id == low.lease
    assert lease.preemption is not None
    assert lease.preemption.preemptor == ("high", "fit")
    assert isinstance(rig.backend.request(high), Deferred), "its pods still save"
    rig.wait_until_used(8)
    rig.backend.release(low.lease)
    rig.wait_for(high, Admitted)
    rig.wait_until_used(8)


def test_eviction_before_the_grant_returns_the_quota_and_keeps_the_place(rig: Rig) -> None:
    low = rig.ask(8, "low")
    rig.backend.request(low)
    rig.wait_until_used(8)
    high = rig.ask(8, "high", priority=10)
    rig.wait_for_words(high, "preemption")
    assert isinstance(rig.backend.request(low), Deferred)
    answer = rig.wait_for(high, Admitted)
    assert [lease.request.uid for lease in rig.backend.snapshot().leases] == ["high"]
    rig.backend.release(answer.lease)
    rig.wait_for(low, Admitted)


def test_deactivated_workload_is_asked_to_exit(rig: Rig) -> None:
    answer = rig.admitted(8)
    rig.patch_workload(answer.lease, active=False)
    until(lambda: rig.backend.snapshot().leases[0].preemption is not None)
    rig.backend.release(answer.lease)
    rig.wait_until_used(0)


def test_drained_queue_asks_its_attempts_to_exit(rig: Rig) -> None:
    answer = rig.admitted(8)
    rig.patch_queue(stopPolicy="HoldAndDrain")
    until(lambda: rig.backend.snapshot().leases[0].preemption is not None)
    rig.wait_until_used(8)
    rig.backend.release(answer.lease)
    rig.wait_until_used(0)


def test_gang_starts_as_a_whole(rig: Rig) -> None:
    rig.admitted(4, "u0")
    gang = rig.ask(8, members=4)
    rig.wait_for_words(gang, "insufficient unused quota")
    rig.wait_until_used(4)


def test_elastic_gang_starts_smaller_and_returns_lost_members(rig: Rig) -> None:
    rig.admitted(4, "u0")
    answer = rig.admitted(1, members=1, min_members=1, max_members=8)
    assert answer.members == 4
    rig.wait_until_used(8)
    rig.backend.shrink(answer.lease, 2)
    rig.wait_until_used(6)
    rig.backend.shrink(answer.lease, 1)
    rig.wait_until_used(5)


def test_spot_nodes_are_only_for_steps_that_may_use_them(rig: Rig) -> None:
    spot = rig.add_spot_flavor()
    only = rig.admitted(4, "only", spot="only")
    assert (only.pool, only.flavor is not None and only.flavor.spot) == (spot, True)
    assert only.flavor is not None
    assert [one.key for one in only.flavor.tolerations] == ["spot"]
    assert rig.admitted(8, "plain").pool == rig.name
    rig.wait_for_words(rig.ask(1, "late"), "untolerated taint")
    assert rig.admitted(4, "allowed", spot="allowed").pool == spot


def test_deleted_workload_of_a_running_attempt_is_counted_again(rig: Rig) -> None:
    answer = rig.admitted(8)
    rig.api.delete(KUEUE_WORKLOADS, rig.name, answer.lease.partition("/")[2])
    rig.admitted(4, "u2")
    assert rig.backend.restore(answer.lease, rig.ask(8), rig.name) == 8
    rig.wait_until_used(12)
    rig.wait_for_words(rig.ask(1, "u3"), "insufficient unused quota")


def test_withdrawn_request_leaves_nothing(rig: Rig) -> None:
    rig.backend.request(rig.ask(8))
    rig.wait_until_used(8)
    rig.backend.withdraw("u1")
    rig.wait_until_used(0)
    assert rig.api.list(KUEUE_WORKLOADS, rig.name).items == []


def test_services_that_die_never_grant_too_much_and_lose_nothing(rig: Rig) -> None:
    """Attempts of several services at once; each answer may get lost, so an attempt is asked for by several."""
    lock, held, most, ended = threading.Lock(), Counter[str](), Counter[str](), set()
    services = [rig.service() for _ in range(SERVICES)]

    def request_of(number: int) -> LeaseRequest:
        return rig.ask(1 + number % 4, f"u{number}", priority=number % 3)

    def live(number: int) -> None:
        choose = random.Random(f"{SEED}/{number}")
        request = request_of(number)
        while True:
            try:
                answer = choose.choice(services).request(request)
            except StoreError:
                continue
            if not isinstance(answer, Admitted) or choose.random() < 0.3:  # this service died with its answer
                continue
            with lock:
                held[answer.lease] = request.gpus
                most["gpus"] = max(most["gpus"], held.total())
            for _ in range(choose.randrange(3)):
                assert choose.choice(services).request(request) == answer
            with lock:
                del held[answer.lease]  # its pods are gone
                ended.add(number)
            choose.choice(services).release(answer.lease)
            return

    print(f"seed {SEED}")  # noqa: T201
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(live, range(ATTEMPTS)))
    assert ended == set(range(ATTEMPTS))
    assert 0 < most["gpus"] <= GPUS
    rig.wait_until_used(0)
