"""Which pending requests stay: those of Workflows that may still start a step.

| Workflow                          | request   |
|-----------------------------------|-----------|
| runs                              | kept      |
| deleted, or replaced by its name  | withdrawn |
| ended, or being stopped           | withdrawn |
| of a namespace that is not served | kept      |
| cannot be read                    | kept      |
"""

from typing import Any

import pytest
from support.ledger import ask, queues
from tiphys_plugin.operations.pending_sweep import PendingRequestSweep
from tiphys_plugin.quota.ledger.backend import MemoryLedger

from tiphys.errors import StoreError


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


def test_another_namespace_is_not_asked_about() -> None:
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
