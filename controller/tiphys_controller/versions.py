"""Are Python and the frameworks here those that wrote the checkpoints which trainings go on from?

Only who runs the programs on this machine can know before they start; on a
cluster the image decides, and the manifests of new checkpoints tell afterwards.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.choose import commits_of
from tiphys.lineage.verify import read_manifest
from tiphys.protocol.drift import Drift, DriftPolicy
from tiphys.store import Store, lineage_of
from tiphys_controller.drifting import Difference

Installed = Callable[[str], str]
"""From a package, or ``python``, to its version; empty where it is not installed."""


def version_drift(
    store: Store, run: str, steps: Iterable[str], installed: Installed, policy: DriftPolicy
) -> Iterator[Difference]:
    """What is of another version than where the newest checkpoint was written; costs a listing and a read per step."""
    for step in steps:
        for package, before in _written_with(store, lineage_of(run, step)).items():
            if (after := installed(package)) != before:
                yield Difference(
                    drift=Drift.VERSIONS,
                    step=step,
                    place=package,
                    before=before,
                    after=after,
                    action=policy.action(Drift.VERSIONS),
                )


def _written_with(store: Store, lineage: str) -> dict[str, str]:
    newest = next(iter(commits_of(store, lineage)), None)
    with contextlib.suppress(IntegrityError, ObjectMissingError):  # the attempt takes an older one, and says so
        return read_manifest(store, newest).facts.versions if newest else {}
    return {}
