from pathlib import Path

import pytest
from cluster.fixtures import *  # noqa: F403  all that it offers are fixtures

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here; the first test may have to wait until a Kubernetes is built."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(3600))
