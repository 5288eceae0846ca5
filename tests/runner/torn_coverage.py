"""A plugin of pytest: leaves out coverage files that killed processes did not finish; ``-p runner.torn_coverage``.

Tests kill processes at any moment, also while these write their coverage file at exit. Coverage would print a warning
for each such file, which looks like lost data of a test. The plugin prints one line with their number instead.
"""

from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import CoverageData
from coverage.exceptions import CoverageException


def remove_torn_files(data_file: Path) -> int:
    """Delete the files ``<data_file>.*`` that hold no coverage; their number."""
    torn = [path for path in data_file.parent.glob(f"{data_file.name}.*") if not _is_whole(path)]
    for path in torn:
        path.unlink(missing_ok=True)
    return len(torn)


def _is_whole(path: Path) -> bool:
    try:
        data = CoverageData(str(path), read_only=True)
        data.read()
        data.close()
    except CoverageException:
        return False
    return True


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Innermost of its wrappers: pytest-cov combines the files after this."""
    result = yield
    if not hasattr(session.config, "workerinput") and (
        torn := remove_torn_files(session.config.rootpath / ".coverage")
    ):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.write_line(f"\ncoverage of {torn} killed processes is not counted: their files are torn")
    return result
