"""What differs between two sequences is found by identity, wherever it is."""

import random

from tiphys_plugin.quota.scheduler.changes import RecentChanges, find_changes

SEED = 20_261_123


class Item:
    pass


def changed(draw: random.Random, items: tuple[Item, ...]) -> tuple[Item, ...]:
    after = list(items)
    for _ in range(draw.randrange(5)):
        place = draw.randrange(len(after) + 1)
        match draw.randrange(3):
            case 0:
                after.insert(place, Item())
            case 1 if place < len(after):
                del after[place]
            case 2 if place < len(after):
                after[place] = Item()
    return tuple(after)


def test_removed_and_added_objects_are_found():
    draw = random.Random(SEED)
    for _ in range(1000):
        before = tuple(Item() for _ in range(draw.randrange(200)))
        after = changed(draw, before)
        removed, added = find_changes(before, after)
        assert list(removed) == [one for one in before if one not in after]
        assert list(added) == [one for one in after if one not in before]


def test_removed_and_added_objects_are_found_among_thousands():
    """Alone, side by side, more than the search skips at once, and objects that only moved."""
    draw = random.Random(SEED)
    for _ in range(200):
        before = tuple(Item() for _ in range(draw.randrange(3000)))
        after = list(before)
        for _ in range(draw.randrange(4)):
            place, length = draw.randrange(len(after) + 1), draw.choice([1, 1, 2, 8, 9, 40])
            after[place : place + draw.choice([0, length])] = [Item() for _ in range(draw.choice([0, length]))]
        if after and draw.random() < 0.2:
            after.append(after.pop(draw.randrange(len(after))))
        removed, added = find_changes(before, tuple(after))
        assert set(removed) == set(before) - set(after)
        assert set(added) == set(after) - set(before)
        assert list(removed) == [one for one in before if one in set(removed)]
        assert list(added) == [one for one in after if one in set(added)]


def test_the_same_sequence_has_no_changes():
    items = (Item(), Item())
    assert find_changes(items, items) == ((), ())
    assert find_changes(items, tuple(one for one in items)) == ((), ())


def test_a_pair_that_was_compared_before_has_the_same_changes():
    before = (Item(), Item())
    after = (before[0], Item(), Item())
    others = [(Item(),) for _ in range(20)]
    changes = RecentChanges()
    expected = changes.find(before, after)
    assert changes.find(before, after) is expected
    assert expected == ((before[1],), after[1:])
    assert changes.find(after, before) == (after[1:], (before[1],))
    for other in others:
        assert changes.find(other, after) == (other, after)
    assert changes.find(before, after) == expected
