"""Four processes on one `GPULedger` object: together they never hold more than the quota, and all get their turn."""

import subprocess
import sys
from pathlib import Path

from support.kube_server import serving
from support.ledger import ask, queues, spec
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger

from tiphys.kube.resources import GPU_LEDGERS

QUOTA, PROCESSES, GRANTS = 8, 4, 4

# Each process asks until it was given GPUs so many times, and looks at the total after every grant.
# A ledger that was changed by others too often says so, and Argo asks again.
HAMMER = """
import sys, time
from urllib3 import PoolManager
from support.ledger import ask
from tiphys.errors import StoreError
from tiphys.kube import KubeApi
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger

url, me, grants = sys.argv[1], sys.argv[2], int(sys.argv[3])
ledger = KubernetesLedger(KubeApi(url, PoolManager(), "tiphys"), "tiphys")

def insist(call):
    while True:
        try:
            return call()
        except StoreError as error:
            assert "changed by others" in str(error), error

print("ready", flush=True)
sys.stdin.readline()
most = 0
for n in range(grants):
    request = ask((1, 3, 5)[n % 3], uid=f"{me}-{n}")
    while not isinstance(answer := insist(lambda: ledger.request(request)), Admitted):
        time.sleep(0.01)
    most = max(most, sum(lease.request.gpus for lease in ledger.snapshot().leases))
    assert insist(lambda: ledger.request(request)).lease == answer.lease
    insist(lambda: ledger.release(answer.lease))
print(most)
"""


def test_services_never_hold_more_than_the_quota_together():
    with serving() as server:
        api = server.api("tiphys")
        declared = spec(queues(research={"A100": QUOTA}))
        api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}, "spec": declared})
        hammers = [start(server.url, str(n)) for n in range(PROCESSES)]
        try:
            for hammer in hammers:  # all together, or each would be done before the next one has started
                assert hammer.stdout is not None
                assert hammer.stdout.readline() == "ready\n"
            results = race(hammers)
        finally:
            for hammer in hammers:
                hammer.kill()
                hammer.communicate()
        assert [hammer.returncode for hammer in hammers] == [0] * PROCESSES, results
        assert max(int(out) for out, _ in results) <= QUOTA
        ledger = KubernetesLedger(api, "tiphys")
        assert ledger.snapshot().leases == ()
        assert ledger.snapshot().pending == ()
        assert isinstance(ledger.request(ask(QUOTA)), Admitted)


def start(url: str, name: str) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{HAMMER}", url, name, str(GRANTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def race(hammers: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    for hammer in hammers:
        assert hammer.stdin is not None
        hammer.stdin.write("go\n")
        hammer.stdin.flush()
    return [hammer.communicate(timeout=240) for hammer in hammers]
