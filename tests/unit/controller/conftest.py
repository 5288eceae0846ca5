from pathlib import Path

import pytest
from support.submitter import FakeSubmitter

from tiphys.store import DirectoryStore, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def submitter(tmp_path: Path) -> FakeSubmitter:
    return FakeSubmitter(tmp_path / "cluster")
