"""Queues and nodes as the pages read them: what ``tiphys queues``, ``tiphys why`` and ``tiphys nodes`` print."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.builders.cluster_nodes import MODEL, condition, foreign_pod, node
from support.builders.ledger import ask, lease, ledger_status, waiting
from support.servers.kube_server import serving
from support.stories.kubeconfig_folder import Desk
from tiphys_plugin import SqliteLedger, load_queues
from tiphys_plugin.quota.lease import Admitted, LedgerState
from tiphys_plugin.quota.ledger.sqlite_ledger import read_ledger_file
from tiphys_plugin.quota.queues import parse_queues

from hera_pipelines.cli.look import page_gpus
from hera_pipelines.cli.look.page_gpus import ClusterGpus, LocalGpus, describe_queues
from hera_pipelines.ui.gpu_page import MAX_REQUESTS
from tiphys.errors import NotFoundError, StoreError
from tiphys.kube.resources import GPU_LEDGERS, NODES, PODS

QUEUES = """
queues:
  - {name: research, gpus: {A100: 8}, cohort: lab, preempts_lower_priority: true}
  - {name: spare, gpus: {A100: 4}, cohort: lab}
"""


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    with serving() as server:
        yield Desk(server, tmp_path, capsys)


def read_cluster(desk: Desk) -> ClusterGpus:
    return ClusterGpus(lambda: desk.api)


def test_quota_borrowed_and_the_reasons_of_those_that_wait(desk: Desk) -> None:
    desk.queues("apply", text=QUEUES)
    ledger = desk.ledger()
    ledger.request(ask(10, "u1"))
    ledger.request(ask(4, "u2", priority=5))

    view = read_cluster(desk).read_queues()

    [(research, policies), (spare, _)] = view.queues
    assert (research.quota, research.max_gpus, research.held, research.borrowed, research.pending) == (8, 12, 10, 2, 4)
    assert "preempts lower priority" in policies
    assert (spare.quota, spare.held, spare.borrowed) == (4, 0, 0)
    assert [(one.request.run, one.gpus, one.eviction) for one in view.holders] == [("run-u1", "10 A100", "")]
    [one] = view.waiting
    assert (one.request.run, one.gpus, one.position) == ("run-u2", "4 A100", 1)
    printed = desk.tiphys("why", "run-u2")[1]
    assert one.reasons
    assert all(f"  {reason}: {sentence}" in printed for reason, sentence in one.reasons)
    assert any("would be preempted" in sentence or "preempted for it" in sentence for sentence in one.preemption)


def test_a_cluster_without_a_ledger_is_named(desk: Desk) -> None:
    with pytest.raises(NotFoundError, match="there is no GPULedger ml/default"):
        read_cluster(desk).read_queues()


def test_nodes_are_those_that_the_command_lists(desk: Desk) -> None:
    desk.api.create(NODES, None, node("n1", 8, labels={"topology.kubernetes.io/rack": "r1"}))
    desk.api.create(NODES, None, node("n2", 8, unschedulable=True))
    desk.api.create(NODES, None, node("n3", 8, condition("GpuMemWatch", message="a double bit error")))
    desk.api.create(PODS, "ml", foreign_pod(on="n1", gpus=3))
    desk.queues("apply", text="queues: [{name: research, gpus: {'*': 64}}]\ncluster_nodes: {}\n")
    held = replace(lease(4, members=2, gpu_type=MODEL), nodes=("n1", "n1"))
    state = LedgerState((held,), (waiting(6, 1, uid="u7", gpu_type=MODEL),))
    desk.api.patch(GPU_LEDGERS, "ml", "default", {"status": ledger_status(state)}, subresource="status")

    view = read_cluster(desk).read_nodes()

    assert [(one.name, one.gpus, one.held, one.others, one.free, one.topology, one.status) for one in view.nodes] == [
        ("n1", 8, 4, 3, 1, "r1", "healthy"),
        ("n2", 8, 0, 0, 0, "", "cordoned"),
        ("n3", 8, 0, 0, 0, "", "unhealthy"),
    ]
    [(source, message, _)] = view.nodes[2].evidence
    assert (source, message) == ("condition GpuMemWatch", "a double bit error")
    assert view.notes == ()


def test_nodes_of_a_cluster_whose_queues_ignore_them(desk: Desk) -> None:
    desk.api.create(NODES, None, node("n1", 8))
    view = read_cluster(desk).read_nodes()
    assert [one.name for one in view.nodes] == ["n1"]
    assert view.notes == ("The queues ignore the nodes of the cluster.",)


@pytest.fixture
def local(tmp_path: Path) -> tuple[Path, Path]:
    """Ledger and queue file of an engine in which one request holds and one waits."""
    file, queues = tmp_path / "ledger.db", tmp_path / "queues.yaml"
    queues.write_text("queues: [{name: research, gpus: {A100: 8}}]")
    ledger = SqliteLedger(file, load_queues(queues))
    assert isinstance(ledger.request(ask(6, "u1")), Admitted)
    assert not isinstance(ledger.request(ask(4, "u2")), Admitted)
    ledger.close()
    return file, queues


def test_the_ledger_of_the_engine_with_its_queue_file(local: tuple[Path, Path]) -> None:
    view = LocalGpus(*local).read_queues()
    assert [(usage.quota, usage.held, usage.pending) for usage, _ in view.queues] == [(8, 6, 4)]
    assert view.waiting[0].reasons[0] == ("WaitingForQuota", "queue research holds 6 of 8 A100; 4 A100 asked")
    assert view.notes == ()


def test_without_the_queue_file_nothing_is_guessed(local: tuple[Path, Path]) -> None:
    view = LocalGpus(local[0], None).read_queues()
    assert [(usage.quota, usage.held, usage.pending) for usage, _ in view.queues] == [(None, 6, 4)]
    assert (view.waiting[0].reasons, view.waiting[0].position) == ((), None)
    assert "no quota is known; --queues names the file" in view.notes[0]


def test_a_ledger_is_read_while_it_is_written_and_never_changed(local: tuple[Path, Path]) -> None:
    file, queues = local
    ledger = SqliteLedger(file, load_queues(queues))
    ledger.request(ask(1, "u3"))
    assert len(read_ledger_file(file).leases) == 2
    ledger.close()
    before = file.read_bytes()
    read_ledger_file(file)
    assert file.read_bytes() == before


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.db").write_bytes(b"nothing of a database" * 100)
    for name in ("broken.db", "absent.db"):
        with pytest.raises(StoreError, match=name):
            read_ledger_file(tmp_path / name)
    assert not (tmp_path / "absent.db").exists()


def test_preemptions_are_previewed_in_a_small_ledger_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = parse_queues(yaml.safe_load(QUEUES), "test")
    line = tuple(waiting(4, number, uid=f"u{number}") for number in range(1, 4))
    state = LedgerState((lease(12),), line, queues=rules)

    def previewed() -> list[bool]:
        return [bool(one.preemption) for one in describe_queues("here", state, []).waiting]

    assert previewed() == [True, True, True]
    monkeypatch.setattr(page_gpus, "_PREVIEWED_ENTRIES", 4)
    assert previewed() == [True, False, False]
    monkeypatch.setattr(page_gpus, "_PREVIEWED_ENTRIES", 3)
    assert previewed() == [False, False, False]


def test_a_long_line_is_cut(tmp_path: Path) -> None:
    queues = tmp_path / "queues.yaml"
    queues.write_text("queues: [{name: research, gpus: {A100: 1}}]")
    ledger = SqliteLedger(tmp_path / "ledger.db", load_queues(queues))
    for number in range(MAX_REQUESTS + 3):
        ledger.request(ask(1, f"u{number}"))
    ledger.close()
    view = LocalGpus(tmp_path / "ledger.db", queues).read_queues()
    assert (len(view.waiting), view.hidden_waiting, len(view.holders)) == (MAX_REQUESTS, 2, 1)
