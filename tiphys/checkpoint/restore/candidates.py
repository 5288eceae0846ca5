"""Which checkpoints this attempt may go on from: its ancestors, and no late commit of another branch.

Usually claims say what every attempt started from, since the plugin chose it. A
volume that only pods mount is out of the plugin's sight; there the training
program finds it out from the manifests.
"""

from collections.abc import Iterator

from tiphys.checkpoint.settings import Settings
from tiphys.failures.bad_checkpoints import suspects
from tiphys.lineage.fork_history import before, origin_of
from tiphys.lineage.quarantine import quarantined
from tiphys.lineage.select import StartsFrom, chain, commits_of, starts_of, starts_on_volume
from tiphys.records import CheckpointRef
from tiphys.store import Store, step_attempts


class Ancestry:
    """Read once: claims never change, and a newer attempt than this one fences it."""

    def __init__(self, settings: Settings, run_store: Store, store: Store) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._starts: StartsFrom | None = None
        self._suspects: set[CheckpointRef] = set()

    def candidates(self) -> Iterator[CheckpointRef]:
        """Checkpoints to restore, best first, without those in quarantine.

        Costs two listings however many checkpoints there are; what older
        attempts started from, and what lies in another run, is read only by who
        asks for more.
        """
        settings, lineage = self._settings, self._settings.lineage
        passed = quarantined(self._store, lineage)
        commits = commits_of(self._store, lineage)
        if not settings.has_volume:  # the plugin has chosen, and barred what is suspect
            nearest = chain(commits, lineage, {settings.attempt: settings.resume_from})
            yield from (ref for ref in nearest if ref not in passed)
            passed.update(nearest)
        starts = self.starts()
        passed |= self._suspects
        own = chain(commits, lineage, starts)
        yield from (ref for ref in own if ref not in passed)
        if (origin := origin_of(lineage, starts)) is not None:
            yield from self._of_other_runs(origin, passed)

    def _of_other_runs(self, origin: CheckpointRef, passed: set[CheckpointRef]) -> Iterator[CheckpointRef]:
        """What the run that this one is a fork of had, beginning with the checkpoint that the fork began with."""
        barred: dict[str, set[CheckpointRef]] = {}
        for ref in before(self._run_store, self._store, origin):
            if ref.lineage not in barred:
                barred[ref.lineage] = quarantined(self._store, ref.lineage)
            if ref not in passed | barred[ref.lineage]:
                yield ref

    def starts(self) -> StartsFrom:
        """What every attempt started from, this one included."""
        if self._starts is None:
            settings = self._settings
            claimed = step_attempts(self._run_store, settings.run, settings.step)
            self._suspects = suspects(claimed)
            attempts = {settings.attempt: settings.resume_from, **starts_of(claimed)}
            found = starts_on_volume(self._store, settings.lineage, attempts) if settings.has_volume else attempts
            self._starts = found
        return self._starts

    @property
    def start(self) -> CheckpointRef | None:
        """What this attempt was to start from."""
        return self.starts()[self._settings.attempt]
