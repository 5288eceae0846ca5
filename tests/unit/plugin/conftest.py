import pytest
from support import kube_server


@pytest.fixture
def server():
    with kube_server.serving() as running:
        yield running
