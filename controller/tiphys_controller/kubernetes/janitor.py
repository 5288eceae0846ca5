"""Clears away what nobody else does, and counts what a person should know of.

| what | what is done |
|---|---|
| uploads that never became an object, older than a day | aborted |
| what is known of alerts that were done with a week ago | removed |
| submissions that were claimed an hour ago and never sent | counted; the loop sends those whose pipelines ask for it |
| runs whose Workflow was deleted before it ended | counted; the same |

Shards that no checkpoint names are retention's business, and leases that nobody
holds the ledger's. In a dry run nothing is removed, and everything counted.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import structlog

from tiphys.errors import ObjectMissingError, TiphysError
from tiphys.records import AlertDone
from tiphys.store import Store, Submission, list_runs, read_record, submissions
from tiphys.store.layout import ALERTS, alert_key, parse_alert
from tiphys.store.leftovers import leftovers
from tiphys_controller.automatic.limits import Mode
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.view import ClusterView
from tiphys_controller.turns import cluster_of

UPLOADS = timedelta(days=1)
ALERTS_DONE = timedelta(days=7)
UNSENT = timedelta(hours=1)
_PERIOD_SECONDS = 3600.0
_FIRST_SECONDS = 60.0
_ANEW_ROUNDS = 24
"""After so many rounds also runs that had settled are looked at again: somebody may have gone on with them."""
_log = structlog.get_logger()


@dataclass
class Janitor:
    """One round goes through the storage of every tenant."""

    stores: Callable[[str], Store]
    namespaces: Callable[[], list[str]]
    view: ClusterView
    cluster: Callable[[], str]
    """Name of this cluster."""
    may_write: Callable[[], bool]
    metrics: Metrics
    now: Callable[[], datetime]
    mode: Mode
    _settled: set[tuple[str, str]] = field(default_factory=set)
    _rounds: int = 0

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        pause = _FIRST_SECONDS
        while not over.wait(pause):
            pause = _PERIOD_SECONDS
            self.round(over)

    def round(self, over: threading.Event) -> None:
        """Go through all tenants once."""
        if self._rounds % _ANEW_ROUNDS == 0:
            self._settled.clear()
        self._rounds += 1
        counted = {"unsent": 0, "gone": 0}
        for namespace in self.namespaces():
            try:
                self._clear(self.stores(namespace), over)
                for what in self._unfinished(namespace, over):
                    counted[what] += 1
            except TiphysError as error:
                self.metrics.failures.labels("janitor").inc()
                _log.warning("janitor.failed", namespace=namespace, error=str(error))
            except Exception:  # noqa: BLE001  the worker loop: a bug about one tenant must not silence the others
                self.metrics.failures.labels("janitor").inc()
                _log.exception("janitor.crashed", namespace=namespace)
        for what, number in counted.items():
            self.metrics.unfinished.labels(what).set(number)

    def _clear(self, store: Store, over: threading.Event) -> None:
        for left in leftovers(store, UPLOADS):
            self._remove("upload", store, left.name, left.remove, over)
        for alert, keys in _done_alerts(store, self.now() - ALERTS_DONE):
            # What says that it is done goes last: without it, it would be done again.
            for key in sorted(keys, key=lambda one: one.endswith("/done.json")):
                self._remove("alert", store, alert, partial(store.delete, key), over)

    def _remove(self, what: str, store: Store, name: str, remove: Callable[[], object], over: threading.Event) -> None:
        if over.is_set() or not self.may_write():
            return
        self.metrics.litter.labels(what).inc()
        dry = self.mode is not Mode.ON
        _log.info("janitor.removes", what=what, store=store.url, name=name, dry_run=dry)
        if not dry:
            remove()

    def _unfinished(self, namespace: str, over: threading.Event) -> Iterator[str]:
        store, present = self.stores(namespace), {one.uid for one in self.view.workflows()}
        for run in list_runs(store):
            if over.is_set() or (namespace, run) in self._settled:
                continue
            held = submissions(store, run)
            what = _stands(held[-1], self.cluster(), present, self.now()) if held else ""
            if what in ("unsent", "gone"):
                yield what
            elif what == "settled":
                self._settled.add((namespace, run))


def _stands(last: Submission, cluster: str, present: set[str], now: datetime) -> str:
    """Where the last submission of a run stands, as far as a person should know: no decision is taken from it."""
    if last.end is not None or cluster_of(last) not in ("", cluster):
        return "settled"
    if last.bound is not None:
        return "" if last.bound.uid in present else "gone"
    return "unsent" if now - last.claim.written_at > UNSENT else ""


def _done_alerts(store: Store, before: datetime) -> Iterator[tuple[str, list[str]]]:
    """Id and keys of each alert that was done with before that time, by the clock of whoever did it."""
    kept: dict[str, list[str]] = {}
    for info in store.list(ALERTS):
        if (place := parse_alert(info.key)) is not None:
            kept.setdefault(place[0], []).append(info.key)
    for alert, keys in kept.items():
        if alert_key(alert, "done") not in keys:
            continue
        try:
            done = read_record(store, alert_key(alert, "done"), AlertDone)
        except ObjectMissingError:
            continue
        if done.written_at < before:
            yield alert, keys
