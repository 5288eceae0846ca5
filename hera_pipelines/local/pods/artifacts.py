"""Artifacts of containers, between the bucket and an attempt's folder.

On a cluster Argo's default repository and Tiphys share one bucket. Here a key
below the store's prefix goes to the store, and any other to a folder that
stands for the rest of the bucket. Artifacts are kept without archive.
"""

from collections.abc import Iterator
from pathlib import Path

from hera_pipelines.local.nodes import Artifact
from tiphys.errors import NotFoundError, UsageError
from tiphys.store import DirectoryStore, Store


class Bucket:
    """Reads and writes artifacts by their key. Not for the event loop: its calls block."""

    def __init__(self, store: Store, rest: Path) -> None:
        self._store = store
        self._rest = rest

    def fetch(self, artifact: Artifact, target: Path) -> None:
        """Bring an artifact, a file or a folder, to ``target``.

        Raises:
            NotFoundError: there is nothing under its key.
            StoreError: storage is out of reach or refuses.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        if "raw" in artifact:
            target.write_text(artifact["raw"]["data"])
            return
        store, key = self._place(artifact["s3"]["key"])
        found = [entry.key for entry in store.list(key) if entry.key == key or entry.key.startswith(f"{key}/")]
        if not found:
            raise NotFoundError(f"artifact {artifact['name']} failed to load: key does not exist: {key}")
        for name in found:
            inside = name[len(key) :].lstrip("/")
            _download(store, name, target / inside if inside else target)

    def save(self, artifact: Artifact, source: Path) -> None:
        """Store a file or folder under the artifact's key, create-only.

        Raises:
            ObjectExistsError: the key is taken.
            StoreError: storage is out of reach or refuses.
        """
        store, key = self._place(artifact["s3"]["key"])
        for path, inside in _files(source):
            store.create_from_file(f"{key}/{inside}" if inside else key, path)

    def _place(self, key: str) -> tuple[Store, str]:
        if not key.strip("/"):
            raise UsageError("an artifact has an empty key; check the parameters that its key is made of")
        inside = self._store.from_artifact_key(key.strip("/"))
        return (self._store, inside) if inside is not None else (DirectoryStore(self._rest), key.strip("/"))


def _download(store: Store, key: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as stream:
        stream.writelines(store.chunks(key))


def _files(source: Path) -> Iterator[tuple[Path, str]]:
    if source.is_file():
        yield source, ""
        return
    for path in sorted(source.rglob("*")):
        if path.is_file():
            yield path, path.relative_to(source).as_posix()
