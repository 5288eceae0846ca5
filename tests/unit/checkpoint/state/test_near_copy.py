"""The near copy: the bytes of the newest save, which a restart in the pod reads in the place of the store.

| what lies in the memory of the pod | a restart reads |
|---|---|
| the newest commit | all of it there, and no shard from the store |
| the commit, with damaged bytes | the damaged shards from the store, which is said once |
| a save that was not committed, or of another training | the newest commit, from the store |
| nothing, or no launcher holds it | the store, without a word |

| the pod | where a save is staged |
|---|---|
| has room for a start beside the copy | in the near memory |
| has no room, no memory, or another session there | in memory of the program, which is said once, with the remedy |
"""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from support.builders.lineage import LINEAGE
from support.builders.near_memory import held_memory, opened
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session, state_at

from tiphys.checkpoint.ranks.barrier import RankInfo
from tiphys.checkpoint.restore.loader import CheckpointLoader
from tiphys.checkpoint.state import near_copy
from tiphys.checkpoint.state.near_copy import REGION_BYTES, lay_out, required_bytes
from tiphys.checkpoint.telemetry import events
from tiphys.launch.pod_memory import PodMemory, read_peak_bytes
from tiphys.lineage.select import list_commits
from tiphys.records import Shard

PATIENCE_SECONDS = 120
GIB = 1 << 30
ROOMY, TIGHT = PodMemory(64 * GIB, 64 * GIB), PodMemory(64 * GIB, 0)


class ShardStore(MemoryStore):
    """Notes the shards that are read."""

    def __init__(self):
        super().__init__()
        self.read_shards = []

    def chunks(self, key, size_bytes=8 << 20):
        self.read_shards.append(key)
        return super().chunks(key, size_bytes)


@pytest.fixture
def store():
    return ShardStore()


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(near_copy, "read_pod_memory", lambda: ROOMY)
    events.log_once.cache_clear()
    with held_memory() as variables:
        yield variables


def running(store, memory, *steps):
    """The session of a program that has saved these steps."""
    session = open_session(store, asynchronous=True, near=opened(memory))
    session.restore(default=state_at(0))
    for step in steps:
        assert session.save(step, state_at(step)).wait(), step
    store.read_shards.clear()
    return session


def killed(session):
    """End the program, as SIGKILL does for what it holds: its lock."""
    session.flush()
    session._saver.close()


def save(store, memory, *steps):
    """A program that saves these steps, and is killed."""
    killed(running(store, memory, *steps))


def restart(store, memory, **options):
    """What the next start of the program restores."""
    session = open_session(store, asynchronous=True, near=opened(memory), **options)
    restored = session.restore(default=state_at(0))
    killed(session)
    return restored


def overwrite(memory, offset, content):
    descriptor = os.open(memory["TIPHYS_NEAR_MEMORY"], os.O_RDWR)
    os.pwrite(descriptor, content, offset)
    os.close(descriptor)


def pages(memory):
    """Memory that the file takes."""
    return Path(memory["TIPHYS_NEAR_MEMORY"]).stat().st_blocks * 512


def assert_state(found, step):
    assert found["step"] == step
    np.testing.assert_array_equal(found["weights"], state_at(step)["weights"])
    np.testing.assert_array_equal(found["momentum"], state_at(step)["momentum"])
    assert found["rng"] == state_at(step)["rng"]


def test_a_restart_reads_the_newest_commit_from_memory_and_no_shard_from_the_store(store, memory, capsys):
    save(store, memory, 1, 2)
    assert_state(restart(store, memory), 2)
    assert store.read_shards == []
    assert "checkpoint 2 of attempt 1 was read from its copy in the memory of this pod" in capsys.readouterr().err


def test_without_the_near_memory_the_same_restart_reads_the_store(store, memory):
    """The negative twin: the store is read where nothing is near."""
    save(store, memory, 1, 2)
    assert_state(open_session(store).restore(default=state_at(0)), 2)
    assert len(store.read_shards) == 2


def test_the_copy_survives_a_restore_and_the_memory_that_is_made_ready_for_the_next_save(store, memory):
    save(store, memory, 3)
    for _ in range(3):
        assert_state(restart(store, memory), 3)
    assert store.read_shards == []


def test_a_damaged_shard_is_read_from_the_store_and_said_once(store, memory, capsys):
    save(store, memory, 1)
    overwrite(memory, 100, b"\x55")
    assert_state(restart(store, memory), 1)
    assert len(store.read_shards) == 1
    assert capsys.readouterr().err.count("1 of 2 shards of checkpoint 1 of attempt 1 were read from the store") == 1


def test_a_save_without_a_commit_is_never_restored(store, memory, capsys):
    session = running(store, memory, 1)
    store.refuses = lambda operation, key: operation == "create" and "manifest" in key
    session._saver._pauses = ()
    assert session.save(2, state_at(2)).wait() is None
    store.refuses = lambda *_: False
    killed(session)
    assert_state(restart(store, memory), 1)
    assert len(store.read_shards) == 2
    assert "2 of 2 shards" in capsys.readouterr().err


def test_a_copy_of_another_training_is_never_restored(store, memory):
    save(store, memory, 5)
    other = ShardStore()
    save(other, memory, 7)
    assert_state(restart(store, memory), 5)
    assert len(store.read_shards) == 2


def test_an_older_commit_than_the_newest_is_not_restored(store, memory):
    save(store, memory, 1)
    session = open_session(store, asynchronous=True)
    session.restore(default=state_at(0))
    assert session.save(2, state_at(2)).wait()
    assert_state(restart(store, memory), 2)


def test_memory_that_was_never_written_to_is_no_copy(store, memory, capsys):
    session = open_session(store, asynchronous=True)
    assert session.save(1, state_at(1)).wait()
    assert_state(restart(store, memory), 1)
    assert "shards" not in capsys.readouterr().err


def test_states_that_grow_and_shrink_are_near_all_the_same(store, memory):
    session = running(store, memory)
    for step, size in ((1, 10), (2, 3_000_000), (3, 5)):
        assert session.save(step, {"numbers": np.arange(size)}).wait()
    killed(session)
    store.read_shards.clear()
    np.testing.assert_array_equal(restart(store, memory)["numbers"], np.arange(5))
    assert store.read_shards == []


def test_changes_after_save_returned_are_not_in_the_near_copy(store, memory):
    state = state_at(4)
    session = running(store, memory)
    saving = session.save(4, state)
    state["weights"][:] = np.nan
    assert saving.wait()
    killed(session)
    assert_state(restart(store, memory), 4)


def test_a_training_that_is_complete_gives_the_memory_back(store, memory):
    with running(store, memory, 1) as session:
        session.save(2, state_at(2))
    assert pages(memory) == 0


def test_a_training_that_crashes_leaves_its_copy(store, memory):
    with pytest.raises(ZeroDivisionError), running(store, memory, 1):
        raise ZeroDivisionError
    assert_state(restart(store, memory), 1)
    assert store.read_shards == []


def test_a_session_after_another_of_its_process_gets_the_memory(store, memory, capsys):
    with pytest.raises(ZeroDivisionError), running(store, memory, 1):
        raise ZeroDivisionError
    save(store, memory, 2)
    assert_state(restart(store, memory), 2)
    assert store.read_shards == []
    assert "another program" not in capsys.readouterr().err


def test_of_two_sessions_at_once_the_second_keeps_no_copy_and_both_commit_what_they_saved(memory, capsys):
    first, second = ShardStore(), ShardStore()
    one, other = running(first, memory, 1), running(second, memory, 2)
    assert "another program of this pod has a copy there" in capsys.readouterr().err
    assert one.save(3, state_at(3)).wait()
    assert other.save(4, state_at(4)).wait()
    assert_state(open_session(first).restore(default=state_at(0)), 3)
    assert_state(open_session(second).restore(default=state_at(0)), 4)


def test_a_pod_without_room_is_told_what_it_needs_and_saves_as_before(store, memory, monkeypatch, capsys):
    monkeypatch.setattr(near_copy, "read_pod_memory", lambda: PodMemory(1 << 20, 1 << 20))
    save(store, memory, 1, 2)
    said = capsys.readouterr().err
    assert said.count("a restart in this pod will read its checkpoint from the store") == 1
    assert "memory of 1 MiB has no room; give the step" in said
    assert "near_copy=False" in said
    assert pages(memory) == 0
    assert_state(restart(store, memory), 2)
    assert len(store.read_shards) == 2


def test_a_pod_without_room_for_another_start_gives_the_copy_of_an_earlier_one_back(store, memory, monkeypatch):
    save(store, memory, 1)
    assert pages(memory) > 0
    monkeypatch.setattr(near_copy, "read_pod_memory", lambda: PodMemory(1 << 20, 1 << 20))
    session = running(store, memory, 2)
    assert pages(memory) == 0
    killed(session)
    assert_state(restart(store, memory), 2)


def test_a_state_that_grows_beyond_the_room_is_saved_as_before(store, memory, monkeypatch):
    session = running(store, memory, 1)
    room = PodMemory(read_peak_bytes() + (20 << 20), 64 * GIB)
    monkeypatch.setattr(near_copy, "read_pod_memory", lambda: room)
    state = {"same": np.arange(500_000), "numbers": np.arange(100_000)}
    assert session.save(2, state).wait()
    assert pages(memory) > 0
    assert session.save(3, state | {"numbers": np.arange(5_000_000)}).wait()
    assert pages(memory) == 0
    restored = open_session(store).restore(default=state_at(0))
    np.testing.assert_array_equal(restored["numbers"], np.arange(5_000_000))
    np.testing.assert_array_equal(restored["same"], np.arange(500_000))


def test_memory_that_the_kernel_refuses_is_no_end_of_the_training(store, memory, monkeypatch, capsys):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    save(store, memory, 1)
    assert "No space left on device" in capsys.readouterr().err
    assert_state(open_session(store).restore(default=state_at(0)), 1)


def test_the_copy_is_given_back_while_it_is_read_where_memory_is_short(store, memory, monkeypatch):
    session, state = running(store, memory), {"numbers": np.arange(5_000_000)}
    assert session.save(1, state).wait()
    killed(session)
    store.read_shards.clear()
    taken = pages(memory)
    assert taken > state["numbers"].nbytes
    monkeypatch.setattr(near_copy, "read_pod_memory", lambda: TIGHT)
    loader = CheckpointLoader(store, near=opened(memory))
    (newest,) = list_commits(store, LINEAGE)
    np.testing.assert_array_equal(loader.load(loader.read_manifest(newest))["numbers"], state["numbers"])
    assert store.read_shards == []
    assert pages(memory) < taken - state["numbers"].nbytes


def test_pages_of_a_save_that_is_under_way_are_never_given_back(store, memory, monkeypatch):
    session, held, gate = running(store, memory, 1), threading.Event(), threading.Event()

    def hold(operation, key):
        if operation == "create" and "shards/" in key:
            held.set()
            assert gate.wait(PATIENCE_SECONDS)
        return False

    store.refuses = hold
    save = session.save(2, state_at(2))
    assert held.wait(PATIENCE_SECONDS)  # the first shard is on its way, the other is still in the memory
    monkeypatch.setattr(near_copy, "read_pod_memory", lambda: TIGHT)
    assert_state(session.restore(default=state_at(0)), 1)
    gate.set()
    assert save.wait(PATIENCE_SECONDS)
    assert_state(open_session(store).restore(default=state_at(0)), 2)


def test_ranks_with_one_state_read_the_copy_of_the_rank_that_saves(store, memory, monkeypatch):
    save(store, memory, 1)
    monkeypatch.setattr(near_copy, "read_pod_memory", lambda: TIGHT)
    for rank in (0, 1, 1):
        loader = CheckpointLoader(store, near=opened(memory, rank, 2))
        (newest,) = list_commits(store, LINEAGE)
        assert_state(loader.load(loader.read_manifest(newest), state_at(0), RankInfo(rank, 2)), 1)
    assert store.read_shards == []


def test_ranks_with_states_of_their_own_have_regions_of_their_own(memory):
    ranks = [opened(memory, number, 2, sharded=True) for number in range(2)]
    for number, near in enumerate(ranks):
        for buffer in near.allocate([10, 5000]):
            buffer[:] = bytes([number]) * len(buffer)
    shards = [
        [Shard(key=f"{rank}/{n}", size=size, sha256="0" * 64, rank=rank) for n, size in enumerate((10, 5000))]
        for rank in range(2)
    ]
    for number in range(2):
        found = opened(memory, number, 2, sharded=True).find(shards[number], number)
        content = memoryview(bytearray(5000))
        assert found.read_into(shards[number][1], content)
        assert bytes(content) == bytes([number]) * 5000


def test_shards_lie_on_pages_of_their_own_and_the_document_last():
    assert lay_out([100, 4096, 5000, 1]) == ([16384, 0, 4096, 12288], 20480)
    assert lay_out([7]) == ([0], 4096)


@pytest.mark.parametrize(
    ("ranks", "shared", "expected"), [(1, False, 3), (8, False, 24), (8, True, 25)], ids=["alone", "sharded", "shared"]
)
def test_room_is_needed_for_each_start_and_for_a_copy_that_ranks_share(ranks, shared, expected):
    sizes = [GIB // 2, GIB // 4, GIB // 4]
    assert required_bytes(2 * GIB, sizes, ranks, shared=shared) == (expected + 2 * ranks) * GIB


def test_a_manifest_of_absurd_size_has_no_near_copy(memory):
    save(ShardStore(), memory, 1)
    huge = Shard(key="a", size=2 * REGION_BYTES, sha256="0" * 64)
    assert opened(memory).find([huge], 0) is None
