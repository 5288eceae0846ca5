"""A long seeded walk over a ledger, watched by an oracle that counts GPUs by hand and knows only the laws.

| law                                              | checked by                |
|--------------------------------------------------|---------------------------|
| never over quota, cohort, limits and inventory   | after each step           |
| a deferred request holds nothing                 | after each step           |
| a restart keeps every holder and every place     | after each step           |
| only released or gone leases come back           | after each step, `_sweep` |
| a repeated request gets the same lease           | `_request`                |
| a request never counts itself                    | `_request`                |
| at the head and with room: admitted              | `_request`                |
| nobody is overtaken in its own line by who takes what it waits for | `_request` |
| who may not use a queue, or never fits, is rejected and holds nothing | `_trespass`  |
| no namespace has more of the ledger's room than its share | `_crowd`         |

The oracle shares no code with the product, so that a bug of the product cannot
be right in both.
"""

import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, LeaseRequest, Rejected
from tiphys_plugin.quota.queues import Queues

from support.builders.ledger import ask, strict
from support.stories.plugin import Clock

QUOTA = {("a", "A100"): 4, ("a", "T4"): 2, ("b", "A100"): 6, ("c", "A100"): 4, ("shut", "A100"): 4}
LAB = ("a", "b", "shut")
MOST_OF_A = 12
KEPT_BY_B = 5
STOCK = {"A100": 14, "T4": 2}
RULES = strict(
    Queues.model_validate(
        {
            "queues": [
                {"name": "a", "gpus": {"A100": 4, "*": 2}, "cohort": "lab", "borrowing_limit": {"A100": 8, "*": 0}},
                {"name": "b", "gpus": {"A100": 6}, "cohort": "lab", "lending_limit": {"A100": 1}},
                {"name": "c", "gpus": {"A100": 4}, "namespaces": ["ml"], "max_priority": 5},
                {"name": "shut", "gpus": {"A100": 4}, "cohort": "lab", "stopped": True},
            ],
            "inventory": {name: {"count": count} for name, count in STOCK.items()},
            "ledger_share": 0.0003,
        }
    )
)


BEHIND_OTHERS = (AdmissionReason.BEHIND_EARLIER_REQUEST, AdmissionReason.BEHIND_HIGHER_PRIORITY)
MOST_OF_A_SHARE = 30
"""Leases and requests of one namespace: three of ten thousand parts of 100,000."""


class Walk:
    """Requests, releases, sweeps and restarts in random order; an `AssertionError` names the law that is broken.

    ``shares_room``: the ledger has a limited size, of which each namespace has a share.
    """

    def __init__(
        self, seed: int, clock: Clock, open_ledger: Callable[[], AdmissionBackend], *, shares_room: bool = False
    ) -> None:
        self._random = random.Random(seed)
        self._clock = clock
        self._open = open_ledger
        self._ledger = open_ledger()
        self._names = 0
        self.holders: dict[str, tuple[str, LeaseRequest]] = {}
        self.line: dict[str, LeaseRequest] = {}
        self._moves = [self._ask, self._ask_again, self._release, self._sweep, self._give_up, self._again]
        self._moves += [self._trespass, self._end_workflow, *([self._crowd] if shares_room else [])]

    def run(self, steps: int) -> None:
        for step in range(steps):
            self._clock.advance(1)
            if step % 40 == 0:
                self._all_give_up()
            [move] = self._random.choices(self._moves, weights=[8, 8, 3, 1, 1, 1, 1, 1, 1][: len(self._moves)])
            move()
            self._look()

    def _ask(self) -> None:
        self._names += 1
        queue = self._random.choice(["a", "a", "a", "b", "c", "c", "c", "shut"])
        gpu_type = self._random.choice(["A100", "A100", "T4"]) if queue == "a" else "A100"
        gpus = self._random.choice([1, 2]) if gpu_type == "T4" else self._random.choice([1, 2, 3, 4])
        priority = self._random.choice([0, 5])
        if len(self._neighbours()) < 8:
            self._request(ask(gpus, f"u{self._names}", queue=queue, gpu_type=gpu_type, priority=priority))

    def _trespass(self) -> None:
        """A namespace that may not use the queue, a priority that it does not take, or more GPUs than it has."""
        self._names += 1
        wish = self._random.choice([{"namespace": "vision"}, {"priority": 6}, {"namespace": "m"}, {"gpus": 5}])
        answer = self._ledger.request(ask(uid=f"u{self._names}", queue="c", **{"gpus": 1, **wish}))
        assert isinstance(answer, Rejected), "who may not use the queue was not sent away"

    def _crowd(self) -> None:
        """One namespace asks for more than its share of the ledger, in a queue that is stopped."""
        for _ in range(16):
            self._names += 1
            request = ask(1, f"u{self._names}", queue="shut", namespace="crowd")
            many = sum(one.namespace == "crowd" for one in self.line.values())
            answer = self._ledger.request(request)
            assert isinstance(answer, Deferred), "a stopped queue admitted"
            if answer.reason is AdmissionReason.LEDGER_SHARE_EXCEEDED:
                assert many + 1 > MOST_OF_A_SHARE, "it was sent away with room in its share"
                return
            assert many + 1 <= MOST_OF_A_SHARE, "it took more than its share"
            self.line[request.uid] = request

    def _ask_again(self) -> None:
        known = [*self._neighbours(), *(request for _, request in self.holders.values())]
        if known:
            self._request(self._random.choice(known))

    def _request(self, request: LeaseRequest) -> None:
        others = {uid: one for uid, one in self.line.items() if uid != request.uid}
        before = self._before(request, others)
        answer = self._ledger.request(request)
        if request.uid in self.holders:
            assert isinstance(answer, Admitted), "a holder was sent away"
            assert answer.lease == self.holders[request.uid][0], "a holder got another lease"
        elif isinstance(answer, Admitted):
            assert request.queue != "shut", "a stopped queue admitted"
            assert self._fits(*before, request), "somebody was overtaken by who took what it waits for"
            self.holders[request.uid] = (answer.lease, request)
            self.line.pop(request.uid, None)
        else:
            assert isinstance(answer, Deferred), f"rejected: {answer}"
            assert answer.reason is not AdmissionReason.LEDGER_SHARE_EXCEEDED, "another has taken its room"
            self.line[request.uid] = request
            rivals = [one for one in self._neighbours() if one.uid != request.uid]
            assert rivals or request.queue == "shut" or not self._fits(request), (
                "it fits, nobody waits, and it was sent away"
            )
            assert answer.position <= len(others) + 1, "it stands behind itself"
            assert others or answer.reason not in BEHIND_OTHERS, "it waits behind others, and nobody waits"

    def _neighbours(self) -> list[LeaseRequest]:
        """Those who wait and are not of the crowd, which delays nobody: its queue is stopped."""
        return [one for one in self.line.values() if one.namespace != "crowd"]

    def _release(self) -> None:
        if self.holders:
            uid = self._random.choice(sorted(self.holders))
            self._ledger.release(self.holders.pop(uid)[0])

    def _sweep(self) -> None:
        """One of them is gone; the others are looked at and stay."""
        gone = self._random.choice(sorted(self.holders)) if self.holders else ""
        self._clock.advance(60)
        self._look_for_pods(gone)

    def _end_workflow(self) -> None:
        """Its requests are withdrawn, and its pods are looked for at once."""
        if self.holders:
            uid = self._random.choice(sorted(self.holders))
            self._ledger.release_workflow(uid)
            self.line.pop(uid, None)
            self._look_for_pods(uid if self._random.random() < 0.5 else "")

    def _look_for_pods(self, gone: str) -> None:
        released = self._ledger.release_dead_leases(lambda lease: lease.request.uid == gone)
        assert {lease.request.uid for lease in released} <= {gone}, "GPUs came back while their pods are there"
        self.holders.pop(gone, None)

    def _give_up(self) -> None:
        if self.line:
            uid = self._random.choice(sorted(self.line))
            self._ledger.withdraw(uid)
            self.line.pop(uid)

    def _all_give_up(self) -> None:
        """A line that is empty now and then shows who is sent away for nothing."""
        for uid in list(self.line):
            self._ledger.withdraw(uid)
        self.line.clear()

    def _again(self) -> None:
        close = getattr(self._ledger, "close", lambda: None)
        close()
        self._ledger = self._open()

    def _look(self) -> None:
        seen = self._ledger.snapshot()
        assert Counter(lease.request.uid for lease in seen.leases) == Counter(self.holders.keys()), (
            "not who was told yes"
        )
        assert {one.request.uid for one in seen.pending} == set(self.line), "not who was told to wait"
        assert self._lawful([request for _, request in self.holders.values()]), "more is held than may be"

    def _before(self, request: LeaseRequest, others: dict[str, LeaseRequest]) -> list[LeaseRequest]:
        """Those of the same line, with a better place, that wait."""
        order = list(self.line)
        mine = order.index(request.uid) if request.uid in order else len(order)
        return [
            one
            for uid, one in others.items()
            if (one.queue, one.gpu_type) == (request.queue, request.gpu_type)
            and (-one.priority, order.index(uid)) < (-request.priority, mine)
        ]

    def _fits(self, *more: LeaseRequest) -> bool:
        return self._lawful([*(one for _, one in self.holders.values()), *more])

    @staticmethod
    def _lawful(held: list[LeaseRequest]) -> bool:
        used: Counter[tuple[str, str | None]] = Counter()
        for one in held:
            used[one.queue, one.gpu_type] += one.gpus
        kept = {"a": 0, "b": KEPT_BY_B, "shut": 0}
        cohort = sum(max(used[name, "A100"], kept[name]) for name in LAB)
        return (
            used["a", "A100"] <= MOST_OF_A
            and used["a", "T4"] <= QUOTA["a", "T4"]
            and used["c", "A100"] <= QUOTA["c", "A100"]
            and cohort <= sum(QUOTA[name, "A100"] for name in LAB)
            and all(sum(n for (_, kind), n in used.items() if kind == name) <= count for name, count in STOCK.items())
        )


PATIENCE = timedelta(days=1)
"""Nobody of the walk is forgotten: what it asks and what it does not is random."""
