"""Each kind of change, and what none of them touches."""

import ast
from textwrap import dedent

import pytest
from runner.mutations import Kind, list_changes, plant


def changes(kind: Kind, source: str) -> list[str]:
    """The program after each change of a kind, as text; every one compiles."""
    source = dedent(source).strip()
    planted = []
    for number, change in enumerate(list_changes(ast.parse(source))):
        if change.kind is kind:
            tree = ast.parse(source)
            changed = plant(list(list_changes(tree))[number], tree)
            compile(changed, "sample.py", "exec")
            planted.append(ast.unparse(changed))
    return planted


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("found[run, uid]", ["found[None, uid]", "found[run, None]"]),
        ("found.get((run, uid), 0)", ["found.get((None, uid), 0)", "found.get((run, None), 0)"]),
        ("(run, uid) in found", ["(None, uid) in found", "(run, None) in found"]),
        ("cache_key = (run, 'plan')", ["cache_key = (None, 'plan')"]),
        ("locks.hold(f'{run}/{step}')", ["locks.hold(f'/{step}')", "locks.hold(f'{run}/')"]),
        ("{(run, uid): 1 for run in runs}", ["{(None, uid): 1 for run in runs}", "{(run, None): 1 for run in runs}"]),
        ("def cache_key():\n    return (run, uid)", None),
        ("found: dict[tuple[str, str], int] = dict[tuple[str, str], int]()", []),
        ("Pair[str, int]", []),
        ("text = f'{run}/{step}'", []),
        ("found[1:2, 3]", []),
    ],
)
def test_a_key_lacks_one_part_after_each_change(source: str, expected: list[str] | None) -> None:
    if expected is None:
        expected = [f"def cache_key():\n    return ({parts})" for parts in ("None, uid", "run, None")]
    assert changes(Kind.KEY, source) == expected


def test_writes_are_swapped_where_one_of_them_is_a_call() -> None:
    source = """
        def publish(store):
            store.create(new)
            store.delete(old)
            self.ended = True
            self.count = 1
            _log.info("published")
            tidy(lambda: 1)
    """
    first, second = changes(Kind.ORDER, source)
    assert first.index("delete") < first.index("create") < first.index("ended")
    assert second.index("create") < second.index("ended") < second.index("delete")


def test_calls_of_a_coroutine_and_of_each_branch_are_swapped() -> None:
    source = """
        async def close():
            try:
                await first()
                await second()
            finally:
                third()
                fourth()
    """
    texts = changes(Kind.ORDER, source)
    assert [text.index("second") < text.index("first") for text in texts] == [True, False]
    assert [text.index("fourth") < text.index("third") for text in texts] == [False, True]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("max(sizes)", ["sum(sizes)"]),
        ("max(sizes, default=0)", ["sum(sizes)"]),
        ("max(first, second)", ["sum((first, second))"]),
        ("sum(sizes)", ["max(sizes, default=0)"]),
        ("max(sizes, key=len)", []),
        ("sum(sizes, start)", []),
    ],
)
def test_sum_and_maximum_are_confused(source: str, expected: list[str]) -> None:
    assert changes(Kind.SUM, source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ends[0]", ["ends[-1]"]),
        ("name.partition('.')", ["name.rpartition('.')"]),
        ("name.rsplit('.', 1)", ["name.split('.', 1)"]),
        ("name.split('.')", []),
        ("ends[False]", []),
    ],
)
def test_the_first_and_the_last_of_several_are_confused(source: str, expected: list[str]) -> None:
    assert changes(Kind.END, source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("option or setting", ["setting or option"]),
        ("option or 3", ["3 or option"]),
        ("{**settings, **options}", ["{**options, **settings}"]),
        ("{**settings, 'name': 1}", ["{'name': 1, **settings}"]),
        ("settings | {'name': 1}", ["{'name': 1} | settings"]),
        ("option or ''", []),
        ("option or []", []),
        ("x = 1 if option or setting else 2", []),
        ("not (option or setting)", []),
        ("a == 1 or b", []),
        ("first | second", []),
    ],
)
def test_the_other_of_two_settings_wins(source: str, expected: list[str]) -> None:
    assert changes(Kind.PRECEDENCE, source) == expected
