"""How many requests a second the ledger object of a real API server admits: many threads, one or two services.

Each thread asks for one GPU, gets it, gives it back, and asks for the next. The
book is not empty meanwhile: others hold GPUs and others wait, whose entries are
read and written along. In turns with it, one thread reads the same object and
replaces it, which is all that an API server can do for a ledger.
"""

import os
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.samples import interleaved, percentile, ratio, summary
from support.ledger import ask, queues, spec
from tiphys_plugin.quota.lease import Admitted, Lease, PendingRequest
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.ledger_object import LedgerObject
from tiphys_plugin.quota.ledger.state import LedgerState

from tiphys.kube import KubeApi, connect_to_cluster
from tiphys.kube.resources import GPU_LEDGERS

HOLDERS = WAITERS = 250
RULES = queues(research={"A100": HOLDERS}, nightly={"A100": 10_000})
"""One queue is full and has a line; the other has room for all who ask here."""
THREADS = 64
ROUNDS = 4
ROUND_SECONDS = 5.0
SERVICES = (1, 2)


def admissions(api: KubeApi, kubeconfig: Path, rounds: int = ROUNDS, seconds: float = ROUND_SECONDS) -> dict[str, Any]:
    """Admissions per second by number of services, each with `THREADS` threads together, over plain replacements.

    Args:
        api: An API server; its namespace gets a ledger object for each number of services, and one for replacements.
        kubeconfig: The way to it for the processes of the services.
        rounds: In each of them everything is measured once.
        seconds: Length of each measurement.
    """
    for name in ("plain", *map(str, SERVICES)):
        _prepare(api, name)
    times: defaultdict[int, list[float]] = defaultdict(list)

    def admitted(services: int) -> float:
        arguments = (str(kubeconfig), api.namespace, str(services), THREADS // services, seconds)
        with ProcessPoolExecutor(services, get_context("spawn")) as pool:
            asked = [pool.submit(_service, *arguments, number) for number in range(services)]
            found = [one.result() for one in asked]
        for took, _ in found:
            times[services] += took
        return sum(len(took) / lasted for took, lasted in found)

    rates = interleaved(
        {
            "plain": lambda: _replacements(api, seconds),
            **{str(services): lambda services=services: admitted(services) for services in SERVICES},  # type: ignore[misc]
        },
        rounds,
    )
    return {
        "threads": THREADS,
        "holders": HOLDERS,
        "waiters": WAITERS,
        "replacements_per_second": summary(rates["plain"]),
        "services": {
            str(services): {
                "admissions": len(times[services]),
                "per_second": summary(rates[str(services)]),
                "over_replacements": ratio(rates[str(services)], rates["plain"]),
                "p50_ms": percentile(times[services], 50),
                "p99_ms": percentile(times[services], 99),
            }
            for services in SERVICES
        },
    }


def _replacements(api: KubeApi, seconds: float) -> float:
    """Reads and replacements of the object per second, one after the other, by one thread."""
    stored, began = LedgerObject(api, api.namespace, _object_name("plain")), time.monotonic()
    for number in count(1):
        version = stored.read()
        one, *others = version.state.leases  # a status that is unchanged would not be written
        stored.write(version, LedgerState((*others, one), version.state.pending))
        if (lasted := time.monotonic() - began) >= seconds:
            return number / lasted
    raise AssertionError("the numbers end")


def _prepare(api: KubeApi, name: str) -> None:
    api.create(GPU_LEDGERS, api.namespace, {"metadata": {"name": _object_name(name)}, "spec": spec(RULES)})
    now = datetime.now(UTC)
    held = [Lease(f"held-{n}", ask(1, f"holder-{n}"), "A100", now, now) for n in range(HOLDERS)]
    line = [PendingRequest(ask(1, f"waiter-{n}"), n + 1, now, now) for n in range(WAITERS)]
    stored = LedgerObject(api, api.namespace, _object_name(name))
    stored.write(stored.read(), LedgerState(tuple(held), tuple(line)))


def _object_name(name: str) -> str:
    return f"bench-{name}"


def _service(
    kubeconfig: str, namespace: str, name: str, threads: int, seconds: float, number: int
) -> tuple[list[float], float]:
    """Milliseconds from request to answer, and how long all of it took."""
    api = connect_to_cluster(kubeconfig)
    ledger = KubernetesLedger(api, namespace, _object_name(name))
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
