"""Which checkpoints this attempt may go on from: its ancestors, and no late commit of another branch.

Usually claims say what every attempt started from, since the plugin chose it. A
volume that only pods mount is out of the plugin's sight; there the training
program finds it out from the manifests.
"""

import contextlib

from tiphys.checkpoint.settings import Settings
from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.choose import StartsFrom, chain, commits_of, inferred_starts, restored_by, starts_of
from tiphys.lineage.quarantine import quarantined
from tiphys.lineage.suspects import suspects
from tiphys.lineage.verify import read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import Store, step_attempts


class Ancestry:
    """Read once: claims never change, and a newer attempt than this one fences it."""

    def __init__(self, settings: Settings, run_store: Store, store: Store) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._starts: StartsFrom | None = None
        self._suspects: set[CheckpointRef] = set()

    def candidates(self) -> list[CheckpointRef]:
        """Checkpoints to restore, best first, without those in quarantine."""
        lineage = self._settings.lineage
        starts = self.starts()
        barred = quarantined(self._store, lineage) | self._suspects
        return [ref for ref in chain(commits_of(self._store, lineage), lineage, starts) if ref not in barred]

    def starts(self) -> StartsFrom:
        """What every attempt started from, this one included."""
        if self._starts is None:
            settings = self._settings
            claimed = step_attempts(self._run_store, settings.run, settings.step)
            self._suspects = suspects(claimed)
            attempts = {settings.attempt: settings.resume_from, **starts_of(claimed)}
            self._starts = self._inferred(attempts) if settings.has_volume else attempts
        return self._starts

    @property
    def start(self) -> CheckpointRef | None:
        """What this attempt was to start from."""
        return self.starts()[self._settings.attempt]

    def _inferred(self, attempts: StartsFrom) -> StartsFrom:
        commits = commits_of(self._store, self._settings.lineage)
        manifests: list[CheckpointManifest] = []
        for newest in {ref.attempt: ref for ref in reversed(commits)}.values():
            with contextlib.suppress(IntegrityError, ObjectMissingError):
                manifests.append(read_manifest(self._store, newest))
        return inferred_starts(commits, self._settings.lineage, attempts, restored_by(manifests))
