"""What is said about the facts of a checkpoint: where it stands, and what changed, once."""

import pytest

from hera_pipelines.draw.lineage_graph import describe_facts
from tiphys.records import Provenance

SAME = Provenance(
    world_size=4, git_commit="c0ffee00", image="i:1", dataset="d", parameters="p", versions={"numpy": "2.1.0"}
)


def test_nothing_is_said_of_what_is_not_known_or_has_not_changed():
    assert describe_facts(Provenance(), None) == ()
    assert describe_facts(SAME.model_copy(update={"world_size": 1}), SAME.model_copy(update={"world_size": 1})) == ()
    assert describe_facts(Provenance(), Provenance(git_commit="a", image="i", dataset="d", parameters="p")) == ()


def test_where_it_stands_is_always_said():
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
def test_what_changed_since_the_parent_is_said(change, words):
    assert describe_facts(SAME.model_copy(update=change), SAME) == ("4 ranks", words)


def test_another_number_of_ranks_is_said():
    assert describe_facts(SAME, SAME.model_copy(update={"world_size": 1})) == ("4 ranks", "before: 1 rank")
