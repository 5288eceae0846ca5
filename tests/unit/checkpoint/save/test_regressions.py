"""What has gone wrong elsewhere, one test each, and what a training program can be given that it should not be.

| seen in | what happened |
|---|---|
| Flyte #2894, #7371 | an attempt that died before its first save hid all earlier checkpoints |
| flyte-sdk #1499 | a pod made again with the same arguments began where the first one had begun |
| PyTorch #144657 | an asynchronous save wrote what the arrays held later (`test_saving`) |
| KempnerForge #102, MaxText #5260 | killed between data and pointer, the older one gone (`test_checkpoint_crashes`) |
| NeMo #3390 | the pointer could not be written although the data was complete |
| Metaflow | deleting the newest left ``latest`` pointing at it |
| Megatron-LM #1435 | a save that failed ended the training |
| Lightning #20806 | SIGTERM to one rank of several hung the others (`test_gang`, `test_sigterm`) |
| Megatron-LM #5281 | a checkpoint that kills its reader was loaded again and again (`test_poison`) |
| SeaTunnel #12110 | the newest one is damaged on disk |
"""

import itertools

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, claim_of, end_of, ref, write_claim, write_end
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import Clock, open_session, state_at, train

from tiphys.checkpoint.settings import SaveInterval
from tiphys.checkpoint.state.serialization import flatten_state
from tiphys.checkpoint.state.shards import SHARD_BYTES, plan_shards
from tiphys.errors import ForbiddenError, StoreError, UsageError
from tiphys.lineage.select import choose_checkpoint, list_commits
from tiphys.lineage.validity import checkpoint_fault, read_manifest
from tiphys.store import LineageLayout, read_step_attempts

RUN, STEP = "digits-1", "fit"


def next_attempt(store, number):
    """End attempt ``number`` - 1, and open the next one where the choice says."""
    write_end(store, end_of(number - 1))
    choice = choose_checkpoint(store, LINEAGE, read_step_attempts(store, RUN, STEP))
    write_claim(store, claim_of(number, choice.checkpoint))
    return open_session(store, number, resume_from=choice.checkpoint, admit=False)


def test_attempts_that_die_before_their_first_save_hide_no_earlier_checkpoint(store):
    train(store, 3)
    for number in (2, 3):
        assert next_attempt(store, number).restore(default=state_at(0))["step"] == 3
    assert next_attempt(store, 4).restore(default=state_at(0))["step"] == 3


def test_a_pod_that_is_made_again_with_the_same_arguments_goes_on_where_the_first_one_was(store):
    train(store, 3)
    first = next_attempt(store, 2)
    assert first.restore(default=state_at(0))["step"] == 3
    first.save(5, state_at(5)).wait()
    again = open_session(store, 2, resume_from=ref(1, 3), admit=False)
    assert again.restore(default=state_at(0))["step"] == 5


@pytest.mark.parametrize(
    "error", [StoreError("507 no space"), ForbiddenError("403 expired token"), StoreError("time-out")]
)
def test_a_manifest_that_cannot_be_written_after_all_data_was_leaves_the_one_before(error):
    class Refusing(MemoryStore):
        def create(self, key, data, *, sha256=None):
            if "manifests/" in key and list_commits(self, LINEAGE):
                raise error
            super().create(key, data, sha256=sha256)

    store = Refusing()
    with open_session(store) as session:
        session.save(1, state_at(1))
        assert session.save(2, state_at(2)).wait() is None
        assert session.failed_saves == 1
    assert next_attempt(store, 2).restore(default=state_at(0))["step"] == 1


def test_credentials_that_expire_during_an_upload_cost_that_save_and_nothing_else():
    uploads = itertools.count()

    class Expiring(MemoryStore):
        def create(self, key, data, *, sha256=None):
            if "shards/" in key and next(uploads) == 3:  # each save has two
                raise ForbiddenError("the token has expired")
            super().create(key, data, sha256=sha256)

    store = Expiring()
    with open_session(store) as session:
        session.save(1, state_at(1))
        assert session.save(2, state_at(2)).wait() is None
        assert session.save(3, state_at(3)).wait() == ref(1, 3)
    assert [checkpoint_fault(store, one) for one in list_commits(store, LINEAGE)] == [None, None]


def test_the_checkpoint_before_a_deleted_one_is_the_newest(store):
    train(store, 3)
    store.delete(LineageLayout(LINEAGE).manifest(1, 3))
    assert next_attempt(store, 2).restore(default=state_at(0))["step"] == 2


def test_the_checkpoint_before_a_damaged_one_is_restored(store):
    train(store, 3)
    key = read_manifest(store, ref(1, 3)).shards[1].key
    store.objects[key] = store.objects[key][:-1] + b"\xff"
    assert next_attempt(store, 2).restore(default=state_at(0))["step"] == 2


def test_processes_that_both_believe_to_be_the_attempt_leave_one_whole_checkpoint_of_a_step(store):
    mine, other = open_session(store), open_session(store, admit=False)
    first = mine.save(5, {"weights": np.full(4, 1.0)}).wait()
    assert other.save(5, {"weights": np.full(4, 2.0)}).wait() is None
    assert (first, other.failed_saves) == (ref(1, 5), 1)
    assert next_attempt(store, 2).restore()["weights"].tolist() == [1.0] * 4


def test_attempts_that_both_believe_to_be_live_leave_only_the_checkpoints_of_the_newer(store):
    old = open_session(store)
    old.save(1, state_at(1)).wait()
    new = next_attempt(store, 2)
    new.restore(default=state_at(0))
    with pytest.raises(SystemExit) as exit_, old:
        old.save(9, state_at(9))
    assert exit_.value.code == 76
    assert new.save(2, state_at(2)).wait() == ref(2, 2)
    assert list_commits(store, LINEAGE) == [ref(2, 2), ref(1, 1)]


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_clock_that_jumps_neither_stops_the_saves_nor_the_training(store, jump):
    clock = Clock()
    with open_session(store, clock=clock, every=SaveInterval(60, "seconds")) as session:
        session.step(1, state_at(1))
        clock.advance(jump)
        session.step(2, state_at(2))
        clock.advance(abs(jump) + 61)
        assert session.step(3, state_at(3)).wait() == ref(1, 3)


@pytest.mark.parametrize("state", [{}, {"empty": np.zeros(0)}, None, 0, {"a": np.zeros((3, 0, 2), dtype="<U1")}])
def test_a_state_without_any_byte_is_a_state(store, state):
    open_session(store).save(1, state).wait()
    back = next_attempt(store, 2).restore()
    assert repr(back) == repr(state)


def test_no_shard_is_too_large_for_one_request_however_large_an_array_is():
    untouched = np.zeros(6 << 30, dtype=np.uint8)  # pages that nobody touches take no memory
    plans = plan_shards(flatten_state({"large": untouched}))
    assert sum(plan.size_bytes for plan in plans) > 6 << 30
    assert max(plan.size_bytes for plan in plans) < SHARD_BYTES + 4096


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": np.array([object()])}, r"state\.model: an array of dtype object"),
        ({"optimizer": {"f": print}}, r"state\.optimizer\.f: builtin_function_or_method cannot be saved"),
        ({frozenset({1}): 0}, r"key frozenset\(\{1\}\) cannot be saved"),
    ],
)
def test_a_state_that_cannot_be_kept_exactly_leaves_earlier_checkpoints_alone(store, state, said):
    session = open_session(store)
    session.save(1, state_at(1)).wait()
    with pytest.raises(UsageError, match=said):
        session.save(2, state)
    assert list_commits(store, LINEAGE) == [ref(1, 1)]
    assert session.save(3, state_at(3)).wait() == ref(1, 3)


def test_a_metric_without_a_name_is_refused(store):
    with open_session(store) as session, pytest.raises(UsageError, match="metrics must have names, but one is 1"):
        session.save(1, state_at(1), metrics={1: 0.5})


def test_metrics_that_are_no_number_are_kept_as_what_they_are(store):
    metrics = {"loss": float("nan"), "perplexity": float("inf"), "größe": -float("inf")}
    open_session(store).save(1, state_at(1), metrics=metrics).wait()
    assert repr(read_manifest(store, ref(1, 1)).metrics) == repr(dict(sorted(metrics.items())))
