from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.kube_server import KubeServer, serving
from support.stories.plugin import Clock, World, world


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as running:
        yield running


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def here(tmp_path: Path) -> World:
    return world(tmp_path)
