"""The ledger of the previous release, which kept names of nodes, is read by this one.

| kept by the previous release           | under this one                              |
|----------------------------------------|---------------------------------------------|
| a lease, and a call that is repeated   | the call gets this lease                    |
| a waiting request                      | keeps its place, its victim and its since   |
| names of nodes                         | are found by their hash, and not kept       |
| usage of leases that have ended        | counts as before                            |

`ledger_status.json` and `ledger.sql` were written by the previous release.
"""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.kube_store import Collection, Place
from support.ledger import ask, deferral, ledger_api
from support.world import Clock
from tiphys_plugin import SqliteLedger
from tiphys_plugin.quota.lease import AdmissionBackend, AdmissionReason, Admitted, hash_node_name
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.status_codec import decode_status
from tiphys_plugin.quota.queues import Queues

from tiphys.errors import IntegrityError
from tiphys.protocol.ledger_format import LOG_FORMAT

FOLDER = Path(__file__).parent / "previous_release"
STATUS = json.loads((FOLDER / "ledger_status.json").read_text())
QUEUES = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}, "preempts_lower_priority": True}]})
PLACE = Place(Collection("tiphys.dev", "gpuledgers"), "tiphys", "default")
ADMIT_NODE = "wf-u2.sweep(0:lr:0.1)[0].attempts(0)[0].admit"
SWEEP = {"step": "sweep.0123456789ab.0", "members": 2, "min_members": 1, "max_members": 2}
Kept = tuple[AdmissionBackend, Callable[[], str]]


def clock() -> Clock:
    later = Clock()
    later.advance(3601)
    return later


def in_cluster() -> Kept:
    api = ledger_api(QUEUES)
    made = api.store.get(PLACE)
    api.store.write(PLACE, "status", lambda _: {**made, "status": STATUS})
    ledger = KubernetesLedger(api, "tiphys", clock=clock(), pause=lambda _: None)
    return ledger, lambda: json.dumps(api.store.get(PLACE)["status"])


def in_file(path: Path) -> Kept:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FOLDER / "ledger.sql").read_text())

    def content() -> str:
        with closing(sqlite3.connect(path)) as connection:
            return "\n".join(connection.iterdump())

    return SqliteLedger(path, QUEUES, clock=clock()), content


@pytest.fixture(params=["cluster", "file"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    ledger, content = in_cluster() if request.param == "cluster" else in_file(tmp_path / "ledger.db")
    yield ledger, content
    if isinstance(ledger, SqliteLedger):
        ledger.close()


def test_leases_waiting_requests_and_usage_are_all_there(kept: Kept) -> None:
    snapshot = kept[0].snapshot()
    [lease] = snapshot.leases
    assert (lease.request.uid, lease.request.gpus, lease.pool) == ("u2", 4, "A100")
    assert lease.request.node_hash == hash_node_name(ADMIT_NODE)
    assert lease.request.instance_hash == hash_node_name("wf-u2.sweep(0:lr:0.1)")
    assert [(one.request.uid, one.request.gpus) for one in snapshot.pending] == [("u3", 8), ("u4", 2), ("u1", 4)]
    assert [(one.request.priority, one.request.seconds) for one in snapshot.pending[:2]] == [(5, None), (0, 3600)]
    assert [one.gpus for one in snapshot.history] == [0.2278]


def test_a_call_that_is_repeated_gets_the_lease_that_it_had(kept: Kept) -> None:
    ledger = kept[0]
    [lease] = ledger.snapshot().leases
    request = ask(4, "u2", node=ADMIT_NODE, instance="wf-u2.sweep(0:lr:0.1)", **SWEEP)
    again = ledger.request(request)
    assert isinstance(again, Admitted)
    assert again.lease == lease.id
    waits = ledger.request(ask(8, "u3", priority=5, spot="allowed"))
    assert deferral(waits) is AdmissionReason.WAITING_FOR_QUOTA
    assert waits.position == 1


def test_after_the_first_write_no_name_of_a_node_is_kept(kept: Kept) -> None:
    ledger, content = kept
    ledger.request(ask(8, "u5"))
    assert "admit" not in content()
    assert "lr:0.1" not in content()
    ledger.release(ledger.snapshot().leases[0].id)
    assert isinstance(ledger.request(ask(8, "u3", priority=5, spot="allowed")), Admitted)


def test_the_first_call_of_a_service_moves_the_state_to_the_log_and_older_services_refuse_it() -> None:
    ledger, content = in_cluster()
    ledger.snapshot()
    status = json.loads(content())
    assert status["version"] == LOG_FORMAT
    assert not {"leases", "waiting"} & status.keys()
    with pytest.raises(IntegrityError):
        decode_status(status)
