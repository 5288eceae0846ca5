"""The replay of a trace on its nodes: it says what is absent, fills what it can, and counts what it could not."""

from pathlib import Path

import pytest
from bench.quota.placement import FOLDER, NODES, TASKS, absent, allocation, fill, read_nodes, read_tasks
from tiphys_plugin.quota.placement.model import GpuNode, PodRequest

NODE_LIST = """sn,cpu_milli,memory_mib,gpu,model
n0,32000,262144,0,
n1,96000,262144,8,G2
n2,8000,262144,2,T4
"""
TASK_LIST = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos
p0,1000,1024,1,460,,LS
p1,4000,1024,2,1000,,LS
p2,500,1024,0,0,,BE
"""


def folder(tmp_path: Path) -> Path:
    (tmp_path / NODES).write_text(NODE_LIST)
    (tmp_path / TASKS).write_text(TASK_LIST)
    return tmp_path


def test_an_absent_trace_is_named(tmp_path: Path) -> None:
    assert "set TIPHYS_TRACES to the folder" in str(absent({}))
    assert f"{NODES} and {TASKS} not found in {tmp_path}" in str(absent({FOLDER: str(tmp_path)}))
    assert absent({FOLDER: str(folder(tmp_path))}) is None


def test_the_trace_is_read_as_it_is(tmp_path: Path) -> None:
    files = folder(tmp_path)
    assert [(node.name, node.gpus, node.cpu_milli) for node in read_nodes(files / NODES)] == [
        ("n1", 8, 96000),
        ("n2", 2, 8000),
    ]
    assert read_tasks(files / TASKS) == [
        PodRequest(1, gpu_milli=460, cpu_milli=1000, host_memory_mb=1024),
        PodRequest(2, cpu_milli=4000, host_memory_mb=1024),
        PodRequest(0, cpu_milli=500, host_memory_mb=1024),
    ]


def test_a_list_without_the_column_of_types_asks_for_no_type(tmp_path: Path) -> None:
    path = tmp_path / TASKS
    path.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli,qos\np0,4000,1024,2,1000,LS\n")
    assert read_tasks(path) == [PodRequest(2, cpu_milli=4000, host_memory_mb=1024)]
    path.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\np0,4000,1024,2,1000,T4,LS\n")
    assert read_tasks(path) == [PodRequest(2, gpu_type="T4", cpu_milli=4000, host_memory_mb=1024)]


@pytest.mark.parametrize("policy", ["best-fit", "fragmentation"])
def test_tasks_arrive_until_they_ask_for_every_gpu(policy: str) -> None:
    nodes = [GpuNode(name="a", gpu_type="T4", gpus=4), GpuNode(name="b", gpu_type="T4", gpus=4)]
    whole = fill(nodes, [PodRequest(1)], policy, seed=1)
    assert (whole.allocated, whole.tasks, whole.unplaced) == (100.0, 8, 0)
    thirds = fill(nodes, [PodRequest(3)], policy, seed=1)
    assert (thirds.allocated, thirds.tasks, thirds.unplaced) == (75.0, 3, 1)


def test_allocation_is_the_mean_of_its_seeds(tmp_path: Path) -> None:
    found = allocation(folder(tmp_path), [1, 2])
    assert (found["nodes"], found["gpus"], found["seeds"]) == (2, 10, [1, 2])
    one = found["fragmentation"]
    assert one["allocated_percent"] == pytest.approx(sum(one["by_seed"]) / 2, abs=0.01)
    assert found["best-fit"]["published_percent"] == 92.9
