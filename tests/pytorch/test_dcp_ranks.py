"""torch.distributed.checkpoint in several processes: one commit or none, one choice for all.

| what happens | outcome |
|---|---|
| 4 ranks save, 2 and then 1 load | every bit, resharded |
| by dcp.save, dcp.async_save, dcp.load | the same |
| a shard of the newest is damaged | every rank takes the one before |
| the only one is damaged, in the part of one rank | no rank's state was touched |
| a rank is killed while it saves | nothing is committed, and the others learn of it |
| another attempt takes the place | nothing is committed, all exit with 76 |
| SIGTERM in one rank | all save the same step and exit with 75 |
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

from support.builders.lineage import LINEAGE, ref
from support.processes.torch_ranks import World, exits, ok

from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import checkpoint_fault, read_manifest

pytestmark = pytest.mark.timeout(1800)  # only a deadlock takes so long


def damage(world: World, step: int, rank: int, attempt: int = 1) -> None:
    """Turn one bit of the first shard that a rank wrote."""
    shard = next(
        s for s in read_manifest(world.store, ref(attempt, step)).shards if s.rank == rank and ".distcp" in s.key
    )
    path = Path(world.store.url.removeprefix("file://")) / shard.key
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


def expected(world: World, step: int, **options: Any) -> str:
    return ok(world(1, "expected", step=step, **options))[0]


def test_four_ranks_save_and_two_or_one_load_what_they_saved(world):
    ok(world(4, "train", total=2))

    manifest = read_manifest(world.store, ref(1, 2))
    assert manifest.framework == "torch.dcp"
    assert manifest.facts.world_size == 4
    assert {shard.rank for shard in manifest.shards} == {0, 1, 2, 3}
    assert checkpoint_fault(world.store, ref(1, 2)) is None
    wanted = {"done": 2, "restored": expected(world, 2), "last": "None"}
    assert ok(world(2, "train", total=2)) == [wanted] * 2
    assert ok(world(1, "train", total=2)) == [wanted]


@pytest.mark.parametrize("background", [False, True])
def test_the_functions_of_dcp_work_with_writer_and_reader(world, background):
    results = ok(world(2, "by_hand", step=7, background=background))

    assert results == [{"restored": expected(world, 7)}] * 2
    assert list_commits(world.store, LINEAGE) == [ref(1, 7)]


def test_damage_in_the_part_of_one_rank_sends_all_of_them_to_the_checkpoint_before(world):
    ok(world(2, "train", total=2))
    damage(world, step=2, rank=1)

    results = ok(world(2, "train", total=1))

    assert results == [{"done": 1, "restored": expected(world, 1), "last": "None"}] * 2
    assert list_quarantined(world.store, LINEAGE) == {ref(1, 2)}


def test_ranks_keep_their_state_untouched_where_every_checkpoint_is_damaged(world):
    ok(world(2, "train", total=1, replicated=False))
    damage(world, step=1, rank=1)  # which the first rank does not read

    results = ok(world(2, "train", total=0, replicated=False))

    assert results == [{"done": 0, "restored": expected(world, 0, replicated=False), "last": "None"}] * 2
    assert list_quarantined(world.store, LINEAGE) == {ref(1, 1)}


@pytest.mark.parametrize("point", ["checkpoint.before_shard", "checkpoint.after_shard"])
def test_a_rank_that_dies_while_it_saves_means_that_nothing_is_committed(world, point):
    killed = {"TIPHYS_FAILPOINTS": f"{point}=crash@2"}

    ranks = world(4, "train", total=2, of_rank={3: killed})

    assert exits(ranks) == [0, 0, 0, -9]
    assert [rank["result"]["last"] for rank in ranks[:3]] == ["1-1"] * 3
    assert "step 2 could not be saved" in ranks[0]["said"]
    assert f"{point}=crash" in world.faults
    assert list_commits(world.store, LINEAGE) == [ref(1, 1)]
    assert ok(world(2, "train", total=1))[0]["restored"] == expected(world, 1)


def test_ranks_of_an_attempt_that_was_replaced_commit_nothing_and_all_stop(world):
    ranks = world(2, "train", total=5, replaced=3)

    assert exits(ranks) == [76, 76]
    assert list_commits(world.store, LINEAGE) == [ref(1, 2), ref(1, 1)]


def test_sigterm_in_one_rank_saves_in_all_of_them(world):
    ranks = world(4, "train", total=5, stop=3, stopped_rank=2)

    assert exits(ranks) == [75, 75, 75, 75]
    assert list_commits(world.store, LINEAGE)[0] == ref(1, 3)
    assert read_manifest(world.store, ref(1, 3)).reason == "sigterm"
    assert [result["done"] for result in ok(world(2, "train", total=3))] == [3, 3]
