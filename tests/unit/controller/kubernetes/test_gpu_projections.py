"""`GPUQueue` and `GPULease` as the ledger says: what is shown, what it costs, and that nobody else's word stays.

| what happens | what follows |
|---|---|
| a queue or lease changes | one write |
| nothing changes | one read |
| a queue or lease is gone | its object is deleted |
| somebody edits or deletes a projection | it is as it was within a minute |
| two controllers | the one that leads writes; the other finds nothing to do |
| a training is asked to leave | an Event on its Workflow |
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.argo_objects import put, told, workflow
from support.kube_server import KubeServer
from support.ledger import NOW, lease, queues, spec, waiting
from tiphys_controller.kubernetes.gpu_projections import (
    LIST_SECONDS,
    WRITES_PER_ROUND,
    ProjectionWriter,
    build_projections,
)
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.writer import ClusterWriter
from tiphys_plugin.quota.lease import Lease, PreemptionNotice
from tiphys_plugin.quota.ledger.state import LedgerState
from tiphys_plugin.quota.ledger.status_codec import encode_status
from tiphys_plugin.quota.ledger.usage import compute_queue_usage
from tiphys_plugin.quota.queues import Queues

from tiphys.errors import FencedError
from tiphys.kube import KubeApi, ListSnapshot, Object
from tiphys.kube.resources import GPU_FLAVORS, GPU_LEASES, GPU_LEDGERS, GPU_QUEUES, WORKFLOWS, Resource

CRDS = Path(__file__).parents[4] / "charts/tiphys/crds"
RULES = queues(research={"A100": 8, "*": 4}, nightly={"T4": 2})
TAINT = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}
FLAVORED = Queues.model_validate(
    {
        "queues": [
            {"name": "research", "gpus": {"own": 8, "spot": 4, "T4": 2, "*": 4}, "flavor_order": ["spot"]},
            {"name": "nightly", "gpus": {"spot": 2}},
        ],
        "flavors": [
            {"name": "own", "gpu_type": "A100", "memory_mb": 81920, "node_labels": {"pool": "own"}},
            {"name": "idle", "gpu_type": "H100"},
            {
                "name": "spot",
                "gpu_type": "A100",
                "node_labels": {"pool": "spot", "zone": "a"},
                "tolerations": [TAINT],
                "spot": True,
            },
        ],
    }
)
PLACED = replace(lease(4, "one"), nodes=("n1", "n1", "n2"))
NOTICE = PreemptionNotice("other", "fit", NOW, NOW + timedelta(minutes=2))
GOES = replace(lease(2, "two"), preemption=NOTICE)
MOVES = replace(lease(2, "two"), preemption=replace(NOTICE, moves=True))


def ledger(book: LedgerState, rules: Queues | None = RULES) -> Object:
    declared = {} if rules is None else {"spec": spec(rules)}
    return {
        "metadata": {"name": "default", "namespace": "tiphys", "uid": "u"},
        **declared,
        "status": encode_status(book),
    }


def shown(book: LedgerState, rules: Queues | None = RULES) -> dict[str, Object]:
    return {key.name: body for key, body in build_projections(ledger(book, rules)).items()}


def test_a_queue_shows_its_quota_what_is_used_borrowed_and_waited_for():
    found = shown(
        LedgerState(
            (lease(10, "a"), lease(2, "b", "*", gpu_type="H100")), (waiting(3, 1), waiting(1, 2, gpu_type=None))
        )
    )
    status = found["research"]["status"]
    assert status["nominal"] == {"A100": 8, "*": 4}
    assert (status["used"], status["borrowed"], status["pending"]) == (
        {"*": 2, "A100": 10},
        {"A100": 2},
        {"*": 1, "A100": 3},
    )
    assert (status["leases"], status["requests"]) == (2, 2)
    assert status["summary"] == {
        "nominal": "A100 8, * 4",
        "used": "* 2, A100 10",
        "borrowed": "A100 2",
        "pending": "* 1, A100 3",
    }
    assert found["nightly"]["status"]["summary"]["used"] == "0"


def test_a_queue_says_whether_anything_new_starts():
    stopped = Queues.model_validate({"queues": [{"name": "old", "gpus": {"*": 1}, "stopped": True}]})
    found = shown(LedgerState((lease(1, "a"),)), stopped)
    [old], [undeclared] = found["old"]["status"]["conditions"], found["research"]["status"]["conditions"]
    assert (old["type"], old["status"], old["reason"]) == ("Admitting", "False", "QueueStopped")
    assert (undeclared["status"], undeclared["reason"]) == ("False", "QueueUnknown")
    assert found["research"]["status"]["borrowed"] == {"A100": 1}


def test_a_lease_shows_who_holds_what_and_where():
    body = shown(LedgerState((PLACED,)))["lease-one"]
    assert body["spec"]["gpus"] == 4
    assert (body["spec"]["run"], body["spec"]["step"], body["spec"]["namespace"]) == ("run-one", "fit", "ml")
    assert body["status"]["nodes"] == ["n1", "n2"]
    assert body["status"]["summary"] == {"nodes": "n1 and 1 more", "leavesBy": ""}
    [condition] = shown(LedgerState((GOES,)))["lease-two"]["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Leaving", "True", "Preempted")
    [condition] = shown(LedgerState((MOVES,)))["lease-two"]["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Leaving", "True", "Moves")


def test_names_that_kubernetes_refuses_become_others_and_no_two_the_same():
    rules = queues(**{"Team A": {"*": 1}, "team_a": {"*": 1}, "team-a": {"*": 1}, "—": {"*": 1}})
    names = sorted(shown(LedgerState(), rules))
    assert len(names) == 4
    assert "team-a" in names
    assert all(name.strip("abcdefghijklmnopqrstuvwxyz0123456789-.") == "" and name[0] not in "-." for name in names)
    assert {one["spec"]["queue"] for one in shown(LedgerState(), rules).values()} == {"Team A", "team_a", "team-a", "—"}


def test_a_flavor_shows_its_nodes_and_what_is_used_of_it():
    book = LedgerState((lease(3, "a", "spot"), lease(1, "b", "own")), (waiting(2, 1), waiting(4, 2, spot="allowed")))
    found = {
        key.name: body for key, body in build_projections(ledger(book, FLAVORED)).items() if key.resource == GPU_FLAVORS
    }
    spot, own = found["spot"]["status"], found["own"]["status"]
    assert (spot["gpuType"], spot["spot"], spot["tolerations"]) == ("A100", True, [TAINT])
    assert spot["summary"]["nodeLabels"] == "pool=spot, zone=a"
    assert (spot["nominal"], spot["used"], spot["pending"], spot["queues"]) == (6, 3, 4, ["nightly", "research"])
    assert (own["nominal"], own["used"], own["pending"], own["memoryMb"]) == (8, 1, 2, 81920)
    [condition] = found["idle"]["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Offered", "False", "NoQuota")
    assert shown(book, FLAVORED)["lease-a"]["status"]["pool"] == "spot"


kinds = st.sampled_from(["A100", "T4", "H100", None])
held = st.tuples(
    st.sampled_from(["research", "nightly", "gone"]),
    kinds,
    st.sampled_from(["A100", "*", "T4", "own", "spot"]),
    st.integers(1, 9),
)


@given(st.lists(held, max_size=6), st.lists(held, max_size=6), st.sampled_from([RULES, FLAVORED, None]))
def test_the_sums_are_those_that_decisions_go_by(holding, asking, declared):
    leases = [
        lease(gpus, f"l{n}", pool if kind is None or pool in ("own", "spot") else kind, gpu_type=kind, queue=queue)
        for n, (queue, kind, pool, gpus) in enumerate(holding)
    ]
    line = [
        waiting(gpus, n + 1, gpu_type=kind, queue=queue, spot="allowed" if pool == "spot" else "no")
        for n, (queue, kind, pool, gpus) in enumerate(asking)
    ]
    rules, book = declared, LedgerState(tuple(leases), tuple(line))
    found = shown(book, rules)
    by_queue = {
        one["spec"]["queue"]: one["status"]
        for one in found.values()
        if "queue" in one["spec"] and "used" in one["status"]
    }
    for row in compute_queue_usage(rules, book):
        status = by_queue[row.queue]
        told = tuple(status[what].get(row.gpu_type, 0) for what in ("used", "borrowed", "pending"))
        assert told == (row.held, row.borrowed, row.pending)
        assert status["nominal"].get(row.gpu_type) == row.quota
    assert sum(sum(one["used"].values()) for one in by_queue.values()) == sum(gpus for *_, gpus in holding)


@pytest.mark.parametrize(
    ("kind", "file"), [(GPU_QUEUES, "gpuqueue.yaml"), (GPU_LEASES, "gpulease.yaml"), (GPU_FLAVORS, "gpuflavor.yaml")]
)
def test_the_kinds_declare_every_field_that_is_written(kind: Resource, file: str):
    definition = yaml.safe_load((CRDS / file).read_text())["spec"]
    [version] = definition["versions"]
    assert (definition["group"], version["name"], definition["names"]["plural"], definition["names"]["kind"]) == tuple(
        kind
    )
    cohort = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}, "cohort": "lab"}]})
    book = LedgerState((PLACED, GOES, lease(9, "three")), (waiting(1, 1),))
    bodies = [*build_projections(ledger(book, cohort)).items(), *build_projections(ledger(book, FLAVORED)).items()]
    for body in (body for key, body in bodies if key.resource == kind):
        check(version["schema"]["openAPIV3Schema"], {part: body[part] for part in ("spec", "status")})


def check(schema: dict[str, Any], value: Any) -> None:
    """Whether a value is kept as it is by the API server, which drops what is not declared."""
    if isinstance(value, dict):
        for key, inner in value.items():
            check(schema.get("additionalProperties") or schema["properties"][key], inner)
    elif isinstance(value, list):
        for inner in value:
            check(schema["items"], inner)
    else:
        assert {str: "string", int: "integer", bool: "boolean"}[type(value)] == schema["type"]


class Bench:
    """A projector whose clock and ledger are in the test's hands."""

    def __init__(self, server: KubeServer, api: KubeApi) -> None:
        self.server, self.api = server, api
        self.moment, self.leads = 1000.0, True
        self.view, self.metrics = WatchCache(), ControllerMetrics()
        api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}, "spec": spec(RULES)})
        self.projector = self.another()

    def another(self) -> ProjectionWriter:
        writer = ClusterWriter(self.api, lambda: self.leads, self.metrics, lambda: NOW)
        return ProjectionWriter(self.api, "tiphys", self.view, writer, self.metrics, lambda: self.moment)

    def book(self, *leases: Lease) -> None:
        self.api.patch(
            GPU_LEDGERS, "tiphys", "default", {"status": encode_status(LedgerState(leases))}, subresource="status"
        )

    def round(self, later: float = 5.0) -> int:
        self.moment += later
        return self.projector.run_round()

    def names(self, kind: Resource = GPU_LEASES) -> list[str]:
        return [one["metadata"]["name"] for one in self.server.objects(kind.plural)]


@pytest.fixture
def bench(server: KubeServer) -> Iterator[Bench]:
    return Bench(server, server.api("tiphys"))


def test_what_changes_costs_one_write_and_what_does_not_one_read(bench: Bench):
    assert bench.round() == 2
    assert bench.names(GPU_QUEUES) == ["nightly", "research"]
    bench.book(PLACED)
    assert bench.round() == 2, "the lease, and the queue that it counts in"
    before = len(bench.server.requests)
    assert bench.round() == 0
    assert [one.verb for one in bench.server.requests[before:]] == ["get"]
    bench.book()
    assert bench.round() == 2
    assert bench.names() == []


def test_a_queue_that_is_gone_goes(bench: Bench):
    bench.round()
    bench.api.patch(GPU_LEDGERS, "tiphys", "default", {"spec": spec(queues(research={"A100": 8}))})
    bench.round()
    assert bench.names(GPU_QUEUES) == ["research"]


def test_what_others_write_is_undone(bench: Bench):
    bench.book(PLACED)
    bench.round()
    bench.api.patch(GPU_LEASES, "tiphys", "lease-one", {"status": {"nodes": ["mine"]}})
    bench.api.delete(GPU_QUEUES, "tiphys", "research")
    stray = {"metadata": {"name": "stray", "labels": {"tiphys.dev/ledger": "default"}}, "spec": {"queue": "stray"}}
    bench.api.create(GPU_QUEUES, "tiphys", stray)
    bench.round(LIST_SECONDS)
    found = bench.api.get(GPU_LEASES, "tiphys", "lease-one")
    assert found is not None
    assert found["status"]["nodes"] == ["n1", "n2"]
    assert bench.names(GPU_QUEUES) == ["nightly", "research"]


def test_somebody_who_wrote_in_between_is_found_at_the_next_round(bench: Bench):
    bench.book(PLACED)
    bench.round()
    bench.api.patch(GPU_LEASES, "tiphys", "lease-one", {"status": {"nodes": ["mine"]}})
    bench.book(replace(PLACED, nodes=("n3",)))
    bench.round()
    bench.round()
    assert (bench.api.get(GPU_LEASES, "tiphys", "lease-one") or {})["status"]["nodes"] == ["n3"]


def test_a_second_controller_finds_nothing_to_do_and_one_that_does_not_lead_writes_nothing(bench: Bench):
    bench.book(PLACED)
    bench.round()
    assert bench.another().run_round() == 0
    bench.book()
    bench.leads = False
    with pytest.raises(FencedError):
        bench.another().run_round()
    assert bench.names() == ["lease-one"]


def test_a_burst_is_written_over_several_rounds(bench: Bench):
    bench.book(*(lease(1, f"u{number}") for number in range(WRITES_PER_ROUND + 10)))
    assert bench.round() == WRITES_PER_ROUND
    assert bench.round() == 12
    assert len(bench.names()) == WRITES_PER_ROUND + 10


def test_without_a_ledger_nothing_is_shown(bench: Bench):
    bench.round()
    bench.api.delete(GPU_LEDGERS, "tiphys", "default")
    bench.round()
    assert bench.names(GPU_QUEUES) == []


@pytest.mark.parametrize(("fields", "name"), [({}, "fit"), ({"step": "fit.0123456789ab.0", "item_index": 2}, "fit[2]")])
def test_who_is_asked_to_leave_is_told_on_its_workflow_once(bench: Bench, fields: dict[str, Any], name: str):
    uid = put(bench.api, workflow(namespace="tiphys"))["metadata"]["uid"]
    bench.view.apply_workflow_change("tiphys", ListSnapshot(bench.api.list(WORKFLOWS, "tiphys").items))
    bench.book(replace(GOES, request=replace(GOES.request, uid=uid, **fields)))
    bench.round()
    bench.round()
    [(reason, message)] = told(bench.server)
    assert reason == "AttemptPreempted"
    assert message.startswith(f"{name}: attempt 1 was asked to save and stop")
    assert "ended at 00:02:00 UTC at the latest" in message


def test_who_moves_to_other_nodes_is_not_told_that_another_has_precedence(bench: Bench):
    uid = put(bench.api, workflow(namespace="tiphys"))["metadata"]["uid"]
    bench.view.apply_workflow_change("tiphys", ListSnapshot(bench.api.list(WORKFLOWS, "tiphys").items))
    bench.book(replace(MOVES, request=replace(MOVES.request, uid=uid)))
    bench.round()
    [(_, message)] = told(bench.server)
    assert "asked to save and move to other nodes, to make room for a larger step where it holds 2 GPUs; " in message
