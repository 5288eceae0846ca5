import pytest
from support.servers import kube_server


@pytest.fixture
def server():
    with kube_server.serving() as running:
        yield running
