import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]
CONFTEST = """
    from hypothesis import settings

    settings.register_profile("fuzz", derandomize=False, print_blob=True)
"""
RARE = """
    from hypothesis import given, strategies as st
    from support.builders.seeds import SEED

    @given(st.integers(0, 2**64))
    def test_law(number):
        with open("drawn", "a") as file:
            file.write(f"{SEED} {number}\\n")
        assert number < 2**65
"""
WRONG = """
    from hypothesis import given, strategies as st

    @given(st.integers(0, 2**64))
    def test_wrong_law(number):
        assert number < 1000
"""


@pytest.fixture
def fuzz(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("CI", "true")  # Hypothesis derandomizes there unless a profile says otherwise
    (pytester.path / "tests").symlink_to(ROOT / "tests")
    pytester.makeconftest(CONFTEST)

    def run(source: str, *options: str) -> pytest.RunResult:
        path = pytester.makepyfile(source)
        return pytester.run(sys.executable, "-m", "runner.fuzz", *options, path.name)

    return run


@pytest.mark.heavy
def test_a_failure_prints_how_to_reproduce_it(fuzz) -> None:
    result = fuzz(WRONG, "--minutes=1")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*@reproduce_failure(*", "reproduce with: make fuzz SEED=*"])
    seed = result.outlines[-1].rpartition("=")[2]
    again = fuzz(WRONG, f"--seed={seed}")
    assert again.ret == 1
    assert again.outlines[-1] == result.outlines[-1]


@pytest.mark.heavy
def test_a_seed_draws_the_same_and_another_seed_something_else(fuzz, pytester: pytest.Pytester) -> None:
    drawn = pytester.path / "drawn"

    def examples(seed: int) -> set[str]:
        drawn.unlink(missing_ok=True)
        assert fuzz(RARE, f"--seed={seed}").ret == 0
        seeds, numbers = zip(*(line.split() for line in drawn.read_text().splitlines()), strict=True)
        assert set(seeds) == {str(seed)}
        return set(numbers)

    assert examples(1) == examples(1)
    assert examples(1) != examples(2)


@pytest.mark.heavy
def test_a_round_that_outlasts_the_budget_skips_the_rest(fuzz) -> None:
    result = fuzz(RARE, "--minutes=0")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["== seed *", "*1 skipped*"])
