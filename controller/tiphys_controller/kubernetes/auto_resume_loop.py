"""Has the attendant look at every run that may have ended, as soon as the watch or storage says so.

The watch is quick and forgets; storage is searched now and then, and remembers.
Either is enough: a run whose Workflow was deleted while nobody watched is found
in storage, and one whose end nobody recorded by its Workflow. Each run has at
most one look at a time.

Which runs are to be looked at, and when: what the watch has shown of each. No I/O; one thread at a time.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from tiphys.errors import ConflictError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.store import Store, list_runs
from tiphys_controller.auto_resume.act import Attendant, Attended
from tiphys_controller.auto_resume.decide import Action
from tiphys_controller.auto_resume.observation_health import Sight
from tiphys_controller.auto_resume.state import Limits, RunKey
from tiphys_controller.kubernetes.watch_cache import ClusterView
from tiphys_controller.kubernetes.workflow_view import SeenWorkflow, find_place

NEVER = float("inf")
AGAIN_SECONDS = 10.0
"""When to look again after something did not answer, or was not there yet."""
LATER_SECONDS = 300.0
"""The same after something that does not pass by itself."""


@dataclass
class Followed:
    """One run that its author wants to go on by itself."""

    key: RunKey
    due: float = NEVER
    busy: bool = False
    settled: bool = False
    """Nothing changes by itself any more."""
    ended_at: float | None = None
    """When its end was noticed; None while it is not over."""
    workflow: SeenWorkflow | None = None
    """The newest that was seen."""
    shutdowns: dict[str, str] = field(default_factory=dict)
    """By uid, what its Workflows were asked to do."""


@dataclass
class Known:
    """One Workflow of such a run; ``run`` is None until that was found out."""

    workflow: SeenWorkflow
    run: RunKey | None = None
    place_at: float = 0.0
    over: bool = False
    """Whether its end was taken note of."""


class Register:
    """All Workflows that carry the wish, and their runs."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight
        self._known: dict[str, Known] = {}
        self._runs: dict[RunKey, Followed] = {}

    def take_note(self, workflows: Iterable[SeenWorkflow], now: float) -> None:
        """These are all Workflows that there are now."""
        present = {one.uid: one for one in workflows if one.auto_resume}
        for uid, workflow in present.items():
            known = self._known.setdefault(uid, Known(workflow))
            known.workflow = workflow
            if known.run is not None:
                self._hand_on(known, self.follow(known.run), now)
        for uid in self._known.keys() - present.keys():
            gone = self._known.pop(uid)
            if gone.run is not None and not gone.over:
                self._end(self.follow(gone.run), now, vanished=True)

    def follow(self, key: RunKey) -> Followed:
        """The run, from now on if it was not followed before."""
        return self._runs.setdefault(key, Followed(key))

    def find(self, key: RunKey) -> Followed | None:
        return self._runs.get(key)

    def due(self, now: float) -> Iterator[Followed]:
        """Runs to look at; each is busy until somebody says otherwise."""
        for run in self._runs.values():
            if not run.busy and run.due <= now:
                run.busy, run.due = True, NEVER
                yield run

    def to_place(self, now: float) -> Iterator[Known]:
        """Workflows of which it is time to find out the run."""
        for known in self._known.values():
            if known.run is None and known.place_at <= now:
                known.place_at = now + (LATER_SECONDS if known.workflow.finished else AGAIN_SECONDS)
                yield known

    def _hand_on(self, known: Known, run: Followed, now: float) -> None:
        workflow = run.workflow = known.workflow
        if workflow.shutdown:
            run.shutdowns[workflow.uid] = workflow.shutdown
        if workflow.finished and not known.over:
            known.over = True
            if workflow.phase != "Succeeded":
                self._end(run, now, vanished=False)

    def _end(self, run: Followed, now: float, *, vanished: bool) -> None:
        self._sight.ended(run.key, vanished=vanished)
        run.settled, run.due, run.ended_at = False, now, now


_ROUND_SECONDS = 1.0
_AT_ONCE = 8
_GOES_ON = ("Runs", "Succeeded", "Elsewhere")
_log = structlog.get_logger()


class Teller(Protocol):
    """Says to people and to Prometheus what the loop does."""

    def attended(self, run: Followed, attended: Attended) -> None:
        """A run was looked at, and this came of it."""

    def failed(self, what: str) -> None:
        """Something could not be done, and is tried again."""


@dataclass(frozen=True)
class Given:
    """What the loop is given."""

    view: ClusterView
    attendant: Attendant
    sight: Sight
    stores: Callable[[str], Store]
    teller: Teller
    limits: Limits
    monotonic: Callable[[], float]
    namespaces: tuple[str, ...] | None
    """Whose storage is searched; None: that of all namespaces in which a Workflow was seen."""


class Resumer:
    """The loop. Everything but looks happens in one thread."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._register = Register(given.sight)
        self._not_asked: set[RunKey] = set()
        self._found: list[RunKey] = []
        self._sweep_at = 0.0
        self._sweeping = False
        self._lock = threading.Lock()

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        version = -1
        with ThreadPoolExecutor(_AT_ONCE, "tiphys-resumer") as pool:
            while not over.is_set():
                version = self._given.view.wait(version, _ROUND_SECONDS)
                self.round(pool, over)

    def round(self, pool: ThreadPoolExecutor, over: threading.Event) -> list[Future[None]]:
        """Take note of what is new, and begin every look that is due; answers what was begun."""
        now = self._given.monotonic()
        self._register.take_note(self._given.view.workflows(), now)
        with self._lock:
            found, self._found = self._found, []
        for key in found:
            self._register.follow(key).due = now
        begun = [pool.submit(self._place, known, over) for known in list(self._register.to_place(now))]
        if now >= self._sweep_at and not self._sweeping and not self._given.sight.health("").blind:
            self._sweeping, self._sweep_at = True, now + self._given.limits.sweep_seconds
            begun.append(pool.submit(self._sweep, over))
        return begun + [pool.submit(self._look, run, over) for run in self._register.due(now)]

    def _place(self, known: Known, over: threading.Event) -> None:
        """Find out which run a Workflow belongs to; its first admit, or whoever sent it, has written that down."""
        workflow = known.workflow

        def place() -> float:
            found = find_place(self._given.stores(workflow.namespace), workflow)
            if found is not None:
                known.run = (workflow.namespace, found.run)
                self._given.view.wake()
            return 0.0

        if not over.is_set():
            self._guarded(workflow.namespace, place)

    def _sweep(self, over: threading.Event) -> None:
        """Search storage for runs that nobody has told of, and look again at those that have not settled."""
        try:
            for namespace in self._tenants():
                self._guarded(namespace, lambda of=namespace: self._search(of, over))  # type: ignore[misc]
        finally:
            self._sweeping = False

    def _tenants(self) -> list[str]:
        if self._given.namespaces is not None:
            return list(self._given.namespaces)
        return self._given.view.namespaces()

    def _search(self, namespace: str, over: threading.Event) -> float:
        for name in list_runs(self._given.stores(namespace)):
            if over.is_set():
                break
            if self._is_worth_a_look((namespace, name)):
                with self._lock:
                    self._found.append((namespace, name))
        return 0.0

    def _is_worth_a_look(self, key: RunKey) -> bool:
        known = self._register.find(key)
        if known is not None:
            return not (known.settled or known.busy)
        if key in self._not_asked:
            return False
        try:
            asked = self._given.attendant.policy(key) is not None
        except (NotFoundError, UsageError):
            return False  # not recorded yet, or not compiled by us; the next sweep looks again
        if not asked:
            self._not_asked.add(key)
        return asked

    def _look(self, run: Followed, over: threading.Event) -> None:
        again = AGAIN_SECONDS
        try:
            if not over.is_set():
                again = self._guarded(run.key[0], lambda: self._attend(run))
        finally:
            run.due = min(run.due, self._given.monotonic() + again)
            run.busy = False

    def _attend(self, run: Followed) -> float:
        """One look; answers after how many seconds the next is due."""
        attended = self._given.attendant.attend(run.key, run.shutdowns)
        decision = attended.decision
        run.settled = decision.action is Action.LEAVE and decision.reason != "Runs"
        if attended.resumed or decision.reason in _GOES_ON:
            self._given.sight.explained(run.key)
        self._given.teller.attended(run, attended)
        if run.settled:
            self._given.attendant.forget(run.key)
        if decision.action is not Action.WAIT:
            return NEVER
        return min(max(decision.seconds, _ROUND_SECONDS), LATER_SECONDS)

    def _guarded(self, namespace: str, action: Callable[[], float]) -> float:
        """Do something that may fail, without silencing the loop; answers when to try again."""
        try:
            return action()
        except ConflictError as error:  # somebody else goes on with it, or leads
            _log.info("resume.left", namespace=namespace, reason=str(error))
            return AGAIN_SECONDS
        except StoreError as error:
            self._given.sight.trouble(namespace)
            _log.warning("resume.unanswered", namespace=namespace, error=str(error))
            again = AGAIN_SECONDS
        except TiphysError as error:
            _log.warning("resume.failed", namespace=namespace, error=str(error))
            again = LATER_SECONDS
        except Exception:  # noqa: BLE001  the worker loop: a bug about one run must not keep all others from going on
            _log.exception("resume.crashed", namespace=namespace)
            again = LATER_SECONDS
        self._given.teller.failed("resume")
        return again
