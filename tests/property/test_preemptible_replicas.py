"""Who goes where some trainings are elastic, against what is left of each when all have gone who were asked.

| law                                                                    | looked at in |
|------------------------------------------------------------------------|--------------|
| members go, or whole trainings, never both for one request             | the choice   |
| the book marks what was chosen by it                                   | the mark     |
| who waits starts once they are gone, and takes no more than was free   | the grant    |
| an elastic training keeps its fewest members, or goes as a whole       | each lease   |
| a whole training goes only if no members suffice                       | the choice   |
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders.ledger import ask
from support.checks.preemption_rounds import Arena
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.ledger.transitions import release, shrink, withdraw
from tiphys_plugin.quota.preemption.victims import VictimSelection, is_member_id
from tiphys_plugin.quota.queues import Queues

QUOTA = 9
RULES = Queues.model_validate(
    {
        "queues": [
            {"name": "a", "gpus": {"A100": 6}, "cohort": "lab", "preempts_lower_priority": True, "reclaims": True},
            {"name": "b", "gpus": {"A100": 3}, "cohort": "lab", "preempts_lower_priority": True, "reclaims": True},
        ]
    }
)
SHAPES = [
    {"gpus": 1},
    {"gpus": 2},
    {"gpus": 1, "members": 1, "min_members": 1, "max_members": 4},
    {"gpus": 4, "members": 2, "min_members": 2, "max_members": 3},
]
trainings = st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from("ab"), st.sampled_from([0, 0, 3])), max_size=6)


@settings(max_examples=80)
@given(trainings, st.sampled_from(SHAPES), st.sampled_from("ab"))
def test_members_that_can_be_spared_go_first(given, shape, queue):
    arena = Arena(RULES)
    for number, (wanted, of, priority) in enumerate(given):
        arena.ask(ask(uid=f"u{number}", queue=of, priority=priority, **wanted))
    for pending in arena.book.pending:
        arena.book = withdraw(arena.book, pending.request.uid)
    request = ask(uid="mine", queue=queue, priority=9, **shape)
    if isinstance(arena.ask(request), Admitted):
        return
    before = arena.book
    chosen = arena.choose("mine")
    if not isinstance(chosen, VictimSelection):
        return
    assert len({is_member_id(one.id) for one in chosen.leases}) == 1
    marked = arena.mark("mine", chosen.leases)
    assert marked
    for one in marked:
        leaving = one.preemption
        assert leaving is not None
        if leaving.keeps is None:
            arena.book = release(arena.book, one.id, arena.now, arena.cache)
        else:
            assert leaving.keeps >= (one.request.min_members or 0)
            arena.book = shrink(arena.book, one.id, leaving.keeps, (), None, arena.now, arena.cache)
    assert all(one.preemption is None for one in arena.book.leases)
    assert isinstance(arena.ask(request), Admitted), "they have gone for nothing"
    assert sum(one.request.gpus for one in arena.book.leases) <= QUOTA
    if not any(is_member_id(one.id) for one in chosen.leases):
        arena.book = before
        for one in before.leases:
            if one.request.queue == queue and one.request.min_members:
                arena.book = shrink(arena.book, one.id, one.request.min_members, (), None, arena.now, arena.cache)
        assert arena.book == before or not isinstance(arena.ask(request), Admitted), "members would have sufficed"
