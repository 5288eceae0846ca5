"""What each process costs, by how much there is of what it works on."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from bench.scale.filled import CLUSTER, OPEN_RUNS, add_checkpoints, add_handled_alerts, add_runs
from bench.scale.paged_store import PagedStore
from support.builders.argo_objects import workflow
from support.builders.lineage import LINEAGE, attempts_of
from tiphys_controller.auto_resume.act import AutoResumeReconciler
from tiphys_controller.auto_resume.observation_health import ObservationHealth, ObservationHealthTracker
from tiphys_controller.auto_resume.state import AutomationMode, AutoResumeLimits
from tiphys_controller.kubernetes.alert_worker import AlertSweep
from tiphys_controller.kubernetes.auto_resume_loop import AutoResumeLoop, RunTracker
from tiphys_controller.kubernetes.janitor import Janitor
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.workflow_view import build_workflow_view
from tiphys_controller.run_search import RunFilter, search_runs

from hera_pipelines.ui.home_page import HomeFilter, read_home_view
from hera_pipelines.ui.run_index import RunIndex
from tiphys.kube import ListSnapshot
from tiphys.lineage.retention.delete import Retention
from tiphys.lineage.select import choose_checkpoint
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.records import utc_now

_ROUNDS, _ENOUGH_SECONDS = 3, 2.0
_NEVER = threading.Event()


class Cost(NamedTuple):
    """Requests to storage, and CPU time in milliseconds (the least of several rounds)."""

    requests: int
    cpu_ms: float


def measure(store: PagedStore, call: Callable[[], object]) -> Cost:
    """The cost of a call, after one that fills caches."""
    call()
    times: list[float] = []
    while len(times) < _ROUNDS and sum(times) < _ENOUGH_SECONDS:
        store.requests, before = 0, time.process_time()
        call()
        times.append(time.process_time() - before)
    return Cost(store.requests, round(1000 * min(times), 3))


@cache
def _with_runs(ended: int) -> PagedStore:
    store = PagedStore()
    add_runs(store, ended)
    return store


def first_page(ended: int) -> Cost:
    store = _with_runs(ended)
    return measure(store, lambda: search_runs(store, RunFilter(), None, 5))


def home_start(ended: int) -> Cost:
    store = _with_runs(ended)
    return measure(store, lambda: RunIndex(store).refresh())


def home_round(ended: int) -> Cost:
    store = _with_runs(ended)
    index = RunIndex(store)

    def show() -> None:
        index.refresh()
        read_home_view(index, HomeFilter())

    return measure(store, show)


def janitor_round(ended: int, namespaces: int = 1) -> Cost:
    store, view = _with_runs(ended), WatchCache()
    view.apply_workflow_change("ml", ListSnapshot([workflow(f"run-{number:06}") for number in range(OPEN_RUNS)]))
    janitor = Janitor(
        stores=lambda _: store,
        tenants=lambda: [f"team-{number}" for number in range(namespaces)],
        view=view,
        find_blind_reason=str,
        cluster_name=lambda: CLUSTER,
        read_ledger=lambda: None,
        is_leader=lambda: True,
        metrics=ControllerMetrics(),
        now=utc_now,
        mode=AutomationMode.ON,
    )
    return measure(store, lambda: janitor.run_round(_NEVER))


class _Reporter:
    def report_result(self, *_: object) -> None: ...

    def report_open_breakers(self, count: int) -> None: ...

    def report_failure(self, what: str) -> None:
        raise AssertionError(what)


def auto_resume_search(ended: int, namespaces: int = 1) -> Cost:
    """A search of storage by a controller that has just started."""
    store = _with_runs(ended)
    limits, clock = AutoResumeLimits(), time.monotonic
    submitter: Any = None

    def search() -> None:
        reconciler = AutoResumeReconciler(
            stores=lambda _: store,
            submitter=lambda: submitter,
            is_leader=lambda: True,
            observation_health=lambda _: ObservationHealth(),
            monotonic=clock,
            limits=limits,
        )
        loop = AutoResumeLoop(
            view=WatchCache(),
            reconciler=reconciler,
            health_tracker=ObservationHealthTracker(str, int, limits, clock),
            stores=lambda _: store,
            reporter=_Reporter(),
            limits=limits,
            monotonic=clock,
            tenants=lambda: [f"team-{number}" for number in range(namespaces)],
        )
        loop._sweep(_NEVER)

    return measure(store, search)


def alerts_turn(handled: int) -> Cost:
    """One turn of a namespace; a sweep over very many alerts takes several."""
    store = PagedStore()
    add_handled_alerts(store, handled)
    return measure(store, lambda: AlertSweep().find_next_pending(store))


def choose_start(checkpoints: int) -> Cost:
    store = PagedStore()
    add_checkpoints(store, checkpoints)
    return measure(store, lambda: choose_checkpoint(store, LINEAGE, attempts_of(None)))


def retain(checkpoints: int) -> Cost:
    """What follows a commit in a training that keeps all of these checkpoints, as the mean of a hundred commits."""
    store, commits = PagedStore(), 100
    add_checkpoints(store, checkpoints)
    retention = Retention(store, LINEAGE, RetentionPolicy(last=3, every_steps=1))
    cost = measure(store, lambda: [retention.apply({}, ()) for _ in range(commits)])
    return Cost(round(cost.requests / commits), round(cost.cpu_ms / commits, 3))


def tracker_round(live: int) -> Cost:
    """A round of auto-resume over the Workflows in the watch."""
    asks = {AUTO_RESUME_ANNOTATION: "{}"}
    views = [build_workflow_view(workflow(f"run-{number}", annotations=asks)) for number in range(live)]
    limits = AutoResumeLimits()
    tracker = RunTracker(ObservationHealthTracker(str, int, limits, time.monotonic))
    return measure(PagedStore(), lambda: tracker.update(views, 0.0))


SIZES = (1, 100, 10_000)
_Measurement = Callable[[int], Cost]
RUNS: dict[str, _Measurement] = {
    "first_page": first_page,
    "home_start": home_start,
    "home_round": home_round,
    "janitor": janitor_round,
    "auto_resume": auto_resume_search,
}
OTHERS: dict[str, _Measurement] = {
    "alerts": alerts_turn,
    "choose_start": choose_start,
    "retain": retain,
    "tracker": tracker_round,
    "janitor_namespaces": lambda namespaces: janitor_round(0, namespaces),
    "auto_resume_namespaces": lambda namespaces: auto_resume_search(0, namespaces),
}


def measure_all(sizes: Iterable[int], say: Callable[[str], None]) -> dict[str, dict[str, Cost]]:
    """Costs by process and size."""
    found: dict[str, dict[str, Cost]] = {}
    for name, process in (RUNS | OTHERS).items():
        found[name] = {str(size): process(size) for size in sizes}
        say(f"{name}: {found[name]}")
    return found
