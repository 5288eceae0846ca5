from pathlib import Path

import pytest
from support.fakes.submitter import FakeSubmitter


@pytest.fixture
def submitter(tmp_path: Path) -> FakeSubmitter:
    return FakeSubmitter(tmp_path / "cluster")
