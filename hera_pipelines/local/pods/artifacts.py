"""Copies artifacts between the bucket and the folder of an attempt.

On a cluster, Argo's default repository and Tiphys share one bucket. Here a key
below the store's prefix belongs to the store, and any other key to a folder in
place of the rest of the bucket. Artifacts are stored without archive.
"""

from pathlib import Path

from hera_pipelines.local.nodes import Artifact
from tiphys.errors import NotFoundError, UsageError
from tiphys.store import DirectoryStore, Store, list_output_files


class ArtifactBucket:
    """Reads and writes artifacts by key. Its calls block, so do not use it in the event loop."""

    def __init__(self, store: Store, other_artifacts: Path) -> None:
        self._store = store
        self._other_artifacts = other_artifacts

    def fetch(self, artifact: Artifact, target: Path) -> None:
        """Copy an artifact (a file or a folder) to ``target``.

        Raises:
            NotFoundError: no object exists under its key.
            StoreError: storage is unavailable or refuses.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        if "raw" in artifact:
            target.write_text(artifact["raw"]["data"])
            return
        store, key = self._locate_key(artifact["s3"]["key"])
        keys = [entry.key for entry in store.list(key) if entry.key == key or entry.key.startswith(f"{key}/")]
        if not keys:
            raise NotFoundError(f"artifact {artifact['name']} failed to load: key does not exist: {key}")
        for key_of_file in keys:
            inside = key_of_file[len(key) :].lstrip("/")
            _download(store, key_of_file, target / inside if inside else target)

    def save(self, artifact: Artifact, source: Path) -> None:
        """Store a file or folder under the artifact's key, create-only.

        Raises:
            ObjectExistsError: the key is taken.
            StoreError: storage is unavailable or refuses.
            UsageError: no store can keep an entry of the folder.
        """
        store, key = self._locate_key(artifact["s3"]["key"])
        for path, file_key in list_output_files(source, key, f"output artifact {artifact['name']}"):
            store.create_from_file(file_key, path)

    def _locate_key(self, key: str) -> tuple[Store, str]:
        if not key.strip("/"):
            raise UsageError("an artifact has an empty key; check the parameters in its key")
        inside = self._store.from_artifact_key(key.strip("/"))
        return (self._store, inside) if inside is not None else (DirectoryStore(self._other_artifacts), key.strip("/"))


def _download(store: Store, key: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as stream:
        stream.writelines(store.chunks(key))
