"""How many requests a second the ledger object of a real API server admits: many threads, one or three services.

Each thread asks for one GPU, gets it, gives it back, and asks for the next. The
book is not empty meanwhile: ten thousand leases hold GPUs, and fifty thousand
requests wait. In turns with it, one thread reads the head of such a log and
appends an entry, one after the other, which is all that an API server can do for
one caller.
"""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.samples import interleaved, percentile, ratio, summary
from support.builders.ledger import ask, queues, spec
from tiphys_plugin.quota.lease import Admitted, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.ledger_object import LedgerObject

from tiphys.errors import StoreError
from tiphys.kube import KubeApi, connect_to_cluster
from tiphys.kube.resources import GPU_LEDGERS

HOLDERS, WAITERS = 10_000, 50_000
RULES = queues(research={"A100": HOLDERS}, nightly={"A100": 10_000}).model_copy(update={"ledger_share": 1.0})
"""One queue is full and has a line; the other has room for all who ask here."""
THREADS = 64
ROUNDS = 4
ROUND_SECONDS = 10.0
SERVICES = (1, 3)


def admissions(
    api: KubeApi,
    kubeconfig: Path,
    rounds: int = ROUNDS,
    seconds: float = ROUND_SECONDS,
    holders: int = HOLDERS,
    waiters: int = WAITERS,
) -> dict[str, Any]:
    """Admissions per second by number of services, each with `THREADS` threads together, over plain entries.

    Args:
        api: An API server; its namespace gets a ledger object for each number of services, and one for plain entries.
        kubeconfig: The way to it for the processes of the services.
        rounds: In each of them everything is measured once.
        seconds: Length of each measurement.
        holders: Leases in the ledger, at most `HOLDERS`.
        waiters: Requests that wait in it.
    """
    for name in ("plain", *map(str, SERVICES)):
        _prepare(api, name, holders, waiters)
    times: defaultdict[int, list[float]] = defaultdict(list)
    written: defaultdict[int, int] = defaultdict(int)

    def admitted(services: int) -> float:
        arguments = (str(kubeconfig), api.namespace, str(services), THREADS // services, seconds)
        with ProcessPoolExecutor(services, get_context("spawn")) as pool:
            asked = [pool.submit(_service, *arguments, number) for number in range(services)]
            found = [one.result() for one in asked]
        for took, _, size in found:
            times[services] += took
            written[services] += size
        return sum(len(took) / lasted for took, lasted, _ in found)

    rates = interleaved(
        {
            "plain": lambda: _entries(api, seconds),
            **{str(services): lambda services=services: admitted(services) for services in SERVICES},  # type: ignore[misc]
        },
        rounds,
    )
    return {
        "threads": THREADS,
        "holders": holders,
        "waiters": waiters,
        "entries_per_second": summary(rates["plain"]),
        "services": {
            str(services): {
                "admissions": len(times[services]),
                "per_second": summary(rates[str(services)]),
                "over_entries": ratio(rates[str(services)], rates["plain"]),
                "p50_ms": percentile(times[services], 50),
                "p99_ms": percentile(times[services], 99),
                "bytes_per_admission": round(written[services] / max(1, len(times[services]))),
            }
            for services in SERVICES
        },
    }


def _entries(api: KubeApi, seconds: float) -> float:
    """Entries per second that one thread appends, one after the other; each releases a lease or grants it again."""
    stored, began = LedgerObject(api, api.namespace, _object_name("plain")), time.monotonic()
    for number in count(1):
        version = stored.read()
        *others, last = version.state.leases
        again = Lease(f"again-{number}", last.request, last.pool, last.granted_at, last.check_at)
        stored.write(version, replace(version.state, leases=(*others, again)))
        if (lasted := time.monotonic() - began) >= seconds:
            return number / lasted
    raise AssertionError("the numbers end")


class _CountingPool:
    """A connection pool that sums what is sent."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.sent_bytes = 0

    def request(self, method: str, url: str, **options: Any) -> Any:
        self.sent_bytes += len(options.get("body") or b"")
        return self._pool.request(method, url, **options)

    def clear(self) -> None:
        self._pool.clear()


def _prepare(api: KubeApi, name: str, holders: int, waiters: int) -> None:
    api.create(GPU_LEDGERS, api.namespace, {"metadata": {"name": _object_name(name)}, "spec": spec(RULES)})
    now = datetime.now(UTC)
    held = [Lease(f"held-{n}", ask(1, f"holder-{n}"), "A100", now, now) for n in range(holders)]
    line = [PendingRequest(ask(1, f"waiter-{n}"), n + 1, now, now) for n in range(waiters)]
    stored = LedgerObject(api, api.namespace, _object_name(name))
    stored.write(stored.read(), LedgerState(tuple(held), tuple(line)))


def _object_name(name: str) -> str:
    return f"bench-{name}"


def _insist(call: Callable[[], Any]) -> Any:
    """Ask until there is an answer, as Argo does when others were faster every time."""
    while True:
        with contextlib.suppress(StoreError):
            return call()


def _service(
    kubeconfig: str, namespace: str, name: str, threads: int, seconds: float, number: int
) -> tuple[list[float], float, int]:
    """Milliseconds from request to answer, how long all of it took, and the bytes that were written."""
    api = connect_to_cluster(kubeconfig)
    pool = _CountingPool(api._transport._pool)
    api._transport._pool = pool  # type: ignore[assignment]
    ledger = KubernetesLedger(api, namespace, _object_name(name))
    ledger.build_indexes()  # as a service does before it answers
    sent_before = pool.sent_bytes
    names = count()
    times: list[float] = []
    began = time.monotonic()

    def work(_: int) -> None:
        while time.monotonic() - began < seconds:
            asked = time.perf_counter()
            request = ask(1, f"asker-{number}-{os.getpid()}-{next(names)}", queue="nightly", namespace="askers")
            answer = _insist(lambda: ledger.request(request))  # noqa: B023
            if not isinstance(answer, Admitted):
                raise RuntimeError(f"there is room, and the answer is {answer}")
            times.append(1000 * (time.perf_counter() - asked))
            _insist(lambda: ledger.release(answer.lease))  # noqa: B023

    with ThreadPoolExecutor(threads) as workers:
        list(workers.map(work, range(threads)))
    lasted = time.monotonic() - began
    api.close()
    return times, lasted, pool.sent_bytes - sent_before
