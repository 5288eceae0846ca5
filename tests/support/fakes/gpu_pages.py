"""Queues and nodes for tests of the web pages, without a ledger."""

from datetime import UTC, datetime

from tiphys_plugin.quota.ledger.usage import QueueUsage

from hera_pipelines.ui.gpu_page import HolderRow, NodesView, QueueRow, QueuesView, WaitingRow
from support.builders.ledger import ask
from tiphys.errors import StoreError

SINCE = datetime(2030, 1, 1, tzinfo=UTC)
EXPECTED = datetime(2030, 1, 1, 1, tzinfo=UTC)
RUN = "digits-1"


def waiting(run: str = RUN, queue: str = "research", sentence: str = "8 of 8 are held") -> WaitingRow:
    reasons = (("WaitingForQuota", sentence),)
    request = ask(4, run=run, queue=queue)
    return WaitingRow(request, "4 A100", SINCE, 2, reasons, EXPECTED, ("run-7/fit would go",))


def view_of(*rows: WaitingRow, text: str = "lab") -> QueuesView:
    queues = (
        QueueRow(QueueUsage("research", "A100", 8, 10, 4, 12), "reclaims"),
        QueueRow(QueueUsage("spare", "A100", 4, 6, 0, 4), text),
    )
    held = ask(10, run="run-7", queue="spare", attempt=3)
    holders = (HolderRow(held, "10 A100", SINCE, ("n1", "n2"), "preempted at 10:00"),)
    return QueuesView(f"GPULedger {text}", queues, holders, rows, 0, 7, (f"a note {text}",))


class FakeGpus:
    """Queues and nodes that a test sets."""

    def __init__(self, queues: QueuesView | None = None, nodes: NodesView | None = None) -> None:
        self.queues = queues
        self.nodes = nodes
        self.reads = 0

    @property
    def has_nodes(self) -> bool:
        return self.nodes is not None

    def read_queues(self) -> QueuesView:
        self.reads += 1
        if self.queues is None:
            raise StoreError("the API server is away")
        return self.queues

    def read_nodes(self) -> NodesView:
        assert self.nodes is not None
        return self.nodes
