from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fakes.submitter import FakeSubmitter
from support.servers.kube_server import KubeServer, serving

from tiphys.kube import KubeApi


@pytest.fixture
def submitter(tmp_path: Path) -> FakeSubmitter:
    return FakeSubmitter(tmp_path / "cluster")


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as found:
        yield found


@pytest.fixture
def api(server: KubeServer) -> KubeApi:
    return server.api("ml")
