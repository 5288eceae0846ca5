"""Elastic gangs grow into what is idle, whatever else asks, leaves, is preempted or is lost.

| law                                                                                  | looked at in |
|--------------------------------------------------------------------------------------|--------------|
| a gang grows at most once in `GROWTH_EVERY`, and not before that after its start     | rule grow    |
| no gang grows while a member of it is to leave                                       | rule grow    |
| no gang grows while a request waits that may use its GPUs                            | rule grow    |
| what grows takes idle GPUs only: no quota is overdrawn, no victim is made by it      | invariant    |
| alone, and due, a gang grows to all that is idle                                     | rule grow    |
| a growth changes neither the GPU-seconds that a gang has held, nor those of another  | rule grow    |
| a report from before the growth takes nothing back                                   | rule report  |
"""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.builders.ledger import ask
from support.checks.preemption_rounds import Arena
from tiphys_plugin.quota.ledger.transitions import GROWTH_EVERY, grow, release, shrink, withdraw
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.fair_share import held_gpu_seconds

RULES = Queues.model_validate(
    {
        "queues": [
            {"name": "a", "gpus": {"A100": 5}, "cohort": "lab", "preempts_lower_priority": True, "reclaims": True},
            {"name": "b", "gpus": {"A100": 3}, "cohort": "lab", "preempts_lower_priority": True, "reclaims": True},
            {"name": "c", "gpus": {"H100": 2}},
        ]
    }
)
QUOTA = {"A100": 8, "H100": 2}
ELASTIC = [
    {"gpus": 1, "members": 1, "min_members": 1, "max_members": 4},
    {"gpus": 4, "members": 2, "min_members": 2, "max_members": 3},
]


class Growing(RuleBasedStateMachine):
    """``made`` counts the members that each gang was given, ``changed`` is its start or last growth."""

    @initialize()
    def open(self) -> None:
        self.arena = Arena(RULES)
        self.made: dict[str, int] = {}
        self.changed: dict[str, datetime] = {}
        self.count = 0

    @rule(
        shape=st.sampled_from([*ELASTIC, *ELASTIC, {"gpus": 1}, {"gpus": 3}]),
        queue=st.sampled_from("ab"),
        priority=st.sampled_from([0, 0, 5]),
    )
    def ask(self, shape: dict[str, int], queue: str, priority: int) -> None:
        self.count += 1
        self.arena.ask(ask(uid=f"u{self.count}", queue=queue, priority=priority, **shape))
        self._note_starts()

    @rule()
    def ask_elsewhere(self) -> None:
        """One that waits for other GPUs, or has them, is no reason."""
        self.count += 1
        self.arena.ask(ask(2, uid=f"u{self.count}", queue="c", gpu_type="H100"))

    @rule(seconds=st.sampled_from([1, 300, 600, 3600]))
    def wait(self, seconds: int) -> None:
        self.arena.now += timedelta(seconds=seconds)

    @rule()
    def preempt(self) -> None:
        self.arena.look()

    @rule()
    def those_asked_go(self) -> None:
        book = self.arena.book
        for lease in book.leases:
            if lease.preemption is not None and lease.preemption.keeps is None:
                book = release(book, lease.id, self.arena.now, self.arena.cache)
            elif lease.preemption is not None and lease.preemption.keeps is not None:
                keeps, made = lease.preemption.keeps, self.made[lease.id]
                book = shrink(book, lease.id, keeps, (), made, self.arena.now, self.arena.cache)
        self.arena.book = book
        self.arena.all_ask()
        self._note_starts()

    @rule(data=st.data())
    @precondition(lambda self: any(lease.request.members > 1 for lease in self.arena.book.leases))
    def lose(self, data: st.DataObject) -> None:
        large = [lease for lease in self.arena.book.leases if lease.request.members > 1]
        lease = data.draw(st.sampled_from(large))
        left, now = lease.request.members - 1, self.arena.now
        self.arena.book = shrink(self.arena.book, lease.id, left, (), self.made[lease.id], now, self.arena.cache)

    @rule(data=st.data())
    @precondition(lambda self: self.arena.book.leases)
    def end(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.arena.book.leases))
        self.arena.book = release(self.arena.book, lease.id, self.arena.now, self.arena.cache)
        self.arena.all_ask()
        self._note_starts()

    @rule()
    def give_up(self) -> None:
        for pending in self.arena.book.pending:
            self.arena.book = withdraw(self.arena.book, pending.request.uid)

    @rule(data=st.data())
    @precondition(lambda self: any(lease.id in self.made for lease in self.arena.book.leases))
    def grow(self, data: st.DataObject) -> None:
        arena, now = self.arena, self.arena.now
        gang = data.draw(st.sampled_from([lease for lease in arena.book.leases if lease.id in self.made]))
        before = arena.book
        used = {lease.id: held_gpu_seconds(lease, now) for lease in before.leases}
        wanted = [pending for pending in before.pending if pending.request.gpu_type == "A100"]
        idle = QUOTA["A100"] - self._held("A100")
        is_due = now - self.changed[gang.id] >= GROWTH_EVERY
        is_small = gang.request.members < (gang.request.max_members or 0)
        may = is_due and is_small and gang.preemption is None and not wanted
        arena.book, grown = grow(before, gang.id, self.made[gang.id], now, arena.cache)
        if grown is None:
            assert arena.book == before
            assert not (may and idle >= gang.request.gpus_per_member), "it is due, alone, and there is room"
            return
        assert may
        added = grown.request.members - gang.request.members
        room = (gang.request.max_members or 0) - gang.request.members
        assert added == min(room, idle // gang.request.gpus_per_member)
        assert grown.growth is not None
        assert grown.growth.made == self.made[gang.id] + added
        for lease in arena.book.leases:
            assert held_gpu_seconds(lease, now) == pytest.approx(used[lease.id], abs=0.01)
        stale, made = gang.request.members, self.made[gang.id]
        for left in range(1, stale + 1):
            assert shrink(arena.book, gang.id, left, (), made, now, arena.cache) == arena.book, "seen before it grew"
        self.made[gang.id], self.changed[gang.id] = grown.growth.made, now

    @invariant()
    def no_quota_is_overdrawn(self) -> None:
        if hasattr(self, "arena"):
            assert all(self._held(kind) <= quota for kind, quota in QUOTA.items())

    def _held(self, kind: str) -> int:
        return sum(lease.request.gpus for lease in self.arena.book.leases if lease.request.gpu_type == kind)

    def _note_starts(self) -> None:
        for lease in self.arena.book.leases:
            if lease.request.max_members is not None:
                self.made.setdefault(lease.id, lease.request.members)
                self.changed.setdefault(lease.id, lease.granted_at)


TestGrowing: Callable[[], None] = Growing.TestCase
TestGrowing.settings = settings(max_examples=60, stateful_step_count=40)  # type: ignore[attr-defined]
