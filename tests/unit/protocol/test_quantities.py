"""Amounts of memory, read and written as Kubernetes does."""

import pytest

from tiphys.errors import UsageError
from tiphys.protocol.quantities import memory_bytes, memory_quantity


@pytest.mark.parametrize(
    ("text", "size"),
    [("8Gi", 8 << 30), ("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("2G", 2_000_000_000), ("1e9", 10**9), (4096, 4096)],
)
def test_amounts_are_read(text, size):
    assert memory_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["", "much", "8GB", "-1Gi", "0", "{{inputs.parameters.memory}}"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(UsageError, match=r"its limit: .* is not an amount of memory; write it like 8Gi"):
        memory_bytes(text, "its limit")


@pytest.mark.parametrize(("size", "text"), [(12 << 30, "12Gi"), ((12 << 30) + 1, "12289Mi"), (1, "1Mi")])
def test_amounts_are_written_and_never_rounded_down(size, text):
    assert memory_quantity(size) == text
    assert memory_bytes(memory_quantity(size), "x") >= size
