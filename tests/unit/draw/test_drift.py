"""What is said about the facts of a checkpoint: where it stands, and what changed, once."""

import pytest

from hera_pipelines.draw.lineage_graph import in_short
from tiphys.records import Facts

SAME = Facts(world_size=4, git_commit="c0ffee00", image="i:1", dataset="d", parameters="p", versions={"numpy": "2.1.0"})


def test_nothing_is_said_of_what_is_not_known_or_has_not_changed():
    assert in_short(Facts(), None) == ()
    assert in_short(SAME.model_copy(update={"world_size": 1}), SAME.model_copy(update={"world_size": 1})) == ()
    assert in_short(Facts(), Facts(git_commit="a", image="i", dataset="d", parameters="p")) == ()


def test_where_it_stands_is_always_said():
    assert in_short(SAME.model_copy(update={"epoch": 0}), SAME) == ("epoch 0", "4 ranks")


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
    assert in_short(SAME.model_copy(update=change), SAME) == ("4 ranks", words)


def test_another_number_of_ranks_is_said():
    assert in_short(SAME, SAME.model_copy(update={"world_size": 1})) == ("4 ranks", "before: 1 rank")
