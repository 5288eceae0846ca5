from collections.abc import Iterator

import pytest
from support.servers import kube_server
from support.servers.kube_server import KubeServer

from tiphys.kube import KubeApi


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with kube_server.serving() as running:
        yield running


@pytest.fixture
def api(server: KubeServer) -> KubeApi:
    return server.api("ml")
