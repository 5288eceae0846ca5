import sys
from pathlib import Path

import pytest
from runner.mutants import compile_mutant, list_mutants

pytest_plugins = ["pytester"]

MODULE = '''
def newest(numbers: list[int] | None, limit: int = 3) -> int:
    """The newest number, if there are not too many."""
    _log.info("asked", limit=limit + 1)
    if numbers and len(numbers) <= limit:
        return numbers[-1]
    raise ValueError("none")


def unused(number: int) -> int:
    return number * 2
'''
TESTS = """
import pytest
from sample import newest

def test_newest():
    assert newest([1, 2]) == 2

def test_newest_of_an_empty_list():
    with pytest.raises(ValueError):
        newest([])
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "sample.py"
    path.write_text(MODULE)
    return path


def test_mutants_change_the_program_but_no_types_and_no_log_messages(module: Path) -> None:
    assert [(mutant.line, mutant.before, mutant.after) for mutant in list_mutants(module)] == [
        (2, "3", "4"),
        (5, "if numbers and len(numbers) <= limit:", "if not (numbers and len(numbers) <= limit):"),
        (5, "numbers and len(numbers) <= limit", "numbers or len(numbers) <= limit"),
        (5, "len(numbers) <= limit", "len(numbers) < limit"),
        (6, "return numbers[-1]", "return None"),
        (6, "-1", "0"),
        (6, "1", "2"),
        (7, "raise ValueError('none')", "pass"),
        (11, "return number * 2", "return None"),
        (11, "number * 2", "number // 2"),
        (11, "2", "3"),
    ]


def test_a_mutant_has_one_change(module: Path) -> None:
    number = next(mutant.number for mutant in list_mutants(module) if mutant.after == "0")
    planted: dict[str, object] = {}
    exec(compile_mutant(module, number), planted)
    assert planted["unused"](3) == 6  # type: ignore[operator]
    planted["_log"] = type("Log", (), {"info": lambda *_, **__: None})
    assert planted["newest"]([1, 2]) == 1  # type: ignore[operator]


@pytest.mark.heavy
def test_a_run_names_the_mutants_that_no_test_notices(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{pytester.path}")
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    pytester.makepyfile(
        test_sample=TESTS,
        run="""
        from runner import mutants

        mutants.AREAS["sample"] = mutants.Area(("code",), ("test_sample.py",))
        mutants.try_area("sample", 60, seed=1)
        """,
    )
    code = pytester.mkdir("code")
    (code / "sample.py").write_text(MODULE.replace("    _log.info", "    # _log.info"))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{code}")

    result = pytester.run(sys.executable, "run.py")

    assert result.ret == 0
    assert sorted(line.partition(" #")[0] for line in result.outlines[:-1]) == [
        "- not executed by a test: code/sample.py:11",
        "- not executed by a test: code/sample.py:11",
        "- not executed by a test: code/sample.py:11",
        "- not noticed: code/sample.py:2",
        "- not noticed: code/sample.py:5",
    ]
    assert result.outlines[-1] == "sample: 11 of 11 mutants tried, seed 1; 6 noticed (55%)"
    assert (code / "sample.py").read_text().count("numbers[-1]") == 1
