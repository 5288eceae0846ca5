"""Gangs on nodes, and trainings that are asked to leave: any order of requests, marks, ends and restarts.

| law                                                                   | checked by              |
|-----------------------------------------------------------------------|-------------------------|
| no node gives more than it has; every member has a node, of one type  | invariant               |
| a gang has all of its members or none, and is charged for all         | invariant               |
| a repeated call gets the same lease on the same nodes                 | rule ask                |
| who fits nowhere by hand is not admitted; who is alone and fits is    | rule ask                |
| only those of lower priority are asked, none twice, all of a set or none | rule ask_to_leave    |
| nobody is asked for nothing: without them it fits, without fewer not  | rule ask_to_leave       |
| who is asked holds its GPUs until it is gone                          | invariant: holders match |
| what came free by that goes to whom it was for                        | rule those_asked_go     |
| an elastic gang gets as many members as fit, and never less than asked | rule ask               |
| it gives back what its lost members held and no more; it never grows  | rule shrink             |

The oracle places members by trying every node for each of them. The same
searches drive the ledger in a file and the one in a cluster.
"""

import tempfile
from collections import Counter
from itertools import combinations
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.builders.ledger import ask, ledger_api
from support.stories.plugin import Clock
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Admitted, Deferred, LeaseRequest
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queues import Queues

NODES = {"n1": 4, "n2": 4, "n3": 2}
QUOTA = 9
RULES = Queues.model_validate(
    {
        "queues": [{"name": "research", "gpus": {"A100": QUOTA}, "preempts_lower_priority": True}],
        "nodes": [{"name": name, "gpu_type": "A100", "gpus": gpus} for name, gpus in NODES.items()],
    }
)
SHAPES = [
    *({"gpus": gpus, "members": members} for gpus, members in [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (6, 2), (6, 3)]),
    {"gpus": 2, "members": 1, "min_members": 1, "max_members": 4},
    {"gpus": 4, "members": 2, "min_members": 2, "max_members": 3},
]
requests = st.builds(
    lambda shape, number, priority: ask(**shape, uid=f"u{number}", priority=priority),
    st.sampled_from(SHAPES),
    st.integers(0, 7),
    st.sampled_from([0, 0, 5, 9]),
)


class OnNodes(RuleBasedStateMachine):
    """``holders`` and ``line`` are the oracle; ``asked`` are those that were asked to leave, each with for whom."""

    @initialize()
    def open(self) -> None:
        self.clock = Clock()
        self.holders: dict[str, tuple[str, LeaseRequest, tuple[str, ...]]] = {}
        self.line: dict[str, LeaseRequest] = {}
        self.asked: dict[str, str] = {}
        self._make()
        self._open()

    def _make(self) -> None:
        self.folder = tempfile.TemporaryDirectory()

    def _open(self) -> None:
        self.ledger: AdmissionBackend = SqliteLedger(Path(self.folder.name) / "ledger.db", RULES, clock=self.clock)

    def _close(self) -> None:
        assert isinstance(self.ledger, SqliteLedger)
        self.ledger.close()

    @rule(asked=st.lists(requests, min_size=1, max_size=3))
    def ask(self, asked: list[LeaseRequest]) -> None:
        for request in asked:
            self.clock.advance(1)
            self._ask(request)

    def _ask(self, request: LeaseRequest) -> None:
        answer = self.ledger.request(request)
        if request.uid in self.holders:
            lease, _, nodes = self.holders[request.uid]
            assert isinstance(answer, Admitted)
            assert (answer.lease, answer.nodes) == (lease, nodes)
        elif isinstance(answer, Admitted):
            given = request.with_members(answer.members or request.members)
            assert self._fits(given, set()), "there was no room for all of its members"
            more = any(self._fits(larger, set()) for larger in request.larger_sizes if larger.members > given.members)
            others = self.line.keys() - {request.uid}
            assert others or self.asked or not more, "nobody waits, and more of its members would fit"
            self.holders[request.uid] = (answer.lease, given, answer.nodes)
            self.line.pop(request.uid, None)
        else:
            assert isinstance(answer, Deferred), "all of them fit into an empty cluster"
            others = self.line.keys() - {request.uid}
            assert others or not self._fits(request, set()), f"nobody waits, and it would fit: {answer}"
            self.line[request.uid] = request

    @rule(data=st.data())
    @precondition(lambda self: getattr(self, "line", None))
    def ask_to_leave(self, data: st.DataObject) -> None:
        best = max(self.line, key=lambda uid: self.line[uid].priority)
        uid = data.draw(st.sampled_from([best, *sorted(self.line)]))
        sets = self._sets_that_make_room(self.line[uid])
        some = [set(one) for one in combinations(sorted(self.holders), min(2, len(self.holders)))]
        chosen = data.draw(st.sampled_from(sets * 4 + some))
        marked = self.ledger.mark_preempted((uid, "fit"), {self.holders[one][0]: 30.0 for one in chosen})
        assert len(marked) in (0, len(chosen)), "some of them were asked, and not the others"
        if marked:
            request = self.line[uid]
            assert not chosen & self.asked.keys(), "one of them is leaving already"
            assert all(self.holders[one][1].priority < request.priority for one in chosen)
            on_their_way = set(self.asked)
            assert self._fits(request, chosen | on_their_way), "they would go for nothing"
            too_many = any(self._fits(request, chosen - {one} | on_their_way) for one in chosen)
            promised = any(whom != uid for whom in self.asked.values())  # what comes free by those is for others
            assert promised or not too_many, "too many were asked"
            self.asked.update(dict.fromkeys(chosen, uid))

    @rule(data=st.data())
    @precondition(lambda self: getattr(self, "asked", None))
    def those_asked_go(self, data: st.DataObject) -> None:
        """Their pods are gone; nothing else has happened, and the one for whom they went asks."""
        uid = data.draw(st.sampled_from(sorted(set(self.asked.values()))))
        for one in [victim for victim, whom in self.asked.items() if whom == uid]:
            self._end(one)
        if uid in self.line and not self.asked:
            self.clock.advance(1)
            self._ask(self.line[uid])
            others = [self.line[other] for other in self.line if other != uid]
            first = all(other.priority <= self.line[uid].priority for other in others) if uid in self.line else True
            assert uid in self.holders or not first or not self._fits(self.line[uid], set()), "it went to another"

    @rule(data=st.data())
    @precondition(lambda self: getattr(self, "holders", None))
    def shrink(self, data: st.DataObject) -> None:
        """Some members are lost; whatever is said of the others, nothing is given back that may be in use."""
        uid = data.draw(st.sampled_from(sorted(self.holders)))
        lease, request, nodes = self.holders[uid]
        left = tuple(data.draw(st.lists(st.sampled_from([*nodes, "n1"]), max_size=len(nodes))))
        self.ledger.shrink(lease, len(left), left)
        if 0 < len(left) < request.members and not Counter(left) - Counter(nodes):
            self.holders[uid] = (lease, request.with_members(len(left)), left)

    @rule(data=st.data())
    @precondition(lambda self: getattr(self, "holders", None))
    def end(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.holders))))

    def _end(self, uid: str) -> None:
        self.ledger.release(self.holders.pop(uid)[0])
        self.asked.pop(uid, None)

    @rule(data=st.data())
    @precondition(lambda self: getattr(self, "line", None))
    def give_up(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.line)))
        self.ledger.withdraw(uid)
        del self.line[uid]

    @rule()
    def restart(self) -> None:
        self._close()
        self._open()

    @invariant()
    def those_told_yes_hold_on_their_nodes(self) -> None:
        if hasattr(self, "holders"):
            kept = {one.request.uid: (one.id, one.nodes) for one in self.ledger.snapshot().leases}
            assert kept == {uid: (lease, nodes) for uid, (lease, _, nodes) in self.holders.items()}
            leaving = {one.request.uid: one.preemption.uid for one in self.ledger.snapshot().leases if one.preemption}
            assert leaving == self.asked

    @invariant()
    def no_node_and_no_quota_is_overdrawn(self) -> None:
        if not hasattr(self, "holders"):
            return
        used: Counter[str] = Counter()
        for _, request, nodes in self.holders.values():
            assert len(nodes) == request.members
            for name in nodes:
                used[name] += request.gpus // request.members
        assert all(gpus <= NODES[name] for name, gpus in used.items())
        assert used.total() == sum(request.gpus for _, request, _ in self.holders.values()) <= QUOTA

    def _sets_that_make_room(self, request: LeaseRequest) -> list[set[str]]:
        """Of those of lower priority that do not leave yet: sets without which it fits, and none too large."""
        lower = sorted(uid for uid, (_, one, _) in self.holders.items() if one.priority < request.priority)
        may_go = [uid for uid in lower if uid not in self.asked]
        going = set(self.asked)
        found: list[set[str]] = []
        for count in range(1, len(may_go) + 1):
            for one in map(set, combinations(may_go, count)):
                if self._fits(request, one | going) and not any(less < one for less in found):
                    found.append(one)
        return found

    def _fits(self, request: LeaseRequest, gone: set[str]) -> bool:
        free, held = Counter(NODES), 0
        for uid, (_, other, nodes) in self.holders.items():
            if uid not in gone:
                held += other.gpus
                for name in nodes:
                    free[name] -= other.gpus // other.members
        each = request.gpus // request.members
        return held + request.gpus <= QUOTA and sum(gpus // each for gpus in free.values()) >= request.members

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self._close()
            self._unmake()

    def _unmake(self) -> None:
        self.folder.cleanup()


class OnNodesInCluster(OnNodes):
    def _make(self) -> None:
        self.api = ledger_api(RULES)

    def _open(self) -> None:
        self.ledger = KubernetesLedger(self.api, "tiphys", clock=self.clock, pause=lambda _: None)

    def _close(self) -> None:
        pass

    def _unmake(self) -> None:
        pass


TestOnNodes = OnNodes.TestCase
TestOnNodes.settings = settings(max_examples=30, stateful_step_count=20)
TestOnNodesInCluster = OnNodesInCluster.TestCase
TestOnNodesInCluster.settings = settings(max_examples=25, stateful_step_count=20)
