import pytest
from support.fakes.memory_store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()
