from tiphys_plugin.agent.fair_queue import ConcurrencyLimit, FairQueue
from tiphys_plugin.agent.task_state import TimerQueue


def taken(turns: FairQueue[str, int], times: int) -> list[str]:
    return [got[0] for _ in range(times) if (got := turns.take()) is not None]


def filled(**sizes: int) -> FairQueue[str, int]:
    turns: FairQueue[str, int] = FairQueue(ConcurrencyLimit(str, 100))
    for key, size in sizes.items():
        for number in range(size):
            turns.add(key, number)
    return turns


def test_a_key_with_few_entries_goes_first() -> None:
    assert taken(filled(big=50, small=1, other=2), 3) == ["small", "other", "other"]


def test_of_equals_one_comes_after_the_other() -> None:
    assert taken(filled(a=3, b=3), 3) == ["a", "a", "a"]


def test_a_key_with_many_entries_is_served_however_many_small_ones_come() -> None:
    turns = filled(big=50)
    served = []
    for number in range(400):
        turns.add(f"small-{number}", 0)
        served += taken(turns, 1)
    assert served.count("big") > 20


def test_items_of_one_key_come_in_their_order() -> None:
    turns: FairQueue[str, int] = FairQueue(ConcurrencyLimit(str, 10))
    for number in range(3):
        turns.add("a", number)
    assert [turns.take(), turns.take(), turns.take(), turns.take()] == [("a", 0), ("a", 1), ("a", 2), None]


def test_a_key_never_has_more_than_its_share_in_progress() -> None:
    turns: FairQueue[str, int] = FairQueue(ConcurrencyLimit(str, 2))
    for number in range(5):
        turns.add("slow", number)
    assert taken(turns, 3) == ["slow", "slow"]
    turns.add("late", 0)
    assert taken(turns, 2) == ["late"]
    turns.release("slow")
    assert taken(turns, 2) == ["slow"]


def test_keys_of_one_group_share_what_it_may_have_out() -> None:
    turns: FairQueue[str, int] = FairQueue(ConcurrencyLimit(str, 2), ConcurrencyLimit(lambda key: key[0], 3))
    for key in ("ml/a", "ml/b", "vision/c"):
        for number in range(3):
            turns.add(key, number)
    assert taken(turns, 9) == ["ml/a", "ml/a", "ml/b", "vision/c", "vision/c"]
    turns.release("ml/a")
    assert taken(turns, 9) == ["ml/a"]


def test_the_queue_counts_the_entries_that_are_ready() -> None:
    turns: FairQueue[str, int] = FairQueue(ConcurrencyLimit(str, 2))
    assert turns.count_ready(8) == 0
    for number in range(5):
        turns.add("a", number)
    assert turns.count_ready(8) == 2
    turns.add("b", 0)
    assert turns.count_ready(8) == 3
    assert turns.count_ready(1) == 1
    turns.take()
    turns.take()
    assert turns.count_ready(8) == 1
    turns.take()
    assert turns.count_ready(8) == 0
    turns.release("a")
    assert turns.count_ready(8) == 1


def test_a_dropped_key_is_not_taken() -> None:
    turns: FairQueue[str, int] = FairQueue(ConcurrencyLimit(str, 2))
    turns.add("a", 1)
    turns.add("b", 1)
    assert len(turns) == 2
    turns.drop("a")
    turns.drop("never")
    assert taken(turns, 2) == ["b"]
    assert len(turns) == 0


def test_actions_are_taken_when_they_are_due_and_not_before() -> None:
    table: TimerQueue[str] = TimerQueue()
    assert table.seconds_until_due(0.0) is None
    table.add(5.0, "later")
    table.add(2.0, "soon")
    table.add(2.0, "soon too")
    assert table.seconds_until_due(1.0) == 1.0
    assert table.pop_due(1.9) == []
    assert table.pop_due(2.0) == ["soon", "soon too"]
    assert table.seconds_until_due(9.0) == 0.0
    assert table.pop_due(9.0) == ["later"]
