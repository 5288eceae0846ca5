"""Which pending requests stay: those of Workflows that may still start a step.

| Workflow                          | request   |
|-----------------------------------|-----------|
| runs                              | kept      |
| deleted, or replaced by its name  | withdrawn |
| ended, or being stopped           | withdrawn |
| of a namespace that is not served | kept      |
| cannot be read                    | kept      |

The lease of a Workflow that starts no more steps is released with its last pod, see `StoppedLeaseSweep`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.builders.ledger import ask, queues
from support.stories.plugin import World, fit, gpus, outputs
from support.stories.plugin_with_gangs import JOB, gang_world, objects, put
from tiphys_plugin import Queues
from tiphys_plugin.operations.pending_sweep import PendingRequestSweep, StoppedLeaseSweep
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.ledger.backend import MemoryLedger
from tiphys_plugin.runtime.context import SingleStore

from tiphys.errors import StoreError
from tiphys.protocol.gang import GangPhase, GangSpec


class Workflows:
    """The Workflows of a cluster by name; a missing one was deleted."""

    def __init__(self, **by_name: dict[str, Any] | Exception) -> None:
        self.by_name = by_name
        self.reads: list[str] = []

    def workflow(self, _: str, name: str) -> dict[str, Any] | None:
        self.reads.append(name)
        found = self.by_name.get(name)
        if isinstance(found, Exception):
            raise found
        return found

    workflow_summary = workflow


class Served:
    def serves(self, namespace: str) -> bool:
        return namespace == "ml"


def workflow(uid: str = "late", phase: str = "Running", shutdown: str = "") -> dict[str, Any]:
    return {"metadata": {"uid": uid}, "spec": {"shutdown": shutdown}, "status": {"phase": phase}}


def line(*requests: Any) -> MemoryLedger:
    """A ledger whose GPUs are held, with pending requests."""
    ledger = MemoryLedger(queues(research={"A100": 8}))
    ledger.request(ask(8, uid="holder"))
    for request in requests:
        ledger.request(request)
    return ledger


def sweep(ledger: MemoryLedger, workflows: Workflows) -> list[str]:
    """One round; uids of the requests that remain."""
    PendingRequestSweep(ledger, workflows, Served()).run_once()  # type: ignore[arg-type]
    return [one.request.uid for one in ledger.snapshot().pending]


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (workflow(), True),
        (None, False),
        (workflow(uid="another"), False),
        (workflow(phase="Failed"), False),
        (workflow(shutdown="Terminate"), False),
        (StoreError("no answer"), True),
    ],
)
def test_a_request_leaves_with_its_workflow(found: Any, kept: bool) -> None:
    ledger = line(ask(8, uid="late", workflow="late", namespace="ml"))

    assert sweep(ledger, Workflows(late=found) if found else Workflows()) == (["late"] if kept else [])


def test_a_workflow_that_cannot_be_read_hides_no_other() -> None:
    ledger = line(
        ask(8, uid="broken", workflow="broken", namespace="ml"), ask(8, uid="gone", workflow="gone", namespace="ml")
    )

    assert sweep(ledger, Workflows(broken=StoreError("no answer"))) == ["broken"]


def test_a_foreign_namespace_is_not_asked_about() -> None:
    ledger, workflows = line(ask(8, uid="late", workflow="late", namespace="vision")), Workflows()

    assert sweep(ledger, workflows) == ["late"]
    assert workflows.reads == []


def test_a_round_reads_a_bounded_number_and_all_have_their_turn() -> None:
    names = [f"w{number:02}" for number in range(40)]
    ledger = line(*(ask(8, uid=name, workflow=name, namespace="ml") for name in names))
    workflows = Workflows(**{name: workflow(uid=name) for name in names})
    rounds = PendingRequestSweep(ledger, workflows, Served())  # type: ignore[arg-type]
    rounds.run_once()
    assert len(workflows.reads) == 16

    for _ in range(3):
        rounds.run_once()

    assert set(workflows.reads) == set(names)


@pytest.fixture
def gang(tmp_path: Path) -> World:
    """A gang of four that holds all GPUs, with all its pods."""
    here = gang_world(tmp_path, Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]}))
    flow = here.submit(fit(artifacts=(), gang=GangSpec(members=4), gpu=gpus(8, members=4)))
    name = outputs(flow.admit("fit", 0))["gang"]
    objects(here).objects[name] = replace(JOB, name=name, stage=GangPhase.ACTIVE)
    for rank in range(4):
        put(here, rank)
    return here


def stopped_leases(here: World) -> StoppedLeaseSweep:
    return StoppedLeaseSweep(here.ledger, here.cluster, SingleStore(here.store))


def change(here: World, shutdown: str = "", phase: str = "Running") -> None:
    document = here.cluster.workflow("ml", "digits-abc12")
    assert document is not None
    here.cluster.write_workflow(
        {**document, "spec": {**document["spec"], "shutdown": shutdown}, "status": {"phase": phase}}
    )


def gang_ends(here: World, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    objects(here).objects.clear()
    for rank in ranks:
        put(here, rank, "Failed", after=5, exit_code=75)


def held(here: World) -> int:
    return sum(lease.request.gpus for lease in here.ledger.snapshot().leases)


@pytest.mark.parametrize("how", [{"shutdown": "Stop"}, {"shutdown": "Terminate"}, {"phase": "Failed"}])
def test_lease_of_a_stopped_gang_is_released_once_its_pods_are_gone(gang: World, how: dict[str, str]) -> None:
    sweep = stopped_leases(gang)
    change(gang, **how)
    for _ in range(4):
        sweep.run_once()
        assert held(gang) == 8, "its pods live"
    gang_ends(gang, ranks=(0, 1, 2))
    sweep.run_once()
    assert held(gang) == 8, "one of its pods lives"
    gang_ends(gang)
    sweep.run_once()
    assert held(gang) == 0


def test_lease_of_a_stopped_gang_is_kept_while_its_job_may_create_pods(gang: World) -> None:
    sweep = stopped_leases(gang)
    change(gang, shutdown="Stop")
    for rank in range(4):
        objects(gang).lose(put(gang, rank))
    for _ in range(3):
        sweep.run_once()
    assert held(gang) == 8
    gang_ends(gang, ranks=())
    sweep.run_once()
    assert held(gang) == 0


def test_lease_is_released_in_the_round_after_its_workflow_was_found_stopping(gang: World) -> None:
    sweep = stopped_leases(gang)
    gang_ends(gang)
    sweep.run_once()
    assert held(gang) == 8, "a workflow that runs may start the next attempt"
    change(gang, shutdown="Stop")
    sweep.run_once()
    assert held(gang) == 8, "Argo may have started a pod at this moment"
    sweep.run_once()
    assert held(gang) == 0


def test_lease_of_a_workflow_that_was_retried_between_two_rounds_is_kept(gang: World) -> None:
    sweep = stopped_leases(gang)
    change(gang, shutdown="Stop")
    sweep.run_once()
    change(gang)
    gang_ends(gang)
    sweep.run_once()
    assert held(gang) == 8


def test_lease_of_a_workflow_that_was_deleted_is_released(gang: World) -> None:
    sweep = stopped_leases(gang)
    (gang.root / "cluster" / "workflows" / "digits-abc12.json").unlink()
    gang_ends(gang)
    sweep.run_once()
    sweep.run_once()
    assert held(gang) == 0


def test_lease_that_went_to_the_next_attempt_during_a_round_is_kept(gang: World) -> None:
    sweep = stopped_leases(gang)
    change(gang, shutdown="Stop")
    gang_ends(gang)
    sweep.run_once()
    [lease] = gang.ledger.snapshot().leases
    read = gang.cluster.pods

    def transferred(*place: str) -> Any:
        gang.ledger.release(lease.id)
        gang.ledger.restore(lease.id, replace(lease.request, attempt=2), "A100")
        return read(*place)

    gang.cluster.pods = transferred  # type: ignore[method-assign]
    sweep.run_once()
    assert [one.request.attempt for one in gang.ledger.snapshot().leases] == [2]


def test_workflow_that_cannot_be_read_keeps_its_lease_and_no_other(gang: World) -> None:
    single = gang.submit(fit(gpu=None), name="möhre.v2", uid="uid-2")
    gang.ledger.release(gang.ledger.snapshot().leases[0].id)
    for name, uid in (("digits-abc12", "uid-1"), ("möhre.v2", "uid-2")):
        asked = ask(4, uid=uid, workflow=name, namespace="ml", run=name)
        assert isinstance(gang.ledger.request(asked), Admitted)
    assert single.name == "möhre.v2"
    sweep, read = stopped_leases(gang), gang.cluster.workflow_summary

    def broken(namespace: str, name: str) -> Any:
        if name == "digits-abc12":
            raise StoreError("no answer")
        return {**read(namespace, name), "spec": {"shutdown": "Stop"}}  # type: ignore[dict-item]

    gang.cluster.workflow_summary = broken  # type: ignore[method-assign]
    gang_ends(gang)
    sweep.run_once()
    sweep.run_once()
    assert [one.request.uid for one in gang.ledger.snapshot().leases] == ["uid-1"]


def test_lease_of_a_gang_step_that_a_changed_file_has_left_out_is_released(gang: World) -> None:
    [lease] = gang.ledger.snapshot().leases
    gang.ledger.release(lease.id)
    left_out = replace(lease.request, step="left-out", node_hash="0" * 16, instance_hash="0" * 16)
    assert isinstance(gang.ledger.request(left_out), Admitted)
    sweep = stopped_leases(gang)
    sweep.run_once()
    assert held(gang) == 8, "its workflow runs"
    change(gang, phase="Failed")
    sweep.run_once()
    sweep.run_once()
    assert held(gang) == 0


def test_round_reads_a_bounded_number_of_workflows_with_leases_and_all_have_their_turn() -> None:
    ledger = MemoryLedger(queues(research={"A100": 80}))
    names = [f"w{number:02}" for number in range(40)]
    for name in names:
        ledger.request(ask(1, uid=name, workflow=name, namespace="ml"))
    workflows = Workflows(**{name: workflow(uid=name) for name in names})
    sweep = StoppedLeaseSweep(ledger, workflows, Served())  # type: ignore[arg-type]
    for _ in range(5):
        before = len(workflows.reads)
        sweep.run_once()
        assert len(workflows.reads) - before <= 8
    assert set(workflows.reads) == set(names)
    assert len(ledger.snapshot().leases) == 40
