"""Volumes: claims are folders that stay, the rest live as long as a pod."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiphys.protocol.pipeline import Manifest

SOURCES = ("persistentVolumeClaim", "emptyDir")
"""Volume sources that are understood."""


@dataclass(frozen=True)
class Volumes:
    """The volumes that one workflow can mount.

    A named claim is shared by all workflows of the state folder; one made from
    ``volumeClaimTemplates`` belongs to its workflow.
    """

    manifest: Manifest
    state: Path

    def of(self, template: Manifest) -> Mapping[str, Path | None]:
        """Folder of each volume that ``template`` sees; None for an emptyDir, which every pod has anew."""
        spec = self.manifest["spec"]
        claimed = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates") or []]
        own = {name: self._folder(self.manifest["metadata"]["name"]) / name for name in claimed}
        declared = [*(spec.get("volumes") or []), *(template.get("volumes") or [])]
        return own | {volume["name"]: self._source(volume) for volume in declared}

    def _source(self, volume: Manifest) -> Path | None:
        claim = volume.get("persistentVolumeClaim")
        return self._folder(claim["claimName"]) if claim else None

    def _folder(self, name: str) -> Path:
        return self.state / "volumes" / name
