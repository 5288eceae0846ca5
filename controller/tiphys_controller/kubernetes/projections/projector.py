"""Keeps the projections as the ledger is, while this controller leads.

A round costs one GET of the ledger, and one write for each queue or lease that
has changed since the last; once a minute, a list of both kinds, by which changes
of others are found and undone. Rounds are seconds apart and write a bounded
number of objects, so that a burst of admissions never becomes one of writes.
"""

import threading
import time
from collections.abc import Callable, Iterator

import structlog

from tiphys.errors import ConflictError, FencedError, NotFoundError, TiphysError
from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import GPU_FLAVORS, GPU_LEASES, GPU_LEDGERS, GPU_QUEUES, LEDGER_NAME
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.news import leaving
from tiphys_controller.kubernetes.projections.objects import LEDGER_LABEL, Key, projections
from tiphys_controller.kubernetes.view import ClusterView
from tiphys_controller.kubernetes.writer import Writer

ROUND_SECONDS = 5.0
LIST_SECONDS = 60.0
WRITES_OF_A_ROUND = 100
_KINDS = (GPU_QUEUES, GPU_FLAVORS, GPU_LEASES)
_log = structlog.get_logger()


class Projector:
    """Projects the ledger ``name`` of a namespace.

    Args:
        api: The API server.
        namespace: Where ledger and projections are.
        view: Workflows, to whom it is told that they were asked to leave.
        writer: Writes only while this controller leads.
        metrics: Counters.
        monotonic: A clock in seconds that never jumps.
        name: Name of the ledger.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        view: ClusterView,
        writer: Writer,
        metrics: Metrics,
        monotonic: Callable[[], float] = time.monotonic,
        name: str = LEDGER_NAME,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._view = view
        self._writer = writer
        self._metrics = metrics
        self._monotonic = monotonic
        self._name = name
        self._present: dict[Key, Object] | None = None
        """What is there, as far as is known; None before the first list and after a failure."""
        self._listed_at = 0.0
        self._told: set[str] = set()

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        while not over.is_set():
            try:
                self.round()
            except FencedError:
                self._present = None  # whoever leads now does it
            except TiphysError as error:
                self._failed(str(error))
            except Exception:  # noqa: BLE001  the worker loop: the next round begins anew
                _log.exception("projection.crashed")
                self._failed("a bug; the log has the trace")
            over.wait(ROUND_SECONDS)

    def round(self) -> int:
        """Bring the projections up to date, as far as one round may; the number of writes.

        Raises:
            StoreError: the API server is out of reach.
            FencedError: another controller may lead by now.
        """
        ledger = self._api.get(GPU_LEDGERS, self._namespace, self._name)
        wanted = projections(ledger) if ledger is not None else {}
        present, writes = self._known(), 0
        for write in self._writes(wanted, present):
            if writes == WRITES_OF_A_ROUND:
                break
            write()
            writes += 1
        self._tell_those_who_leave(ledger or {})
        return writes

    def _known(self) -> dict[Key, Object]:
        if self._present is None or self._monotonic() - self._listed_at >= LIST_SECONDS:
            labels = f"{LEDGER_LABEL}={self._name}"
            found = ((kind, self._api.list(kind, self._namespace, labels).items) for kind in _KINDS)
            self._present = {Key(kind, one["metadata"]["name"]): one for kind, items in found for one in items}
            self._listed_at = self._monotonic()
        return self._present

    def _writes(self, wanted: dict[Key, Object], present: dict[Key, Object]) -> Iterator[Callable[[], None]]:
        for key in present.keys() - wanted.keys():
            yield lambda key=key: self._delete(present, key)  # type: ignore[misc]
        for key, body in wanted.items():
            if not _is_same(present.get(key), body):
                yield lambda key=key, body=body: self._put(present, key, body)  # type: ignore[misc]

    def _put(self, present: dict[Key, Object], key: Key, body: Object) -> None:
        """Make it, or write over it; a spec that cannot be changed takes a new object."""
        before = present.get(key)
        if before is not None and before.get("spec") != body["spec"]:
            self._delete(present, key)
            before = None
        try:
            present[key] = self._writer.project(key.resource, body, over=before)
        except FencedError:
            raise
        except (ConflictError, NotFoundError):
            self._present = None  # somebody else was here: look again

    def _delete(self, present: dict[Key, Object], key: Key) -> None:
        gone = present.pop(key)
        try:
            self._writer.withdraw(key.resource, gone)
        except FencedError:
            raise
        except ConflictError:
            self._present = None

    def _tell_those_who_leave(self, ledger: Object) -> None:
        """Events on the Workflows whose trainings were asked to save and go."""
        leases = [one for one in (ledger.get("status") or {}).get("leases") or () if one.get("leaving")]
        workflows = {one.uid: one for one in self._view.workflows()} if leases else {}
        for lease in leases:
            news, workflow = leaving(lease), workflows.get(lease["uid"])
            if workflow is not None and news.key not in self._told:
                self._writer.tell(workflow, news)
                self._told.add(news.key)
        self._told &= {leaving(one).key for one in leases}

    def _failed(self, why: str) -> None:
        self._present = None
        self._metrics.failures.labels("projection").inc()
        _log.warning("projection.failed", namespace=self._namespace, ledger=self._name, error=why)


def _is_same(found: Object | None, wanted: Object) -> bool:
    return found is not None and all(found.get(part) == wanted[part] for part in ("spec", "status"))
