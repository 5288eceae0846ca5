from pathlib import Path

import pytest
from runner.torn_coverage import remove_torn_files

pytest_plugins = ["pytester"]

TESTS = """
    import pathlib
    import subprocess
    import sys

    def test_kills_a_process_that_writes_its_coverage():
        subprocess.run([sys.executable, "measured.py"], check=True)
        (whole,) = pathlib.Path().glob(".coverage.*.whole")
        pathlib.Path(".coverage.host.pid1.empty").touch()
        pathlib.Path(".coverage.host.pid2.torn").write_bytes(whole.read_bytes()[:4096])
        pathlib.Path(".coverage.host.pid3.garbled").write_bytes(b"\\0" * 9000)
"""
MEASURED = """
    import coverage

    def answer():
        return 42

    measured = coverage.Coverage(data_suffix="host.pid4.whole", include=["measured.py"])
    measured.start()
    answer()
    measured.stop()
    measured.save()
"""


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_one_line_counts_the_torn_files_and_the_others_are_combined(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    pytester.makepyfile(TESTS, measured=MEASURED)
    result = pytester.runpytest_subprocess("-p", "runner.torn_coverage", "--cov=.", workers)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        ["coverage of 3 killed processes is not counted*", "measured.py * 8 *7 *", "*1 passed*"]
    )
    assert "CoverageWarning" not in result.stdout.str() + result.stderr.str()
    assert list(pytester.path.glob(".coverage*")) == [pytester.path / ".coverage"]


def test_whole_files_stay(pytester: pytest.Pytester) -> None:
    whole = pytester.path / ".coverage.host.pid4.whole"
    pytester.makepyfile(measured=MEASURED)
    assert pytester.runpython(pytester.path / "measured.py").ret == 0
    before = whole.read_bytes()
    assert remove_torn_files(pytester.path / ".coverage") == 0
    assert whole.read_bytes() == before
