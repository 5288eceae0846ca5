"""Lists the checkpoints that an attempt may resume from: its ancestors, without late commits of other branches.

The plugin usually chooses the start checkpoint of each attempt, and the claims
record the choices. The plugin cannot read a volume that only pods mount; there
the training program infers the starts from the manifests.
"""

from collections.abc import Iterator
from itertools import chain

from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.failures.bad_checkpoints import list_suspects
from tiphys.lineage.fork_history import find_fork_origin, iter_fork_history
from tiphys.lineage.quarantine import QuarantineListing
from tiphys.lineage.select import (
    StartCheckpoints,
    infer_starts_from_volume,
    iter_candidates,
    iter_commits,
    starts_from_claims,
)
from tiphys.records import CheckpointRef
from tiphys.store import Store, read_step_attempts


class RestoreCandidates:
    """The restore candidates of one attempt.

    Claims are read once: they never change, and a newer attempt fences this one.
    """

    def __init__(self, settings: CheckpointSettings, run_store: Store, store: Store) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._start_checkpoints: StartCheckpoints | None = None
        self._suspects: set[CheckpointRef] = set()

    def iter_newest_first(self) -> Iterator[CheckpointRef]:
        """Yield the checkpoints to restore, the best first, without quarantined ones.

        Lists as far as the caller asks. The claims of older attempts, and the
        checkpoints of a forked run, are read only when the caller asks for more
        candidates.
        """
        quarantined, known = QuarantineListing(self._store), set[CheckpointRef]()
        for ref in self._iter_candidates():
            if ref not in known and ref not in quarantined:
                yield ref
            known.add(ref)

    def _iter_candidates(self) -> Iterator[CheckpointRef]:
        """Yield the candidates, some of them twice."""
        settings, lineage = self._settings, self._settings.lineage
        if not settings.has_own_store:  # the plugin has chosen, and has excluded suspects
            nearest = {settings.attempt: settings.resume_from}
            yield from iter_candidates(iter_commits(self._store, lineage), lineage, nearest)
        starts = self.start_checkpoints()
        origin = find_fork_origin(lineage, starts)
        own = iter_candidates(iter_commits(self._store, lineage), lineage, starts)
        inherited = iter_fork_history(self._run_store, self._store, origin) if origin else ()
        yield from (ref for ref in chain(own, inherited) if ref not in self._suspects)

    def start_checkpoints(self) -> StartCheckpoints:
        """Return the start checkpoint of every attempt, including this one."""
        if self._start_checkpoints is None:
            settings = self._settings
            claimed = read_step_attempts(self._run_store, settings.run, settings.step)
            self._suspects = list_suspects(claimed)
            attempts = {settings.attempt: settings.resume_from, **starts_from_claims(claimed)}
            self._start_checkpoints = (
                infer_starts_from_volume(self._store, settings.lineage, attempts)
                if settings.has_own_store
                else attempts
            )
        return self._start_checkpoints

    @property
    def start_checkpoint(self) -> CheckpointRef | None:
        """The checkpoint that this attempt was to start from; None for the beginning."""
        return self.start_checkpoints()[self._settings.attempt]
