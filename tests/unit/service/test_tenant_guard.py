"""A loop over tenants goes on behind an error.

| error | log | counted |
|---|---|---|
| of Tiphys | failed | yes |
| bug | crashed, with its traceback | yes |
| another process has the work | left | no |
| interrupt | none; it ends the loop | no |
"""

import pytest
from structlog.testing import capture_logs

from tiphys.errors import ConflictError, FencedError, StoreError
from tiphys.service.tenant_guard import TenantGuard


@pytest.mark.parametrize(
    ("error", "left", "event", "count"),
    [
        (StoreError("no answer"), FencedError, "sweep.failed", 1),
        (ConflictError("taken"), FencedError, "sweep.failed", 1),
        (ConflictError("taken"), ConflictError, "sweep.left", 0),
        (FencedError("another leads"), FencedError, "sweep.left", 0),
        (ValueError("bug"), FencedError, "sweep.crashed", 1),
    ],
)
def test_an_error_is_logged_and_counted_once_and_the_next_tenant_is_visited(
    error: Exception, left: type[ConflictError], event: str, count: int
) -> None:
    failures: list[int] = []
    visited = []
    guard = TenantGuard("sweep", lambda: failures.append(1), left)
    with capture_logs() as log:
        for tenant in ("far", "near"):
            with guard.visit(namespace=tenant) as visit:
                visited.append(tenant)
                if tenant == "far":
                    raise error
            assert visit.failure is (error if tenant == "far" else None)
    assert visited == ["far", "near"]
    assert [(entry["event"], entry["namespace"]) for entry in log] == [(event, "far")]
    assert len(failures) == count


def test_an_interrupt_ends_the_loop() -> None:
    guard = TenantGuard("sweep", lambda: None)
    with pytest.raises(KeyboardInterrupt), guard.visit(namespace="far"):
        raise KeyboardInterrupt
