"""Which runs are to be looked at, and when: what the watch has shown of each. No I/O; one thread at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tiphys_controller.automatic.observed import RunKey
from tiphys_controller.automatic.sight import Sight
from tiphys_controller.kubernetes.seen import SeenWorkflow

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
