"""torch.distributed.checkpoint in one process: what is saved, verified, refused and tidied up.

| situation | outcome |
|---|---|
| the state changes right after a save has begun | the old bytes are committed |
| small and large tensors | shards of bounded size, an item is never cut |
| shards beyond what may stay in memory | read, and verified, twice |
| any shard or DCP's metadata damaged, missing, exchanged | quarantined, and the one before taken |
| storage refuses a save | told, counted, training goes on |
| a save is repeated by the same attempt | meets its own shards |
| a save is under way when the next is due | skipped and counted |
| another framework's checkpoint | refused, both ways |
| retention, facts, journal | as for every other session |
| outside of a compiled step | nothing happens |
"""

import threading
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

import torch
import torch.distributed.checkpoint as dcp
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, ref, write_claim
from support.fakes.memory_store import MemoryStore
from support.processes.polling import until
from support.stories.sessions import Clock, admitted, open_session
from support.stories.sessions import state_at as numpy_state

from tiphys.checkpoint.adapters import dcp as checkpoints
from tiphys.checkpoint.adapters import dcp_storage
from tiphys.checkpoint.adapters.dcp_session import TrackedDistributedSession
from tiphys.checkpoint.adapters.dcp_storage import DcpReader
from tiphys.checkpoint.adapters.ranks import RankAgreement
from tiphys.checkpoint.settings import CheckpointSettings, SaveInterval
from tiphys.errors import UsageError
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.select import list_commits
from tiphys.lineage.training_progress import read_training_progress
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.store import LineageLayout, read_events
from tiphys.store.incarnations import find_crash_record

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def open_ranks(
    store: MemoryStore, attempt: int = 1, start: int = 0, every: str = "1", **fields: Any
) -> TrackedDistributedSession:
    restored = ref(attempt - 1, start) if start else None
    environ = {"TIPHYS_RESTARTED_AFTER": "infrastructure 137 1.0"} if "incarnation" in fields else {}
    admitted(store, attempt, restored)
    settings = CheckpointSettings(
        run=RUN,
        step=STEP,
        attempt=attempt,
        lineage=LINEAGE,
        store=store.url,
        checkpoint_store=store.url,
        resume_from=restored,
        save_every=SaveInterval(float(every), "steps"),
        **fields,
    )
    return TrackedDistributedSession(
        settings, run_store=store, store=store, ranks=RankAgreement(), environ=environ, clock=Clock()
    )


def state_at(step: int) -> dict[str, Any]:
    return {
        "weights": torch.arange(1000.0) * step,
        "half": torch.full((7, 3), step / 3, dtype=torch.bfloat16),
        "optimizer": {"step": step, "moments": [torch.ones(3) * step]},
    }


def plain(state: dict[str, Any]) -> Any:
    return repr([state["weights"].tolist(), state["half"].tolist(), state["optimizer"]])


def train(store: MemoryStore, total: int, **options: Any) -> None:
    with open_ranks(store, **options) as session:
        for step in range(1, total + 1):
            session.step(step, state_at(step))
            session.flush()


def restored(store: MemoryStore, start: int) -> tuple[int, dict[str, Any]]:
    state = state_at(0)
    with open_ranks(store, 2, start) as session:
        return session.restore(state), state


def shards(store: MemoryStore, step: int) -> list[str]:
    return [key for key in sorted(store.objects) if f"shards/000000001-{step:015d}/" in key]


def test_a_saved_state_is_restored_in_place():
    store = MemoryStore()
    train(store, 2)

    done, state = restored(store, 2)

    assert done == 2
    assert plain(state) == plain(state_at(2))
    assert [event.name for event in read_events(store, RUN)] == ["checkpoint.restored"]


def test_the_cache_of_the_node_gets_what_is_committed_and_spares_the_restore_the_store(tmp_path):
    store = MemoryStore()
    train(store, 2, cache=tmp_path)
    store.refuses = lambda operation, key: operation == "read" and "shards/" in key
    state = state_at(0)
    with open_ranks(store, 2, 2, cache=tmp_path) as session:
        assert session.restore(state) == 2
    assert plain(state) == plain(state_at(2))


def test_a_state_that_changes_after_the_save_has_begun_is_committed_as_it_was(monkeypatch):
    store = MemoryStore()
    gate = threading.Event()
    resolve = dcp.DefaultSavePlanner.resolve_data
    monkeypatch.setattr(dcp.DefaultSavePlanner, "resolve_data", lambda *item: gate.wait(60) and resolve(*item))
    state = state_at(1)

    with open_ranks(store) as session:
        save = session.step(1, state)
        state["weights"].fill_(-1)
        state["optimizer"]["moments"][0].fill_(-1)
        gate.set()
        assert save is not None
        assert save.wait() == ref(1, 1)

    assert plain(restored(store, 1)[1]) == plain(state_at(1))


def test_shards_are_of_bounded_size_and_an_item_is_never_cut(monkeypatch):
    monkeypatch.setattr(dcp_storage, "SHARD_BYTES", 2000)
    store = MemoryStore()
    admitted(store, 1)
    with open_ranks(store) as session:
        writer = session.writer(1)
        dcp.save({f"t{n}": torch.ones(100 if n else 5000) for n in range(10)}, storage_writer=writer)

    sizes = [shard.size for shard in read_manifest(store, ref(1, 1)).shards if shard.key.endswith(".distcp")]
    assert len(sizes) == 1 + 2
    assert sum(size > 20_000 for size in sizes) == 1


def test_a_shard_too_large_for_memory_is_verified_twice():
    store = MemoryStore()
    train(store, 1)
    read: list[str] = []
    store.refuses = lambda operation, key: bool(operation == "read" and ".distcp" in key and read.append(key))
    state = state_at(0)

    dcp.load(state, storage_reader=DcpReader(store, read_manifest(store, ref(1, 1)), held_bytes=0))

    assert plain(state) == plain(state_at(1))
    assert len(read) == 2 * len(set(read))


@pytest.mark.parametrize("which", [".distcp", ".metadata"])
@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "missing", "exchanged"])
def test_damage_of_any_kind_falls_back_to_the_checkpoint_before(which, how):
    store = MemoryStore()
    train(store, 2)
    key = next(key for key in shards(store, 2) if key.endswith(which))
    other = next(key for key in shards(store, 1) if key.endswith(which))
    good = store.objects[key]
    changed = {
        "flip": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "truncate": good[:-1],
        "empty": b"",
        "missing": b"",
        "exchanged": store.objects[other],
    }
    store.objects[key] = changed[how]
    if how == "missing":
        del store.objects[key]

    done, state = restored(store, 2)

    assert done == 1
    assert plain(state) == plain(state_at(1))
    assert list_quarantined(store, LINEAGE) == {ref(1, 2)}
    assert [event.name for event in read_events(store, RUN)] == ["checkpoint.skipped", "checkpoint.restored"]


def test_a_manifest_without_a_shard_that_the_metadata_names_is_quarantined():
    store = MemoryStore()
    train(store, 2)
    manifest = read_manifest(store, ref(1, 2))
    kept = tuple(shard for shard in manifest.shards if shard.key.endswith(".metadata"))
    key = LineageLayout(LINEAGE).manifest(1, 2)
    store.objects[key] = manifest.model_copy(update={"shards": kept}).with_seal().to_bytes()
    done, state = restored(store, 2)
    assert (done, plain(state)) == (1, plain(state_at(1)))
    assert list_quarantined(store, LINEAGE) == {ref(1, 2)}


def test_a_damaged_manifest_falls_back_too():
    store = MemoryStore()
    train(store, 2)
    key = next(key for key in sorted(store.objects) if "/manifests/" in key)
    store.objects[key] = store.objects[key].replace(b'"global_step": 2', b'"global_step": 3')

    assert restored(store, 2)[0] == 1


def test_a_reader_of_ones_own_condemns_what_is_damaged_and_the_next_one_is_of_the_checkpoint_before():
    store = MemoryStore()
    train(store, 2)
    store.objects[next(key for key in shards(store, 2) if key.endswith(".distcp"))] = b"damaged"
    state = state_at(0)

    with open_ranks(store, 2, 2) as session:
        with pytest.raises(dcp.api.CheckpointException):
            dcp.load(state, storage_reader=session.reader())
        dcp.load(state, storage_reader=session.reader())

    assert plain(state) == plain(state_at(1))


def test_a_save_that_storage_refuses_is_counted_and_the_next_one_works():
    store = MemoryStore()
    with open_ranks(store) as session:
        store.refuses = lambda operation, key: operation == "create" and "shards/" in key
        session.step(1, state_at(1))
        assert session.flush() is None
        store.refuses = lambda operation, key: False
        session.step(2, state_at(2))
        assert session.flush() == ref(1, 2)
        assert session.failed_saves == 1

    assert list_commits(store, LINEAGE) == [ref(1, 2)]


def test_a_manifest_that_cannot_be_written_means_no_checkpoint():
    store = MemoryStore()
    with open_ranks(store) as session:
        store.refuses = lambda operation, key: operation == "create" and "manifests/" in key
        session.step(1, state_at(1))
        assert session.flush() is None
        store.refuses = lambda operation, key: False

    assert list_commits(store, LINEAGE) == []


def test_a_save_that_is_repeated_by_the_attempt_meets_its_own_shards():
    store = MemoryStore()
    train(store, 1)
    before = dict(store.objects)

    train(store, 1)

    assert store.objects == before


def test_a_save_that_is_due_while_one_is_under_way_is_skipped_and_counted():
    store = MemoryStore()
    gate = threading.Event()
    store.refuses = lambda operation, key: operation == "create" and "shards/" in key and not gate.wait(60)
    with open_ranks(store, when_busy="skip") as session:
        session.step(1, state_at(1))
        assert session.step(2, state_at(2)) is None
        assert session.skipped_saves == 1
        gate.set()
        session.flush()
        session.step(3, state_at(3))

    assert list_commits(store, LINEAGE) == [ref(1, 3), ref(1, 1)]


@pytest.mark.parametrize("settings", [{}, {"when_busy": "wait"}, {"asynchronous": False}], ids=str)
def test_a_training_that_would_rather_wait_saves_every_time(settings):
    store = MemoryStore()
    with open_ranks(store, **settings) as session:
        for step in range(1, 6):
            session.step(step, state_at(step))

    assert list_commits(store, LINEAGE) == [ref(1, step) for step in (5, 4, 3, 2, 1)]


def test_saves_are_as_frequent_as_they_are_due():
    store = MemoryStore()

    train(store, 6, every="3")

    assert list_commits(store, LINEAGE) == [ref(1, 6), ref(1, 3)]


def test_an_attempt_that_was_replaced_commits_nothing_and_exits_with_76():
    store = MemoryStore()
    with pytest.raises(SystemExit) as end, open_ranks(store) as session:
        write_claim(store, claim_of(2))
        session.step(1, state_at(1))
        session.flush()

    assert end.value.code == 76
    assert list_commits(store, LINEAGE) == []


def test_crash_after_a_restart_in_the_pod_is_the_last_of_its_attempt():
    """Without a record of the second process, the crash of the first would stay the one that counts."""
    store = MemoryStore()
    for process, error in ((1, "first"), (2, "second")):
        with pytest.raises(ValueError, match=error), open_ranks(store, incarnation=process):
            raise ValueError(error)

    crash = find_crash_record(store, RUN, STEP, 1)
    assert crash is not None
    assert (crash.error, crash.incarnation) == ("ValueError: second", 2)
    assert [event.name for event in read_events(store, RUN)] == ["program.restarted"]


def test_the_manifest_says_what_it_was_made_with():
    store = MemoryStore()
    with open_ranks(store) as session:
        session.save(4, state_at(4), {"loss": 0.5}, epoch=2, data_position={"sample": 10})

    manifest = read_manifest(store, ref(1, 4))
    assert (manifest.framework, manifest.reason, manifest.metrics) == ("torch.dcp", "asked", {"loss": 0.5})
    assert (manifest.facts.epoch, manifest.facts.world_size) == (2, 1)
    assert manifest.facts.data_position == {"sample": 10}
    assert manifest.facts.versions["torch"] == torch.__version__.partition("+")[0]


def test_retention_keeps_the_newest():
    store = MemoryStore()

    train(store, 4, keep=RetentionPolicy(last=2, delay_seconds=0))

    assert ref(1, 4) in list_commits(store, LINEAGE)
    assert ref(1, 1) not in list_commits(store, LINEAGE)


def test_the_checkpoint_of_another_framework_is_refused_both_ways():
    store = MemoryStore()
    with open_session(store) as session:
        session.save(1, numpy_state(1))
        session.flush()
    with open_ranks(store, 2, 1) as ranks, pytest.raises(UsageError, match="written by the framework 'numpy'"):
        ranks.restore(state_at(0))

    other = MemoryStore()
    train(other, 1)
    with open_session(other, 2, resume_from=ref(1, 1)) as session, pytest.raises(UsageError, match=r"torch\.dcp"):
        session.restore()


def test_saving_without_the_other_ranks_is_refused():
    store = MemoryStore()
    with open_ranks(store) as session, pytest.raises(UsageError, match="use_collectives"):
        dcp.save(state_at(1), storage_writer=session.writer(1), use_collectives=False)


def test_report_shows_progress_without_a_save():
    store = MemoryStore()
    with open_ranks(store, every="1000") as session:
        session.total_steps = 4
        session.report(4, {"loss": 0.5})
    until(lambda: read_training_progress(store, LINEAGE, 1))
    report = read_training_progress(store, LINEAGE, 1)
    assert report is not None
    assert (report.global_step, report.total_steps, report.metrics) == (4, 4, {"loss": 0.5})
    assert list_commits(store, LINEAGE) == []


def test_outside_of_a_compiled_step_nothing_happens():
    state = state_at(3)
    with checkpoints.session(environ={}) as session:
        assert session.restore(state) == 0
        assert session.step(1, state) is None
        assert session.save(1, state) is None
        assert session.reader() is None
        session.report(1, {"loss": 0.5})
        with pytest.raises(UsageError, match="outside of a compiled step"):
            session.writer(1)
    assert plain(state) == plain(state_at(3))
