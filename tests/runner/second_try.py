"""A plugin of pytest: tests that failed are tried once more, alone, after all others; ``-p runner.second_try``.

A real cluster has moments that no test can foresee. A test that passes at the second try lets the run pass, and both
outcomes are printed under the heading FLAKY.
"""

from collections.abc import Generator

import pytest
from _pytest.runner import runtestprotocol

_RETRIED = "retried"


class SecondTry:
    def __init__(self) -> None:
        self._first: dict[pytest.Item, pytest.TestReport] = {}
        self._second: dict[pytest.Item, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failure = next((report for report in reports if report.failed), None)
        if first := self._first.get(item):
            if not failure and not any(report.when == "call" and report.passed for report in reports):
                first.outcome, failure = "failed", first
                reports = [first]
            self._second[item] = "failed" if failure else "passed"
        elif failure:
            self._first[item], reports = failure, [failure]
            failure.outcome = _RETRIED  # type: ignore[assignment]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        result = yield
        for item in tuple(self._first):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        return result

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return (_RETRIED, "R", "RETRIED") if report.outcome == _RETRIED else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._second:
            terminalreporter.section("FLAKY")
        for item, outcome in self._second.items():
            terminalreporter.section(f"{item.nodeid}: failed, at the second try {outcome}", sep="_")
            terminalreporter.write_line(self._first[item].longreprtext)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SecondTry())
