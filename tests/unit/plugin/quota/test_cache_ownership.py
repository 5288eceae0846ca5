"""Each ledger owns its cache, and nothing else in the quota folder remembers anything.

| holder                         | what it may keep                              |
|--------------------------------|-----------------------------------------------|
| a ledger                       | `SchedulerCache`: all that states leave       |
| a `Queues` object              | what follows from its rules alone             |
| a module, a function decorator | nothing                                       |
"""

import ast
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiphys_plugin.quota
from support.builders.ledger import ask, queues
from tiphys_plugin.quota.lease import Admitted, Deferred, LedgerState
from tiphys_plugin.quota.ledger.backend import BaseLedger, MemoryLedger
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache

MODULES = sorted(Path(tiphys_plugin.quota.__file__).parent.rglob("*.py"))
IMMUTABLE_CALLS = {
    *("TypeVar", "ParamSpec", "frozenset", "tuple", "timedelta", "attrgetter", "itemgetter", "get_logger"),
    *("Annotated", "TypeAdapter", "RecordCodec", "compile", "ConfigDict", "datetime", "replace"),
}
"""What a module may call for its constants: none of them remembers a ledger."""
MEMOIZERS = {"lru_cache", "cache"}


def find_module_state(tree: ast.Module) -> Iterator[str]:
    """Global statements, memoized functions, and instances or empty containers that a module makes for itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = {name.id for entry in node.decorator_list for name in ast.walk(entry) if isinstance(name, ast.Name)}
            names |= {
                name.attr
                for entry in node.decorator_list
                for name in ast.walk(entry)
                if isinstance(name, ast.Attribute)
            }
            if names & MEMOIZERS:
                yield f"line {node.lineno}: {node.name} remembers its answers"
    for statement in tree.body:
        value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, (ast.Dict, ast.List, ast.Set)) and not list(ast.iter_child_nodes(value)):
            yield f"line {statement.lineno}: an empty container"
        if isinstance(value, ast.List) and not value.elts:
            yield f"line {statement.lineno}: an empty list"
        if isinstance(value, ast.Call):
            name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "?")
            if name not in IMMUTABLE_CALLS and not is_frozen_instance(name):
                yield f"line {statement.lineno}: an instance of {name}"


def is_frozen_instance(name: str) -> bool:
    """Whether ``name`` is a named tuple of the quota folder, such as ``ScoredCapacity``."""
    found = {cls for module in MODULES for cls in named_tuples(module)}
    return name in found


def named_tuples(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases
        ):
            yield node.name


def test_no_module_of_the_quota_folder_keeps_state() -> None:
    state = {path: list(find_module_state(ast.parse(path.read_text()))) for path in MODULES}
    assert len(state) > 5, "they are found"
    assert not {path: names for path, names in state.items() if names}


@pytest.mark.parametrize(
    "source",
    [
        "_cache = SchedulerCache()",
        "_answers: dict[str, int] = {}",
        "_recent = []",
        "def find():\n    global _answers\n    _answers = ()",
        "@lru_cache(maxsize=4)\ndef find(): ...",
        "@functools.cache\ndef find(): ...",
    ],
)
def test_state_of_a_module_is_noticed(source: str) -> None:
    assert list(find_module_state(ast.parse(source)))


EIGHT = queues(research={"A100": 8})


def fill(ledger: BaseLedger, name: str) -> None:
    """Make requests, of which the first is granted, and the others wait."""
    for number in range(20):
        ledger.request(ask(8, f"{name}-{number}"))


def test_ledgers_in_one_process_never_meet() -> None:
    """They have the same queues, and requests of the same steps."""
    first, second = MemoryLedger(EIGHT), MemoryLedger(EIGHT)
    assert isinstance(first.request(ask(8, "u1")), Admitted)
    assert isinstance(second.request(ask(8, "u1")), Admitted), "the lease of another ledger was counted"
    assert isinstance(first.request(ask(1, "u2")), Deferred)
    assert first.cache.find_pending(first.snapshot(), ("u2", "fit")) is not None
    assert second.cache.find_pending(second.snapshot(), ("u2", "fit")) is None
    [lease] = second.snapshot().leases
    first.release(lease.id)
    assert len(first.snapshot().leases) == 1, "a lease of another ledger was found by its id"


def test_ledgers_in_threads_never_meet() -> None:
    ledgers = [MemoryLedger(EIGHT) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        turns = [(ledger, f"{number}-{turn}") for turn in range(4) for number, ledger in enumerate(ledgers)]
        list(pool.map(lambda turn: fill(*turn), turns))
    for number, ledger in enumerate(ledgers):
        state = ledger.snapshot()
        assert (len(state.leases), len(state.pending)) == (1, 79)
        uids = {lease.request.uid for lease in state.leases} | {pending.request.uid for pending in state.pending}
        assert {uid.partition("-")[0] for uid in uids} == {str(number)}
        for pending in state.pending:
            assert ledger.cache.find_pending(state, pending.request.workflow_step) is pending


def test_the_cache_of_a_dropped_ledger_is_freed(tmp_path: Path) -> None:
    def use() -> Iterator[weakref.ref[object]]:
        ledgers: list[BaseLedger] = [MemoryLedger(EIGHT), SqliteLedger(tmp_path / "ledger.db", EIGHT)]
        while ledgers:
            ledger = ledgers.pop()
            fill(ledger, "u")
            derived = ledger.cache.derive(EIGHT, ledger.snapshot())
            yield from map(weakref.ref, (ledger, ledger.cache, derived, ledger.snapshot().leases[0]))

    references = list(use())
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_cache_answers_for_any_state_in_any_order() -> None:
    """As after a conflict: the same request is decided on states that other services have written."""
    ledger = MemoryLedger(EIGHT)
    states = [LedgerState(queues=EIGHT), ledger.snapshot()]
    for number in range(12):
        ledger.request(ask(1 + number % 3, f"u{number}"))
        if number % 4 == 3:
            ledger.release(ledger.snapshot().leases[0].id)
        states.append(ledger.snapshot())
    shared = SchedulerCache()
    for state in (*states, *reversed(states), *states[::3]):
        for number in range(12):
            step = (f"u{number}", "fit")
            assert shared.find_leases(state, step) == [one for one in state.leases if one.request.workflow_step == step]
            assert shared.find_pending(state, step) == SchedulerCache().find_pending(state, step)
        assert isinstance(state.queues, Queues)
        assert shared.sum_held_gpus(state) == SchedulerCache().sum_held_gpus(state)
        held = shared.derive(state.queues, state).capacity.held_in_pool(state.queues.queues[0], "A100")
        assert held == sum(one.request.gpus for one in state.leases)
