"""Whatever lies in the memory of the pod, a restore gives what was committed, and reads what is intact from there.

Each of a thousand trials damages the copy of the newest commit: the shards whose bytes are still those of the commit
come from memory, and all others from the store.
"""

from collections import Counter

import pytest
from support.builders.near_memory import KINDS
from support.builders.seeds import SEED
from support.stories.damaged_near_copies import damaged_copies

TRIALS = 1_000


@pytest.fixture
def copies():
    with damaged_copies(SEED) as copies:
        yield copies


def test_no_damaged_copy_of_a_thousand_is_accepted_and_no_intact_shard_is_refused(copies):
    noticed = Counter()
    for number in range(TRIALS):
        trial = copies.run_trial(number)
        assert trial.is_right, (SEED, number, trial)
        assert trial.shards_read == trial.shards_damaged, (SEED, number, trial)
        noticed[trial.kind] += trial.shards_damaged > 0
    assert all(noticed[kind] >= 0.9 * TRIALS // len(KINDS) for kind in KINDS), noticed


def test_an_intact_copy_asks_the_store_for_no_shard(copies):
    """The negative twin: damage, and nothing else, sends the trials above to the store."""
    trial = copies.restore_intact()
    assert trial.is_right
    assert trial.shards_read == 0


def test_a_shard_that_both_saves_share_is_read_from_the_copy_of_either(copies):
    trial = copies.restore_next()
    assert trial.is_right
    assert 0 < trial.shards_read < copies.shards
