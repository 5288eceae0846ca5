"""Processes on one ledger, one of which is killed while it holds GPUs: together they never hold more than the quota.

The ledger is a file, or a `GPULedger` object behind an API server.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.builders.ledger import ask, queues, spec
from support.processes.forking import ForkedProcess, ForkingProcess
from support.servers.kube_server import serving
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger

from tiphys.kube.resources import GPU_LEDGERS

QUOTA, PROCESSES, GRANTS = 8, 4, 4

# Each process asks until it was given GPUs so many times, and looks at the total after every grant; the first keeps
# what it is given at last. A ledger that was changed by others too often says so, and Argo asks again.
PROGRAM = """
import sys, time
from pathlib import Path
from urllib3 import PoolManager
from support.builders.ledger import ask, queues
from tiphys.errors import StoreError
from tiphys.kube import KubeApi
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger

place, gate, me, grants = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
if place.startswith("http"):
    ledger = KubernetesLedger(KubeApi(place, PoolManager(), "tiphys"), "tiphys")
else:
    ledger = SqliteLedger(Path(place), queues(research={"A100": 8}))

def insist(call):
    while True:
        try:
            return call()
        except StoreError as error:
            assert "changed by others" in str(error), error

print("ready", flush=True)
while not gate.exists():
    time.sleep(0.001)
most = 0
for n in range(grants):
    request = ask((1, 3, 5)[n % 3], uid=f"{me}-{n}")
    while not isinstance(answer := insist(lambda: ledger.request(request)), Admitted):
        time.sleep(0.01)
    most = max(most, sum(lease.request.gpus for lease in ledger.snapshot().leases))
    assert insist(lambda: ledger.request(request)).lease == answer.lease
    if me == 0 and n == grants - 1:
        print("holds", flush=True)
        time.sleep(600)
    insist(lambda: ledger.release(answer.lease))
print(most)
"""


@pytest.fixture(scope="module")
def forking() -> Iterator[ForkingProcess]:
    modules = ("urllib3", "support.builders.ledger", "tiphys_plugin.quota.ledger.sqlite_ledger")
    with ForkingProcess(*modules, "tiphys_plugin.quota.ledger.kubernetes_ledger") as process:
        yield process


Opening = tuple[str, Callable[[], AdmissionBackend]]


@pytest.fixture
def in_file(tmp_path: Path) -> Opening:
    path = tmp_path / "ledger.db"
    return str(path), lambda: SqliteLedger(path, queues(research={"A100": QUOTA}))


@pytest.fixture
def in_cluster() -> Iterator[Opening]:
    with serving() as server:
        api = server.api("tiphys")
        declared = spec(queues(research={"A100": QUOTA}))
        api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}, "spec": declared})
        yield server.url, lambda: KubernetesLedger(api, "tiphys")


@pytest.mark.parametrize("place", ["in_file", "in_cluster"])
def test_processes_never_hold_more_than_the_quota_together(
    forking: ForkingProcess, tmp_path: Path, request: pytest.FixtureRequest, place: str
) -> None:
    where, open_ledger = request.getfixturevalue(place)
    words = (where, str(tmp_path / "gate"))
    processes = [forking.start(PROGRAM, [*words, str(number), str(GRANTS)]) for number in range(PROCESSES)]
    try:
        for process in processes:  # all together, or each would be done before the next one has started
            assert read_line(process) == "ready\n"
        (tmp_path / "gate").touch()
        assert read_line(processes[0]) == "holds\n"
    finally:
        processes[0].kill()
        results = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes[1:]] == [0] * (PROCESSES - 1), results
    assert max(int(out) for out, _ in results[1:]) <= QUOTA
    ledger = open_ledger()
    [kept] = ledger.snapshot().leases
    assert (kept.request.uid, ledger.snapshot().pending) == (f"0-{GRANTS - 1}", ()), "what was killed holds"
    assert not isinstance(ledger.request(ask(QUOTA)), Admitted)
    ledger.release_dead_leases(lambda lease: lease == kept, [kept])
    assert isinstance(ledger.request(ask(QUOTA)), Admitted)


def read_line(process: ForkedProcess) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
