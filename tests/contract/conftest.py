from pathlib import Path

import pytest
from support.memory import MemoryStore

from tiphys.store import DirectoryStore, S3Store, Store


@pytest.fixture(params=["directory", "s3", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    if request.param == "memory":
        return MemoryStore()
    return S3Store(request.getfixturevalue("bucket"), "team a/tiphys", page_size=3)
