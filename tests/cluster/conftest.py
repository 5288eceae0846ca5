from pathlib import Path

import pytest
from cluster.fixtures import (
    api,
    audit,
    cluster,
    cluster_store,
    fake_nodes,
    gpus,
    images,
    kinds,
    namespace,
    run_store,
    second_node,
    tenants,
)

__all__ = [
    "api",
    "audit",
    "cluster",
    "cluster_store",
    "fake_nodes",
    "gpus",
    "images",
    "kinds",
    "namespace",
    "run_store",
    "second_node",
    "tenants",
]

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here; the first test may have to wait until a Kubernetes is built."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(3600))
