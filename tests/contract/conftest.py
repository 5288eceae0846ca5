from pathlib import Path

import pytest
from support.fakes.memory_store import MemoryStore
from support.servers.emulators import ACCOUNT

from tiphys.store import AzureStore, DirectoryStore, GcsStore, S3Store, Store


@pytest.fixture(params=["directory", "s3", "gcs", "azure", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    if request.param == "memory":
        return MemoryStore()
    if request.param == "gcs":
        return GcsStore(request.getfixturevalue("gcs_bucket"), "team a/tiphys", page_size=3)
    if request.param == "azure":
        return AzureStore(ACCOUNT, request.getfixturevalue("azure_container"), "team a/tiphys", page_size=3)
    return S3Store(request.getfixturevalue("bucket"), "team a/tiphys", page_size=3)
