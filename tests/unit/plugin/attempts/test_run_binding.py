"""The steps of a new workflow come together; its Workflow is read for all of them once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.stories.plugin import Flow, phase, prep, world

STEPS = 8


def counted(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Workflows that are read from now on."""
    reads: list[str] = []
    read = flow.world.cluster.workflow

    def workflow(namespace: str, name: str) -> Any:
        reads.append(name)
        return read(namespace, name)

    monkeypatch.setattr(flow.world.cluster, "workflow", workflow)
    return reads


def test_steps_that_come_together_read_the_workflow_as_often_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [prep(name=f"s{number}", template=f"t{number}") for number in range(STEPS)]
    together, alone = (world(tmp_path / name).submit(*specs) for name in ("together", "alone"))
    reads, reads_alone = counted(together, monkeypatch), counted(alone, monkeypatch)
    assert phase(alone.admit("s0")) == "Succeeded"
    begin = threading.Barrier(STEPS)

    def admit(number: int) -> str:
        begin.wait(60)
        return phase(together.admit(f"s{number}"))

    with ThreadPoolExecutor(STEPS) as pool:
        assert set(pool.map(admit, range(STEPS))) == {"Succeeded"}
    assert reads == reads_alone
