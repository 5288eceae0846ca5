"""Flavors: which GPUs a request gets, what a lease of a flavor counts against, and what a file may not say of them.

| request                                  | draws from                                               |
|------------------------------------------|----------------------------------------------------------|
| of a type with flavors                   | the first flavor of its queue, in order, that has room   |
| the same, where only others can lend     | room within a quota goes before borrowing                |
| of a type without flavors                | its type, or ``*``, as ever                              |
| of no type                               | what its queue names; never ``*``                        |
| with spot "no", "allowed", "only"        | no spot flavor, any, only those                          |
| on nodes                                 | nodes of the flavor, and no others                       |
| of another resource than nvidia.com/gpu  | flavors of this resource, and no others                  |
"""

from dataclasses import replace

import pytest
from support.builders.ledger import NOW, ask, deferral, lease, waiting
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, LedgerState, Rejected
from tiphys_plugin.quota.ledger.usage import compute_queue_usage
from tiphys_plugin.quota.queues import Queues, parse_queues
from tiphys_plugin.quota.scheduler.decide import decide_admission
from tiphys_plugin.quota.scheduler.pool_options import list_eligible_pools

from tiphys.errors import UsageError

OWN = {"name": "own", "gpu_type": "A100", "memory_mb": 81920, "node_labels": {"pool": "own"}}
SPOT = {
    "name": "spot",
    "gpu_type": "A100",
    "memory_mb": 40960,
    "node_labels": {"pool": "spot"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "spot": True,
}
BIG = {"name": "big", "gpu_type": "H100", "node_labels": {"pool": "big"}}


def rules(*queues: dict, flavors=(OWN, SPOT, BIG), **more) -> Queues:
    return Queues.model_validate({"queues": queues, "flavors": flavors, **more})


def queue(name: str = "research", **fields) -> dict:
    return {"name": name, "gpus": {"own": 8, "spot": 8, "T4": 2, "*": 2}, **fields}


def given(declared: Queues, request, *leases, line=()):
    return decide_admission(LedgerState(tuple(leases), tuple(line), queues=declared), request, 10, NOW)


def pool(answer) -> str:
    assert isinstance(answer, Admitted), answer
    return answer.pool


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ask(4), "own"),
        (ask(4, spot="allowed"), "own"),
        (ask(4, spot="only"), "spot"),
        (ask(4, gpu_type=None), "own"),
        (ask(2, gpu_type="T4"), "T4"),
        (ask(2, gpu_type="L4"), "*"),
        (ask(4, spot="allowed", min_gpu_memory_mb=50_000), "own"),
    ],
)
def test_a_request_gets_the_first_flavor_that_suits(request_, expected):
    assert pool(given(rules(queue()), request_)) == expected


def test_the_queue_says_which_flavor_is_tried_first():
    cheap = rules(queue(flavor_order=["spot"]))
    assert pool(given(cheap, ask(4, spot="allowed"))) == "spot"
    assert pool(given(cheap, ask(4))) == "own"
    assert pool(given(cheap, ask(4, spot="allowed"), lease(6, "a", "spot"))) == "own"


def test_room_within_a_quota_goes_before_gpus_of_others():
    shared = rules(
        {"name": "research", "gpus": {"own": 2, "spot": 4}, "cohort": "lab"},
        {"name": "nightly", "gpus": {"own": 8}, "cohort": "lab"},
    )
    assert pool(given(shared, ask(4, spot="allowed"))) == "spot"
    assert pool(given(shared, ask(4))) == "own", "it borrows where it may not use the other"


@pytest.mark.parametrize(
    ("request_", "reason", "words"),
    [
        (ask(1, gpu_type="H100"), AdmissionReason.NO_MATCHING_GPU_TYPE, "queue research has no H100"),
        (ask(1, min_gpu_memory_mb=90_000), AdmissionReason.NO_MATCHING_GPU_TYPE, "has no A100"),
        (ask(9), AdmissionReason.EXCEEDS_MAX_QUOTA, "at most 8"),
        (ask(1, gpu_type="own"), AdmissionReason.NO_MATCHING_GPU_TYPE, "has no own"),
    ],
)
def test_a_request_that_no_flavor_of_the_queue_can_serve_is_rejected(request_, reason, words):
    answer = given(rules(queue()), request_)
    assert isinstance(answer, Rejected)
    assert answer.reason is reason
    assert words in answer.message


def test_a_step_reads_that_it_would_have_to_allow_spot_nodes():
    only_spot = rules({"name": "research", "gpus": {"spot": 8}}, flavors=(SPOT,))
    answer = given(only_spot, ask(1))
    assert isinstance(answer, Rejected)
    assert "spot=True" in answer.message
    exists = rules({"name": "research", "gpus": {"spot": 8}}, flavors=(SPOT,), inventory={"spot": {"count": 8}})
    typed, untyped = (given(exists, ask(1, gpu_type=kind)).message for kind in ("A100", None))
    assert "no flavor of A100 is for this step" in typed
    assert "no flavor of any type is for this step" in untyped
    assert "spot=True" in typed
    stays = rules({"name": "research", "gpus": {"own": 8}}, flavors=(OWN,), inventory={"own": {"count": 8}})
    assert pool(given(stays, ask(1, spot="allowed"))) == "own"
    answer = given(rules({"name": "research", "gpus": {"own": 8}}), ask(1, spot="only"))
    assert "spot nodes only" in answer.message


def test_a_step_without_a_type_reads_why_the_star_is_not_for_it():
    answer = given(rules({"name": "research", "gpus": {"*": 8}}), ask(1, gpu_type=None))
    assert isinstance(answer, Rejected)
    assert answer.message.endswith("name one (gpu_type), or give the queue a quota of a flavor")


def test_a_waiting_request_reads_its_flavors_by_name():
    answer = given(rules(queue()), ask(4, spot="allowed"), lease(6, "a", "own"), lease(8, "b", "spot"))
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.WAITING_FOR_QUOTA
    assert "6 of 8 own, 8 of 8 spot" in answer.message


def test_gpus_that_exist_are_counted_by_flavor():
    few = rules(
        {"name": "research", "gpus": {"own": 8, "spot": 8}},
        flavors=(OWN, SPOT),
        inventory={"own": {"count": 8}, "spot": {"count": 2}},
    )
    assert pool(given(few, ask(2, spot="only"), lease(7, "a", "own"))) == "spot"
    answer = given(few, ask(2, spot="only"), lease(1, "a", "spot"))
    assert isinstance(answer, Deferred)
    assert "1 of 2 spot of the cluster are in use" in answer.message
    assert few.gpu_inventory["own"].memory_mb == 81920


def test_the_flavor_of_the_node_decides():
    nodes = [
        {"name": "n1", "gpu_type": "A100", "gpus": 8, "labels": {"pool": "spot", "disk": "fast"}},
        {"name": "n2", "gpu_type": "A100", "gpus": 4, "labels": {"pool": "own"}},
        {"name": "n3", "gpu_type": "A100", "gpus": 8},
        {"name": "n4", "gpu_type": "L4", "gpus": 2},
    ]
    placed = rules({"name": "research", "gpus": {"own": 32, "spot": 32, "*": 32}}, flavors=(OWN, SPOT), nodes=nodes)
    assert {kind: one.count for kind, one in placed.gpu_inventory.items()} == {"own": 4, "spot": 8, "L4": 2}
    assert given(placed, ask(4)).nodes == ("n2",)
    assert given(placed, ask(4, spot="only")).nodes == ("n1",)
    assert given(placed, ask(8, gpu_type=None, members=2, spot="allowed")).nodes == ("n1", "n1")
    assert given(placed, ask(1, gpu_type="L4")).nodes == ("n4",)
    answer = given(placed, ask(8))
    assert isinstance(answer, Rejected), "n3 is of no flavor, and n1 of another"
    assert "the cluster has 4" in answer.message


def test_a_request_without_a_type_gets_no_gpus_without_known_nodes():
    rest = rules({"name": "research", "gpus": {"*": 8}})
    assert isinstance(given(rest, ask(1, gpu_type=None)), Rejected)
    assert pool(given(Queues.model_validate({"queues": [{"name": "research", "gpus": {"*": 8}}]}), ask(1))) == "*"


@pytest.mark.parametrize("declared", [{}, {"inventory": {"own": {"count": 8}, "spot": {"count": 8}}}])
def test_leases_from_before_there_were_flavors_count_in_all_of_their_type(declared):
    now = rules({"name": "research", "gpus": {"own": 8, "spot": 8}}, flavors=(OWN, SPOT), **declared)
    before = lease(6, "a", "A100")
    assert compute_queue_usage(LedgerState((before,), queues=now))[0].held == 6
    answer = given(now, ask(4, spot="allowed", gpu_type="A100"), before, lease(6, "b", "spot"))
    assert deferral(answer) is AdmissionReason.WAITING_FOR_QUOTA
    if declared:
        assert deferral(given(now, ask(4, spot="only"), before)) is AdmissionReason.WAITING_FOR_INVENTORY, (
            "they may be spot ones"
        )


def test_leases_of_a_flavor_that_is_gone_go_on_to_count():
    gone = replace(lease(6, "a", "old"), request=ask(6, "a"))
    now = rules({"name": "research", "gpus": {"own": 8}}, flavors=(OWN,), inventory={"own": {"count": 8}})
    assert deferral(given(now, ask(4), gone)) is AdmissionReason.WAITING_FOR_QUOTA
    untyped = replace(gone, request=ask(6, "a", gpu_type=None))
    assert deferral(given(now, ask(4), untyped)) is AdmissionReason.WAITING_FOR_INVENTORY
    assert pool(given(now, ask(2), untyped)) == "own"
    none_left = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]})
    assert deferral(given(none_left, ask(4), gone)) is AdmissionReason.WAITING_FOR_QUOTA


def test_a_flavor_that_the_queue_no_longer_names_counts_in_another_of_the_type():
    now = rules({"name": "research", "gpus": {"own": 8}}, flavors=(OWN, SPOT))
    assert deferral(given(now, ask(4), lease(6, "a", "spot"))) is AdmissionReason.WAITING_FOR_QUOTA


def test_usage_is_by_flavor():
    held, line = (lease(3, "a", "spot"), lease(1, "b", "*", gpu_type="L4")), (waiting(4, 1), waiting(2, 2, spot="only"))
    book = LedgerState(held, line, queues=rules(queue()))
    rows = {one.gpu_type: (one.held, one.pending) for one in compute_queue_usage(book)}
    assert rows == {"own": (0, 4), "spot": (3, 2), "T4": (0, 0), "*": (1, 0)}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"flavors": [OWN, OWN]}, "'own' is declared twice"),
        ({"flavors": [OWN, {**SPOT, "node_labels": {"zone": "a"}}]}, "could claim the same nodes of A100"),
        ({"flavors": [{**OWN, "name": "H100"}, BIG]}, "the name of another GPU type"),
        ({"flavors": [{**OWN, "name": "*"}]}, "can be no flavor"),
        ({"flavors": [{**OWN, "node_labels": {"nvidia.com/gpu.product": "T4"}}]}, "that is not its gpu_type"),
        ({"flavors": [{**SPOT, "tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}]}, "has a value"),
        ({"flavors": [OWN], "queues": [{"name": "q", "gpus": {"A100": 1}}]}, "name one of them: own"),
        ({"flavors": [OWN], "inventory": {"own": {"count": 1}, "A100": {"count": 1}}}, "inventory names A100"),
        ({"flavors": [OWN, SPOT], "inventory": {"own": {"count": 1}}}, "no GPUs of flavor 'spot'"),
        ({"flavors": [OWN], "nodes": [{"name": "n", "gpu_type": "A100", "gpus": 8}]}, "no GPUs of flavor 'own'"),
        (
            {
                "flavors": [OWN],
                "inventory": {"own": {"count": 1}},
                "queues": [{"name": "q", "gpus": {"onw": 1}}],
            },
            "names onw, which is no flavor",
        ),
        ({"queues": [{"name": "q", "gpus": {"own": 1}, "flavor_order": ["spot"]}]}, "no quota of it"),
        ({"queues": [{"name": "q", "gpus": {"own": 1}, "flavor_order": ["own"]}]}, "there are no flavors"),
    ],
)
def test_an_invalid_flavor_is_refused_by_name(document, words):
    with pytest.raises(UsageError, match="queue file"):
        parse_queues({"queues": [], **document}, "queue file q.yaml")
    with pytest.raises(UsageError) as refused:
        parse_queues({"queues": [], **document}, "queue file q.yaml")
    assert words in str(refused.value)


def test_nodes_of_today_may_have_none_of_a_flavor():
    declared = rules({"name": "research", "gpus": {"own": 8}}, cluster_nodes={})
    today = declared.with_nodes((), are_current=True)
    answer = given(today, ask(4))
    assert isinstance(answer, Deferred)
    assert "for now" in answer.message


def test_a_request_that_avoids_spot_waits_where_other_nodes_could_ever_serve_it():
    cheap = rules(queue(flavor_order=["spot"]))
    assert pool(given(cheap, ask(4, spot="avoided"))) == "own"
    assert deferral(given(cheap, ask(4, spot="avoided"), lease(6, "a", "own"))) is AdmissionReason.WAITING_FOR_QUOTA
    few = rules({"name": "research", "gpus": {"spot": 8, "own": 2}})
    assert pool(given(few, ask(4, spot="avoided"))) == "spot", "it is too large for the others"
    assert pool(given(few, ask(2, spot="avoided"))) == "own"
    none = rules({"name": "research", "gpus": {"spot": 8}}, flavors=(SPOT,), inventory={"spot": {"count": 8}})
    assert pool(given(none, ask(4, spot="avoided"))) == "spot"


def test_kinds_of_requests_not_asked_for_again_are_forgotten():
    declared = rules(queue())
    [research] = declared.queues
    for memory in range(1, 4200):
        assert list_eligible_pools(declared, research, ask(1, min_gpu_memory_mb=memory))
    assert len(declared.pool_options_caches[0]) < 4200


AMD = {"name": "mi300x", "gpu_type": "MI300X", "resource": "amd.com/gpu", "node_labels": {"maker": "amd"}}
SLICES = {"name": "slices", "gpu_type": "A100-1g", "resource": "nvidia.com/mig-1g.10gb"}
MIXED = rules(queue(gpus={"own": 8, "mi300x": 16, "slices": 14, "*": 2}), flavors=(OWN, AMD, SLICES))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ask(8), "own"),
        (ask(8, gpu_type=None), "own"),
        (ask(16, gpu_type=None, resource="amd.com/gpu"), "mi300x"),
        (ask(16, gpu_type="MI300X", resource="amd.com/gpu"), "mi300x"),
        (ask(2, gpu_type=None, gpu_types=("MI300X", "MI325X"), resource="amd.com/gpu"), "mi300x"),
        (ask(14, gpu_type=None, resource="nvidia.com/mig-1g.10gb"), "slices"),
        (ask(2, gpu_type="L4"), "*"),
    ],
)
def test_a_request_gets_gpus_of_its_resource(request_, expected):
    assert pool(given(MIXED, request_)) == expected


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask(1, gpu_type="MI300X"), "has no MI300X"),
        (ask(9, gpu_type=None), "at most 8"),
        (ask(1, gpu_type="A100", resource="amd.com/gpu"), "has no A100"),
        (ask(1, gpu_type="L4", resource="amd.com/gpu"), "has no L4"),
        (ask(17, gpu_type=None, resource="amd.com/gpu"), "at most 16"),
        (
            ask(1, gpu_type=None, resource="habana.ai/gaudi"),
            "queue research has no habana.ai/gaudi; it has: amd.com/gpu, nvidia.com/gpu, nvidia.com/mig-1g.10gb; name "
            "that in the step (gpu_resource='amd.com/gpu'), or declare a flavor with `resource: habana.ai/gaudi`",
        ),
    ],
)
def test_a_request_for_gpus_of_another_resource_is_rejected_by_name(request_, words):
    answer = given(MIXED, request_)
    assert isinstance(answer, Rejected), answer
    assert words in answer.message


def test_a_step_with_the_default_resource_reads_which_one_the_queue_has():
    only_amd = rules({"name": "research", "gpus": {"mi300x": 16}}, flavors=(AMD,))
    answer = given(only_amd, ask(1, gpu_type=None))
    assert isinstance(answer, Rejected)
    assert "queue research has no nvidia.com/gpu; it has: amd.com/gpu" in answer.message
    plain = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8, "*": 8}}]})
    for gpu_type in (None, "A100", "L4"):
        answer = given(plain, ask(1, gpu_type=gpu_type, resource="amd.com/gpu"))
        assert isinstance(answer, Rejected)
        assert "declare a flavor with `resource: amd.com/gpu`" in answer.message


def test_pods_of_another_resource_are_sent_by_the_labels_of_the_flavor_alone():
    assert MIXED.flavor_set.by_name["mi300x"].node_selector == {"maker": "amd"}
    assert MIXED.flavor_set.by_name["slices"].node_selector == {}
    assert MIXED.flavor_set.by_name["own"].node_selector == {"nvidia.com/gpu.product": "A100", "pool": "own"}


def test_requests_that_differ_in_the_resource_do_not_hold_each_other_up():
    blocked = waiting(16, 1, uid="first", gpu_type=None, resource="amd.com/gpu")
    held = lease(8, "holder", "mi300x", gpu_type=None, resource="amd.com/gpu")
    assert pool(given(MIXED, ask(8, "next", gpu_type=None), held, line=(blocked,))) == "own"
    all_held = lease(16, "holder", "mi300x", gpu_type=None, resource="amd.com/gpu")
    answer = given(MIXED, ask(8, "next", gpu_type=None, resource="amd.com/gpu"), all_held, line=(blocked,))
    assert isinstance(answer, Deferred)


@pytest.mark.parametrize(
    ("flavors", "words"),
    [
        ((AMD, {**AMD, "name": "mi250", "gpu_type": "MI250", "node_labels": {}}), "the same nodes of amd.com/gpu"),
        (({**AMD, "resource": "gpu"},), "resource"),
    ],
)
def test_flavors_whose_resource_does_not_tell_their_nodes_apart_are_refused(flavors, words):
    document = {"queues": [{"name": "research", "gpus": {}}], "flavors": list(flavors)}
    with pytest.raises(UsageError, match=words):
        parse_queues(document, "the file")
