"""What is said about the facts of a checkpoint: where it stands, and what changed, once."""

import pytest

from hera_pipelines.draw.lineage_graph import describe_facts
from tiphys.records import DataVersion, Provenance

SAME = Provenance(
    world_size=4, git_commit="c0ffee00", image="i:1", dataset="d", parameters="p", versions={"numpy": "2.1.0"}
)


def test_unknown_and_unchanged_facts_are_not_described():
    assert describe_facts(Provenance(), None) == ()
    assert describe_facts(SAME.model_copy(update={"world_size": 1}), SAME.model_copy(update={"world_size": 1})) == ()
    assert describe_facts(Provenance(), Provenance(git_commit="a", image="i", dataset="d", parameters="p")) == ()


def test_epoch_and_ranks_are_always_described():
    assert describe_facts(SAME.model_copy(update={"epoch": 0}), SAME) == ("epoch 0", "4 ranks")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"git_commit": "badcafe123"}, "code c0ffee0 → badcafe"),
        ({"image": "i:2"}, "image i:1 → i:2"),
        ({"dataset": "e"}, "other data"),
        ({"parameters": "q"}, "other parameters"),
        ({"versions": {"numpy": "2.2.0", "torch": "2.6"}}, "numpy 2.1.0 → 2.2.0"),
    ],
)
def test_a_change_since_the_parent_is_described(change, words):
    assert describe_facts(SAME.model_copy(update=change), SAME) == ("4 ranks", words)


def test_data_that_no_step_made_is_named_with_its_versions_and_other_data_is_not_said_twice():
    def facts(digest: str, dataset: str) -> Provenance:
        data = DataVersion(name="data/train", algorithm="md5", digest=digest * 32)
        return SAME.model_copy(update={"data": (data,), "dataset": dataset})

    old = facts("a", "d")
    assert describe_facts(facts("b", "e"), old) == ("4 ranks", f"data data/train md5 {'a' * 12} → md5 {'b' * 12}")
    assert describe_facts(facts("a", "e"), old) == ("4 ranks", "other data")
    assert describe_facts(facts("a", "d"), old) == ("4 ranks",)
    assert describe_facts(facts("b", "e"), SAME) == ("4 ranks", "other data")


def test_a_changed_number_of_ranks_is_described():
    assert describe_facts(SAME, SAME.model_copy(update={"world_size": 1})) == ("4 ranks", "before: 1 rank")
