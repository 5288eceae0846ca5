"""Which checkpoints this attempt may go on from: its ancestors, and no late commit of another branch.

Usually claims say what every attempt started from, since the plugin chose it. A
volume that only pods mount is out of the plugin's sight; there the training
program finds it out from the manifests.
"""

from collections.abc import Iterator

from tiphys.checkpoint.settings import Settings
from tiphys.lineage.choose import StartsFrom, chain, commits_of, starts_of, starts_on_volume
from tiphys.lineage.quarantine import quarantined
from tiphys.lineage.suspects import suspects
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
        attempts started from is read only by who asks for more.
        """
        settings = self._settings
        tried: set[CheckpointRef] = set()
        if not settings.has_volume:  # the plugin has chosen, and barred what is suspect
            nearest = self._usable({settings.attempt: settings.resume_from})
            yield from nearest
            tried.update(nearest)
        yield from (ref for ref in self._usable(self.starts()) if ref not in tried)

    def _usable(self, starts: StartsFrom) -> list[CheckpointRef]:
        lineage = self._settings.lineage
        barred = quarantined(self._store, lineage) | self._suspects
        return [ref for ref in chain(commits_of(self._store, lineage), lineage, starts) if ref not in barred]

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
