"""A ledger that was lost: what is found again of the leases, and what is not.

| attempt                      | after a start with an empty ledger    |
|------------------------------|---------------------------------------|
| its pod lives                | its lease is recorded again           |
| its pod has finished         | not                                   |
| it has an end                | not                                   |
| it asked for no GPUs         | not                                   |
| its records are damaged      | not, and said; the others are         |
| some members of a gang live  | with the GPUs of these                |

What stored records claim beyond the pods is in `tests/security/test_recovered_leases.py`.
"""

import json
from dataclasses import replace

import pytest
import structlog
from support.builders.ledger import queues
from support.fakes.counting_store import CountingStore
from support.stories.plugin import Clock, World, fit, gpus, outputs, phase, said, world
from support.stories.plugin_with_gangs import gang_world, put
from tiphys_plugin import DirectoryCluster, PluginCore, Queues, SqliteLedger

from tiphys.protocol.gang import GangSpec
from tiphys.store import RunLayout

EIGHT = queues(research={"A100": 8, "T4": 4})


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, EIGHT)


def running(here: World, name: str = "digits-abc12", uid: str = "uid-1", **spec):
    """A training attempt whose pod lives."""
    step = fit(**{"gpu": gpus(8), **spec})
    flow = here.submit(step, name=name, uid=uid)
    assert outputs(flow.admit("fit", 0))["run"] == "true"
    flow.pod("fit", 1, gpus=step.gpu.gpus if step.gpu else 0)
    return flow


def lost(here: World) -> World:
    """The same world with a ledger of nothing, and a service that has just started over it."""
    here.ledger.close()
    here.ledger = SqliteLedger(here.root / "new.db", EIGHT, clock=here.clock)
    here.core = PluginCore(here.store, here.cluster, here.ledger, clock=here.clock)
    return here


def leases(here: World) -> list[tuple[str, str, int, str]]:
    return [(one.id, one.request.run, one.request.gpus, one.pool) for one in here.ledger.snapshot().leases]


def test_gpus_of_a_live_pod_are_still_taken_and_come_back_as_ever(here):
    flow = running(here)
    [before] = here.ledger.snapshot().leases
    [after] = lost(here).ledger.snapshot().leases
    # Storage does not tell since when it had waited.
    assert after == replace(before, request=replace(before.request, first_start=None))
    late = here.submit(fit(gpu=gpus(8)), name="other-abc12", uid="uid-2")
    assert "queue research holds 8 of 8 A100" in said(late.admit("fit", 0))
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    flow.end_try("fit", 0, exit_code="75")
    assert outputs(late.admit("fit", 0))["run"] == "true"


def test_type_that_was_chosen_is_counted_against_again(here):
    running(here, gpu=gpus(2, gpu_type=None))
    before = leases(here)
    assert before[0][3] == "T4"
    assert leases(lost(here)) == before


def test_gpus_of_another_resource_are_found_again_too(tmp_path):
    amd = {"name": "mi300x", "gpu_type": "MI300X", "resource": "amd.com/gpu", "node_labels": {"maker": "amd"}}
    document = {"queues": [{"name": "research", "gpus": {"mi300x": 8, "A100": 8}}], "flavors": [amd]}
    declared = Queues.model_validate(document)
    here = world(tmp_path, declared)
    flow = here.submit(fit(gpu=gpus(8, resource="amd.com/gpu", gpu_type="MI300X")))
    answer = outputs(flow.admit("fit", 0))
    assert json.loads(answer["pod-patch"])["nodeSelector"] == {"maker": "amd"}
    flow.pod("fit", 1, resources={"amd.com/gpu": 8, "rdma/hca": 1})
    before = leases(here)
    assert (before[0][2], before[0][3]) == (8, "mi300x")
    here.ledger.close()
    here.ledger = SqliteLedger(here.root / "new.db", declared, clock=here.clock)
    here.core = PluginCore(here.store, here.cluster, here.ledger, clock=here.clock)
    assert leases(here) == before


def test_attempt_whose_pod_has_finished_holds_nothing(here):
    running(here).pod("fit", 1, phase="Succeeded", exit_code=0)
    assert leases(lost(here)) == []


def test_attempt_that_has_an_end_holds_nothing(here):
    running(here)
    end = b'{"run": "digits-abc12", "step": "fit", "attempt": 1, "submission": 1, "outcome": "fenced"}'
    here.store.create(RunLayout("digits-abc12").attempt_end("fit", 1), end)
    assert leases(lost(here)) == []


def test_step_without_gpus_holds_nothing(here):
    running(here, gpu=None)
    assert leases(lost(here)) == []


def test_pod_of_another_workflow_does_not_speak_for_an_attempt(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    here.submit(fit(), name="digits-abc12", uid="uid-9").pod("fit", 1)
    assert leases(lost(here)) == []


def test_damaged_run_does_not_hide_the_leases_of_others(here):
    running(here, gpu=gpus(4))
    running(here, "other-abc12", "uid-2", gpu=gpus(4))
    key = RunLayout("digits-abc12").attempt("fit", 1)
    here.store.delete(key)
    here.store.create(key, b"garbage")
    with structlog.testing.capture_logs() as logs:
        after = lost(here)
    assert [(run, count) for _, run, count, _ in leases(after)] == [("other-abc12", 4)]
    assert [(log["run"], key in log["error"]) for log in logs if log["event"] == "lease.not_recovered"] == [
        ("digits-abc12", True)
    ]
    assert "tiphys_runs_not_recovered_total 1.0" in after.core.metrics.render().decode()


def test_start_with_a_ledger_that_knows_all_reads_nothing(here):
    running(here)
    counting = CountingStore(here.store)
    core = PluginCore(counting, here.cluster, here.ledger, clock=here.clock)
    assert counting.requests.total() == 0
    assert len(leases(here)) == 1
    core.close()


def test_lowered_quota_takes_no_gpus_from_a_holder(here, tmp_path):
    running(here)
    ledger = SqliteLedger(tmp_path / "strict.db", queues(research={"A100": 4}), clock=Clock())
    core = PluginCore(here.store, DirectoryCluster(here.root / "cluster"), ledger, clock=here.clock)
    assert [one.request.gpus for one in ledger.snapshot().leases] == [8]
    here.core = core
    waiting = here.submit(fit(gpu=gpus(1)), name="other-abc12", uid="uid-2").admit("fit", 0)
    assert phase(waiting) == "Pending"
    core.close()
    ledger.close()


def test_recovered_lease_keeps_the_service_that_earlier_attempts_attained(tmp_path):
    rules = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}, "order": "attained"}]})
    here = world(tmp_path, rules)
    flow = running(here)
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    flow.end_try("fit", 0, exit_code="75")
    flow.admit("fit", 1)
    flow.pod("fit", 2, retry=1, gpus=8)
    [before] = here.ledger.snapshot().leases
    ledger = SqliteLedger(tmp_path / "new.db", rules, clock=here.clock)
    PluginCore(here.store, here.cluster, ledger, clock=here.clock).close()
    [after] = ledger.snapshot().leases
    ledger.close()
    assert after.request.attempt == 2
    assert after.request.first_start == before.request.first_start is not None
    assert after.request.attained == before.request.attained > 0


@pytest.mark.parametrize(("alive", "known"), [((0, 1, 2), (0, 1, 2)), ((2, 0), (0, 2)), ((0, 3), ())])
def test_members_of_a_gang_hold_what_they_request(tmp_path, alive, known):
    nodes = [{"name": f"n{number}", "gpu_type": "A100", "gpus": 4} for number in range(3)]
    rules = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 12}}], "nodes": nodes})
    here = gang_world(tmp_path, rules)
    flow = here.submit(fit(gpu=gpus(12, members=3), gang=GangSpec(members=3)))
    assert outputs(flow.admit("fit", 0))["run"] == "true"
    flow.pod("fit", 1)  # Argo's, which watches the members and requests no GPUs
    for rank in alive:
        put(here, rank, gpus=4)
    [before] = here.ledger.snapshot().leases
    ledger = SqliteLedger(tmp_path / "new.db", rules, clock=here.clock)
    PluginCore(here.store, here.cluster, ledger, clock=here.clock).close()
    [after] = ledger.snapshot().leases
    ledger.close()
    assert (after.request.members, after.request.gpus) == (len(alive), 4 * len(alive))
    assert after.nodes == tuple(before.nodes[rank] for rank in known), "none, if that of one member is not known"


@pytest.mark.parametrize(("alive", "tensor_parallel"), [((0, 1), 2), ((0, 1, 2), 1)])
def test_members_that_form_no_whole_group_are_placed_one_by_one(tmp_path, alive, tensor_parallel):
    nodes = [{"name": "n1", "gpu_type": "A100", "gpus": 8}]
    here = gang_world(
        tmp_path, Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}], "nodes": nodes})
    )
    flow = here.submit(fit(gpu=gpus(8, members=4, tensor_parallel=2), gang=GangSpec(members=4)))
    assert outputs(flow.admit("fit", 0))["run"] == "true"
    for rank in alive:
        put(here, rank, gpus=2)
    [found] = lost(here).ledger.snapshot().leases
    assert (found.request.members, found.request.tensor_parallel) == (len(alive), tensor_parallel)
