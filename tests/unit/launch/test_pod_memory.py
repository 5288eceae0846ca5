"""Limit and use of memory, as the kernel shows them in version 1 and 2 of control groups."""

import pytest

from tiphys.launch.pod_memory import read_peak_bytes, read_pod_memory

MIB = 1 << 20
MACHINE = {"proc/meminfo": f"MemTotal: {4096 << 10} kB\nMemFree: 1 kB\nMemAvailable: {3072 << 10} kB\n"}
NO_LIMIT = str((1 << 63) - 4096)


def written(root, files):
    for name, content in (MACHINE | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def v2(folder, limit, usage=300 * MIB, cached=100 * MIB):
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{usage}\n",
        f"sys/fs/cgroup/{folder}memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def v1(folder, limit, usage=300 * MIB, cached=100 * MIB):
    return {
        f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory/{folder}memory.usage_in_bytes": f"{usage}\n",
        f"sys/fs/cgroup/memory/{folder}memory.stat": f"inactive_file 3\ntotal_inactive_file {cached}\n",
    }


IN_V2, IN_V1 = {"proc/self/cgroup": "0::/\n"}, {"proc/self/cgroup": "9:memory:/kubepods/pod1/c1\n1:cpu:/\n0::/\n"}
BELOW_V2 = {"proc/self/cgroup": "0::/pod/c1\n"}


@pytest.mark.parametrize(
    ("files", "limit", "free"),
    [
        (IN_V2 | v2("", 1024 * MIB), 1024, 824),
        (IN_V2 | v2("", "max"), 4096, 3072),
        (IN_V2 | v2("", 1024 * MIB, usage=1200 * MIB, cached=0), 1024, 0),
        (BELOW_V2 | v2("pod/", 512 * MIB) | v2("pod/c1/", "max", 5), 512, 312),
        (BELOW_V2 | v2("pod/", 512 * MIB, usage=MIB, cached=0) | v2("pod/c1/", 600 * MIB), 512, 400),
        (IN_V1 | v1("", 1024 * MIB), 1024, 824),
        (IN_V1 | v1("kubepods/pod1/c1/", 1024 * MIB) | v1("", NO_LIMIT), 1024, 824),
        (IN_V1 | v1("", NO_LIMIT), 4096, 3072),
        (IN_V2 | v2("", 16 * 1024 * MIB), 4096, 3072),
        ({}, 4096, 3072),
    ],
    ids=[
        "version 2", "no limit", "over it", "of the pod", "tighter outside", "version 1", "path of the host",
        "version 1 without a limit", "above the machine", "no control groups",
    ],
)  # fmt: skip
def test_the_tightest_limit_counts_and_cached_files_do_not(tmp_path, files, limit, free):
    found = read_pod_memory(written(tmp_path, files))
    assert (found.limit_bytes, found.free_bytes) == (limit * MIB, free * MIB)


def test_a_process_has_a_peak_below_its_limit(tmp_path):
    assert MIB < read_peak_bytes() < read_pod_memory().limit_bytes
    assert read_peak_bytes(tmp_path) == 0
