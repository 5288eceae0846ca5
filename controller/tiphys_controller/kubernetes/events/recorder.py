"""Tells people what happens to a run: as Events beside its Workflow, and in its title and description.

When to look at the storage of a Workflow's run: a pure decision, so that a busy cluster costs little.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

import structlog

from tiphys.errors import FencedError, StoreError, TiphysError
from tiphys.store import Store
from tiphys_controller.kubernetes.events.messages import News, deleted, narration, news_of
from tiphys_controller.kubernetes.events.run_log import RunLog
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.watch_cache import ClusterView
from tiphys_controller.kubernetes.workflow_view import Place, SeenWorkflow, candidates, find_place
from tiphys_controller.kubernetes.writer import Writer

AFTER_CHANGE_SECONDS = 3.0
"""Argo changes a Workflow several times within a second."""
WHILE_LIVE_SECONDS = 30.0
"""What a training program tells changes nothing on the Workflow."""
NEWS_LASTS = timedelta(hours=1)
"""The API server forgets Events after an hour; what is older is not told again."""


class Look(NamedTuple):
    """The last look: when, by a monotonic clock, at which state, and whether everything was read and told."""

    at: float
    workflow: SeenWorkflow
    complete: bool


def is_due(workflow: SeenWorkflow, last: Look | None, monotonic: float) -> bool:
    """Whether to look now."""
    if last is None:
        return True
    waited = monotonic - last.at
    if not last.complete or _facts(workflow) != _facts(last.workflow):
        return waited >= AFTER_CHANGE_SECONDS
    return not workflow.finished and waited >= WHILE_LIVE_SECONDS


def is_past(workflow: SeenWorkflow, now: datetime) -> bool:
    """Whether the Workflow was over so long ago that nobody waits for news of it."""
    return (
        workflow.finished and bool(workflow.finished_at) and is_old(datetime.fromisoformat(workflow.finished_at), now)
    )


def is_old(at: datetime, now: datetime) -> bool:
    """Whether this is no news any more."""
    return now - at > NEWS_LASTS


def _facts(workflow: SeenWorkflow) -> SeenWorkflow:
    # Our own annotations change the object, too, and who waits is told other numbers all the time.
    return workflow._replace(annotations={}, waits=dict.fromkeys(workflow.waits, ""))


_ROUND_SECONDS = 1.0
_AT_ONCE = 8
_EVENTS_PER_LOOK = 50
_log = structlog.get_logger()


@dataclass
class _Followed:
    """What is known of one Workflow's run, and what was told of it."""

    place: Place | None = None
    log: RunLog | None = None
    told: set[str] = field(default_factory=set)
    last: Look | None = None


class Narrator:
    """Looks at the run of each Workflow when `is_due` says so.

    Args:
        view: What the watches see.
        stores: Store of a namespace.
        writer: Where Events and annotations go.
        metrics: Counters.
        now: Time of day.
        monotonic: A clock in seconds that never jumps.
    """

    def __init__(
        self,
        view: ClusterView,
        stores: Callable[[str], Store],
        writer: Writer,
        metrics: Metrics,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        self._view = view
        self._stores = stores
        self._writer = writer
        self._metrics = metrics
        self._now = now
        self._monotonic = monotonic
        self._followed: dict[str, _Followed] = {}
        self.trouble = ""
        """Why storage or API server could not be used when that was tried last; empty if they could."""

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        version = -1
        with ThreadPoolExecutor(_AT_ONCE, "tiphys-narrator") as pool:
            while not over.is_set():
                version = self._view.wait(version, _ROUND_SECONDS)
                self.round(pool, over)

    def round(self, pool: ThreadPoolExecutor, over: threading.Event) -> None:
        """Look at whatever is due, and tell of what was deleted."""
        for gone in self._view.take_deleted():
            self._guarded(gone, self._tell_deleted)
        workflows = self._view.workflows()
        self._metrics.workflows.set(sum(not one.finished for one in workflows))
        present = {one.uid for one in workflows}
        for uid in self._followed.keys() - present:
            del self._followed[uid]
        moment, now = self._monotonic(), self._now()
        due = [one for one in workflows if self._is_due(one, moment, now)]
        list(pool.map(lambda one: None if over.is_set() else self._guarded(one, self._look), due))

    def _is_due(self, workflow: SeenWorkflow, moment: float, now: datetime) -> bool:
        followed = self._followed.get(workflow.uid)
        if followed is None:
            if is_past(workflow, now):
                return False
            followed = self._followed[workflow.uid] = _Followed()
        return is_due(workflow, followed.last, moment)

    def _guarded(self, workflow: SeenWorkflow, action: Callable[[SeenWorkflow], None]) -> None:
        try:
            action(workflow)
            self.trouble = ""
        except FencedError:
            return  # whoever leads now tells it
        except TiphysError as error:
            self.trouble = str(error) if isinstance(error, StoreError) else ""
            self._failed(workflow, str(error))
        except Exception:  # noqa: BLE001  the worker loop: a bug about one Workflow must not silence all others
            _log.exception("look.crashed", namespace=workflow.namespace, workflow=workflow.name)
            self._failed(workflow, "a bug; the log has the trace")

    def _failed(self, workflow: SeenWorkflow, reason: str) -> None:
        self._metrics.failures.labels("look").inc()
        _log.warning("look.failed", namespace=workflow.namespace, workflow=workflow.name, error=reason)
        if (followed := self._followed.get(workflow.uid)) is not None:
            followed.last = Look(self._monotonic(), workflow, complete=False)

    def _look(self, workflow: SeenWorkflow) -> None:
        followed = self._followed[workflow.uid]
        self._metrics.looks.inc()
        store = self._stores(workflow.namespace)
        self._read(followed, workflow, store)
        resume = _resume(followed.place, workflow, store)
        left = self._tell(followed, workflow, resume)
        if followed.place and followed.log:
            self._describe(workflow, narration(workflow, followed.place, followed.log, resume))
        complete = not left and (followed.log is None or followed.log.complete)
        followed.last = Look(self._monotonic(), workflow, complete)

    def _read(self, followed: _Followed, workflow: SeenWorkflow, store: Store) -> None:
        if workflow.store.rstrip("/") not in ("", store.url.rstrip("/")):
            return  # compiled for another store: the plugin refuses it, and says so
        followed.place = followed.place or find_place(store, workflow)
        if followed.place is not None:
            followed.log = followed.log or RunLog(followed.place.run)
            followed.log.read(store)

    def _tell(self, followed: _Followed, workflow: SeenWorkflow, resume: str) -> bool:
        """Make the Events that are new; whether some are left for the next look."""
        now = self._now()
        news = [one for one in news_of(workflow, followed.place, followed.log, resume) if one.key not in followed.told]
        fresh = [one for one in news if one.at is None or not is_old(one.at, now)]
        for one in fresh[:_EVENTS_PER_LOOK]:
            self._writer.tell(workflow, one)
            followed.told.add(one.key)
        return len(fresh) > _EVENTS_PER_LOOK

    def _describe(self, workflow: SeenWorkflow, texts: dict[str, str]) -> None:
        changed = {
            name: text
            for name, text in texts.items()
            if name in workflow.narrated and workflow.annotations.get(name) != text
        }
        if changed:
            self._writer.describe(workflow, changed)

    def _tell_deleted(self, workflow: SeenWorkflow) -> None:
        followed = self._followed.get(workflow.uid) or _Followed()
        store = self._stores(workflow.namespace)
        news: News = deleted(_resume(followed.place, workflow, store))
        self._writer.tell(workflow, news)


def _resume(place: Place | None, workflow: SeenWorkflow, store: Store) -> str:
    run = place.run if place else next(iter(candidates(workflow)), workflow.name)
    return f"`tiphys resume {run} --store {store.url}`"
