"""Flavors under any order of requests, ends, restarts and changes of the queue file.

| law                                                                   | checked by         |
|-----------------------------------------------------------------------|--------------------|
| a grant suits: type, memory, use of spot nodes                        | rule ask           |
| a grant keeps the quota of its flavor, and GPUs of its flavor exist   | rule ask           |
| a pod is on a node of its flavor, and no node gives more than it has  | rule ask, invariant |
| nobody waits whom a flavor could serve, where nobody else waits       | rule ask           |
| the first that has room within the quota, in order, is the one        | rule ask           |
| what is held goes on to be held, whatever flavors are declared        | invariant          |

The oracle knows of a lease what was granted, and counts what it may hold: where
flavors have come or gone since, that is any of its type.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.builders.ledger import ask
from support.stories.plugin import Clock
from tiphys_plugin.quota.lease import Admitted, Deferred, LeaseRequest, Rejected
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queues import Queues

ORDER = ("spot", "own", "far")
FLAVORS: dict[str, dict[str, Any]] = {
    "own": {"gpu_type": "A100", "memory_mb": 80, "node_labels": {"pool": "own"}},
    "spot": {"gpu_type": "A100", "memory_mb": 40, "node_labels": {"pool": "spot"}, "spot": True},
    "far": {"gpu_type": "H100", "memory_mb": 80, "node_labels": {"pool": "far"}},
}
QUOTA = {"research": {"own": 4, "spot": 4, "far": 2}, "nightly": {"own": 4, "spot": 4}}
STOCK = {"own": 4, "spot": 4, "far": 4}
NODES = {"own-1": ("own", 2), "own-2": ("own", 2), "spot-1": ("spot", 4), "far-1": ("far", 4), "none-1": ("none", 8)}


def rules(declared: frozenset[str], on_nodes: bool) -> Queues:
    """Queues under which ``declared`` flavors exist; the GPUs of the others belong to nobody for now."""
    names = [name for name in ("own", "spot", "far") if name in declared]
    queues = [
        {
            "name": name,
            "gpus": {kind: quota for kind, quota in gpus.items() if kind in declared},
            "flavor_order": [kind for kind in ORDER if kind in declared and kind in gpus],
            "backfill": "strict",
        }
        for name, gpus in QUOTA.items()
    ]
    nodes = [
        {"name": name, "gpu_type": _type_of(pool), "gpus": gpus, "labels": {"pool": pool}}
        for name, (pool, gpus) in NODES.items()
    ]
    where = {"nodes": nodes} if on_nodes else {"inventory": {name: {"count": STOCK[name]} for name in names}}
    flavors = [{"name": name, **FLAVORS[name]} for name in names]
    return Queues.model_validate({"queues": queues, "flavors": flavors, **where})


def _type_of(pool: str) -> str:
    return "H100" if pool == "far" else "A100"


requests = st.builds(
    lambda shape, number, kind, **more: ask(shape[0], f"u{number}", members=shape[1], gpu_type=kind, **more),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]),
    st.integers(0, 6),
    st.sampled_from(["A100", "A100", "H100", None]),
    queue=st.sampled_from(["research", "nightly"]),
    spot=st.sampled_from(["no", "allowed", "only"]),
    min_gpu_memory_mb=st.sampled_from([None, None, 60]),
)


class Flavored(RuleBasedStateMachine):
    """``holders`` are leases by uid: its id, what was asked, the flavor and the nodes that were given."""

    @initialize(on_nodes=st.booleans())
    def open(self, on_nodes: bool) -> None:
        self.clock = Clock()
        self.folder = tempfile.TemporaryDirectory()
        self.on_nodes = on_nodes
        self.holders: dict[str, tuple[str, LeaseRequest, str, tuple[str, ...]]] = {}
        self.line: dict[str, LeaseRequest] = {}
        self._open(frozenset(FLAVORS))

    def _open(self, declared: frozenset[str]) -> None:
        self.declared = declared
        queues = rules(declared, self.on_nodes)
        self.ledger = SqliteLedger(Path(self.folder.name) / "ledger.db", queues, clock=self.clock)

    @rule(declared=st.sets(st.sampled_from(sorted(FLAVORS)), min_size=1).map(frozenset))
    def the_file_changes(self, declared: frozenset[str]) -> None:
        self.ledger.close()
        self._open(declared)

    @rule()
    def all_are_declared_again(self) -> None:
        self.the_file_changes(frozenset(FLAVORS))

    @rule(request=requests)
    def ask(self, request: LeaseRequest) -> None:
        self.clock.advance(1)
        answer = self.ledger.request(request)
        if (held := self.holders.get(request.uid)) is not None:
            assert isinstance(answer, Admitted)
            assert (answer.lease, answer.pool, answer.nodes) == (held[0], held[2], held[3])
            return
        fitting = self._fitting(request)
        if isinstance(answer, Admitted):
            assert answer.pool in fitting, f"{answer.pool} has no room, or does not suit"
            if not self.line.keys() - {request.uid}:
                assert answer.pool == fitting[0], "another comes before it"
            assert answer.flavor is not None
            assert answer.flavor.name == answer.pool
            assert len(answer.nodes) == (request.members if self.on_nodes else 0)
            assert all(NODES[name][0] == answer.pool for name in answer.nodes), "outside of its flavor"
            granted = replace(request, cohort="")
            self.holders[request.uid] = (answer.lease, granted, answer.pool, answer.nodes)
            self.line.pop(request.uid, None)
        elif isinstance(answer, Deferred):
            assert self.line.keys() - {request.uid} or not fitting, answer
            self.line[request.uid] = request
        else:
            assert isinstance(answer, Rejected)
            assert not fitting, answer
            self.line.pop(request.uid, None)

    @rule(data=st.data())
    @precondition(lambda self: getattr(self, "holders", None))
    def end(self, data: st.DataObject) -> None:
        self.ledger.release(self.holders.pop(data.draw(st.sampled_from(sorted(self.holders))))[0])

    @rule(data=st.data())
    @precondition(lambda self: getattr(self, "line", None))
    def give_up(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.line)))
        self.ledger.withdraw(uid)
        del self.line[uid]

    @invariant()
    def what_is_held_stays_held(self) -> None:
        if hasattr(self, "holders"):
            kept = {
                one.request.uid: (one.id, one.request, one.pool, one.nodes) for one in self.ledger.snapshot().leases
            }
            assert kept == self.holders

    @invariant()
    def no_node_gives_more_than_it_has(self) -> None:
        if hasattr(self, "holders"):
            assert all(self._used(name) <= gpus for name, (_, gpus) in NODES.items())

    def _used(self, node: str) -> int:
        return sum(nodes.count(node) * one.gpus // one.members for _, one, _, nodes in self.holders.values())

    def _fitting(self, request: LeaseRequest) -> list[str]:
        """Flavors that suit and have room for it, in order."""
        own = QUOTA[request.queue]
        return [
            kind
            for kind in ORDER
            if kind in own and kind in self.declared and self._suits(kind, request) and self._has_room(kind, request)
        ]

    @staticmethod
    def _suits(kind: str, request: LeaseRequest) -> bool:
        flavor = FLAVORS[kind]
        uses = ("allowed", "only") if flavor.get("spot") else ("no", "allowed")
        memory = flavor["memory_mb"] >= (request.min_gpu_memory_mb or 0)
        return request.gpu_type in (None, flavor["gpu_type"]) and memory and request.spot in uses

    def _has_room(self, kind: str, request: LeaseRequest) -> bool:
        held = [(one.queue, one.gpus, self._counts_as(one, pool)) for _, one, pool, _ in self.holders.values()]
        mine = [gpus for queue, gpus, (pool, _) in held if (queue, pool) == (request.queue, kind)]
        exist = [gpus for _, gpus, (_, kinds) in held if kind in kinds]
        if sum(mine) + request.gpus > QUOTA[request.queue][kind] or sum(exist) + request.gpus > STOCK[kind]:
            return False
        each = request.gpus // request.members
        free = [gpus - self._used(name) for name, (pool, gpus) in NODES.items() if pool == kind]
        exist_at_all = sum(STOCK[name] for name in self.declared)
        if self.on_nodes:  # a type without flavors means itself, and so do its nodes
            types = {FLAVORS[name]["gpu_type"] for name in self.declared}
            exist_at_all += sum(gpus for pool, gpus in NODES.values() if _type_of(pool) not in types)
        if sum(gpus for _, gpus, _ in held) + request.gpus > exist_at_all:
            return False
        return not self.on_nodes or sum(gpus // each for gpus in free) >= request.members

    def _counts_as(self, request: LeaseRequest, pool: str) -> tuple[str, set[str]]:
        """The quota that a lease counts against today, and the flavors of which its GPUs may be."""
        if pool in self.declared:
            return pool, {pool}
        wanted = request.gpu_type
        alike = [kind for kind in ORDER if kind in self.declared and FLAVORS[kind]["gpu_type"] == wanted]
        named = [kind for kind in alike if kind in QUOTA[request.queue]]
        return next(iter(named), "*"), set(alike) if wanted is not None else set(self.declared)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.folder.cleanup()


TestFlavored = Flavored.TestCase
TestFlavored.settings = settings(max_examples=25, stateful_step_count=20)
