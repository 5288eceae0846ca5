"""How many requests a second the ledger object of a real API server admits: many threads, one or two services.

Each thread asks for one GPU, gets it, gives it back, and asks for the next. The
book is not empty meanwhile: others hold GPUs and others wait, whose entries are
read and written along.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import count
from multiprocessing import get_context
from typing import Any

from bench.place import Place
from bench.samples import percentile
from support.ledger import ask, queues, spec
from tiphys_plugin.quota.lease import Admitted, Lease, PendingRequest
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.ledger_object import LedgerObject
from tiphys_plugin.quota.ledger.state import LedgerState

from tiphys.kube import connect_to_cluster
from tiphys.kube.resources import GPU_LEDGERS

HOLDERS = WAITERS = 250
RULES = queues(research={"A100": HOLDERS}, nightly={"A100": 10_000})
"""One queue is full and has a line; the other has room for all who ask here."""
THREADS = 64


def admissions(here: Place, services: int, seconds: float) -> dict[str, Any]:
    """Admissions of ``services`` processes with ``THREADS`` threads together, over at least ``seconds``."""
    name = f"bench-{services}"
    _prepare(here, name)
    arguments = (str(here.cluster.kubeconfig), here.namespace, name, THREADS // services, seconds)
    with ProcessPoolExecutor(services, get_context("spawn")) as pool:
        asked = [pool.submit(_service, *arguments, number) for number in range(services)]
        found = [one.result() for one in asked]
    times = [one for took, _ in found for one in took]
    rate = sum(len(took) / lasted for took, lasted in found)
    return {
        "services": services,
        "threads": THREADS,
        "holders": HOLDERS,
        "waiters": WAITERS,
        "admissions": len(times),
        "per_second": round(rate, 1),
        "p50_ms": percentile(times, 50),
        "p99_ms": percentile(times, 99),
    }


def _prepare(here: Place, name: str) -> None:
    here.api.create(GPU_LEDGERS, here.namespace, {"metadata": {"name": name}, "spec": spec(RULES)})
    now = datetime.now(UTC)
    held = [Lease(f"held-{n}", ask(1, f"holder-{n}"), "A100", now, now) for n in range(HOLDERS)]
    line = [PendingRequest(ask(1, f"waiter-{n}"), n + 1, now, now) for n in range(WAITERS)]
    stored = LedgerObject(here.api, here.namespace, name)
    stored.write(stored.read(), LedgerState(tuple(held), tuple(line)))


def _service(
    kubeconfig: str, namespace: str, name: str, threads: int, seconds: float, number: int
) -> tuple[list[float], float]:
    """Milliseconds from request to answer, and how long all of it took."""
    api = connect_to_cluster(kubeconfig)
    ledger = KubernetesLedger(api, namespace, name)
    names = count()
    times: list[float] = []
    began = time.monotonic()

    def work(_: int) -> None:
        while time.monotonic() - began < seconds:
            asked = time.perf_counter()
            answer = ledger.request(
                ask(1, f"asker-{number}-{os.getpid()}-{next(names)}", queue="nightly", namespace="askers")
            )
            if not isinstance(answer, Admitted):
                raise RuntimeError(f"there is room, and the answer is {answer}")
            times.append(1000 * (time.perf_counter() - asked))
            ledger.release(answer.lease)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    lasted = time.monotonic() - began
    api.close()
    return times, lasted
