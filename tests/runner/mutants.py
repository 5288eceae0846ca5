"""Plants bugs and counts those that the tests notice: `make mutants`.

A mutant is one small change of one module, such as ``<`` in the place of ``<=``, a negated condition, or a key without
one of its parts (`runner.mutations`). It exists in the memory of one pytest process: no file is edited, and no process
that a test starts has it. A sample of all mutants is drawn from a seed. The tests of the module's area that execute the
changed lines decide; a run with coverage shows which these are.
"""

import argparse
import ast
import contextlib
import enum
import gc
import importlib
import json
import multiprocessing
import multiprocessing.process
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest
from coverage import CoverageData
from runner.mutations import Kind, list_changes, plant


class Area(NamedTuple):
    """Modules, and the tests that have to notice a bug in them."""

    folders: tuple[str, ...]
    """Folders, and single modules."""
    tests: tuple[str, ...]

    def measured_folders(self) -> set[Path]:
        """What coverage can be asked for, which takes no single module."""
        return {path if path.is_dir() else path.parent for path in map(Path, self.folders)}

    def modules(self) -> list[Path]:
        paths = map(Path, self.folders)
        return [module for path in paths for module in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def _property_tests(prefix: str) -> tuple[str, ...]:
    return tuple(map(str, sorted(Path("tests/property").glob(f"test_{prefix}*.py"))))


_PLUGIN_TESTS = ("tests/unit/plugin/operations", "tests/unit/plugin/attempts", "tests/unit/plugin/eviction")
_TENANT_TESTS = "tests/unit/plugin/server/test_tenants.py"
_LEDGER_TESTS = (
    "tests/unit/plugin/quota", "tests/security/test_ledger_share.py", "tests/security/test_queue_owners.py",
    "tests/security/test_recovered_leases.py", *_PLUGIN_TESTS,
    *_property_tests("ledger"), *_property_tests("scheduling"),
)  # fmt: skip
_LINEAGE_TESTS = (
    "tests/unit/lineage", "tests/unit/checkpoint/restore", "tests/unit/checkpoint/save", "tests/unit/cli",
    *_PLUGIN_TESTS, *_property_tests("audit"), *_property_tests("checkpoint"), *_property_tests("retention"),
)  # fmt: skip
_STORE_TESTS = (
    "tests/unit/store", "tests/unit/records", "tests/unit/lineage", "tests/unit/controller/plan",
    "tests/unit/controller/kubernetes/test_janitor.py", "tests/unit/checkpoint/ranks/test_step_time.py",
    "tests/contract/test_store.py", "tests/contract/test_s3.py", "tests/contract/test_stored_formats.py",
    "tests/integration/test_probe.py", "tests/security/test_credentials.py", _TENANT_TESTS,
)  # fmt: skip
_QUOTA, _CONTROLLER = "plugin/tiphys_plugin/quota", "controller/tiphys_controller"
AREAS = {
    "ledger": Area(
        (f"{_QUOTA}/ledger", f"{_QUOTA}/scheduler"),
        _LEDGER_TESTS,
    ),
    "lineage": Area(("tiphys/lineage",), _LINEAGE_TESTS),
    "plan": Area(
        ("controller/tiphys_controller/plan", "controller/tiphys_controller/submit"),
        (
            "tests/unit/controller",
            "tests/security/test_records_of_a_tenant.py",
            *_property_tests("prune"),
            *_property_tests("submissions"),
        ),
    ),
    "store": Area(("tiphys/store",), _STORE_TESTS),
    "operations": Area(
        ("plugin/tiphys_plugin/operations", "plugin/tiphys_plugin/attempts"),
        (*_PLUGIN_TESTS, _TENANT_TESTS, "tests/security/test_recovered_leases.py", "tests/unit/plugin/quota/scheduler"),
    ),
    "memories": Area(
        ("plugin/tiphys_plugin/core.py", "plugin/tiphys_plugin/runtime", "plugin/tiphys_plugin/eviction"),
        (*_PLUGIN_TESTS, "tests/unit/plugin/runtime", _TENANT_TESTS, "tests/security/test_call_budgets.py"),
    ),
    "pages": Area(
        ("hera_pipelines/ui",),
        ("tests/unit/ui", "tests/security/test_pages.py", "tests/security/test_terminal.py"),
    ),
    "local": Area(("hera_pipelines/local",), ("tests/unit/local", "tests/integration/test_local_session.py")),
    "triggers": Area(
        ("controller/tiphys_controller/submit/triggers",),
        (
            "tests/unit/controller/submit",
            "tests/property/test_triggers.py",
            "tests/contract/test_controller_http.py",
            "tests/security/test_documents.py",
        ),
    ),
    "tracking": Area(("tiphys/tracking",), ("tests/unit/tracking",)),
    "authoring": Area(
        ("hera_pipelines/authoring",), ("tests/unit/authoring", "tests/unit/compile/test_data_versions.py")
    ),
    "compile": Area(("hera_pipelines/compile",), ("tests/unit/compile", "tests/unit/test_golden.py")),
    "checkpoint": Area(("tiphys/checkpoint",), ("tests/unit/checkpoint", *_property_tests("near_copy"))),
    "launch": Area(("tiphys/launch",), ("tests/unit/launch",)),
    "recording": Area(
        ("tiphys/recording",),
        (
            *("tests/unit/recording", "tests/unit/plugin/attempts", "tests/unit/controller/plan/test_takeover.py"),
            *(f"tests/unit/plugin/operations/test_{name}.py" for name in ("step", "recording", "reuse", "reuse_gate")),
            *_property_tests("recording"),
        ),
    ),
    "kube": Area(
        ("tiphys/kube",), ("tests/unit/kube", "tests/unit/plugin/quota/ledger", "tests/unit/controller/kubernetes")
    ),
    "controller": Area(
        (
            *(f"{_CONTROLLER}/{folder}" for folder in ("alerts", "auto_resume", "kubernetes")),
            f"{_CONTROLLER}/cleanup.py",
        ),
        ("tests/unit/controller", "tests/property/test_auto_resume.py", "tests/security/test_alert_fairness.py"),
    ),
    "agent": Area(
        tuple(f"plugin/tiphys_plugin/{folder}" for folder in ("agent", "nodes", "sidecar")),
        (
            *(f"tests/unit/plugin/{folder}" for folder in ("agent", "nodes", "sidecar")),
            *("tests/contract/test_sidecar.py", "tests/security/test_tokens.py", "tests/security/test_sidecar_door.py"),
            *(*_property_tests("node_health"), *_property_tests("stragglers"), *_property_tests("outages")),
        ),
    ),
}
_PRELOADED = ("boto3", "numpy", "pydantic", "structlog", "uvicorn", "yaml")
"""What the forks need not import again."""
_FORK = multiprocessing.get_context("fork")
_NOT_REPLACED = 100
"""Exit code of a fork that could not load the mutant."""


class Mutant(NamedTuple):
    path: str
    number: int
    kind: str
    line: int
    last_line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} #{self.number}: {self.before} → {self.after}"


def list_mutants(path: Path) -> list[Mutant]:
    """All mutants of the module at ``path``."""
    return [
        Mutant(str(path), number, change.kind, change.line, change.last_line, change.before, change.after)
        for number, change in enumerate(list_changes(ast.parse(path.read_text())))
    ]


def compile_mutant(path: Path, number: int) -> CodeType:
    """The code of the module at ``path`` with one change."""
    tree = ast.parse(path.read_text())
    change = next(islice(list_changes(tree), number, None))
    return compile(plant(change, tree), str(path), "exec")


class Outcome(enum.StrEnum):
    NOTICED = "noticed"
    TIMED_OUT = "never ends"
    """Noticed too."""
    SURVIVED = "not noticed"
    NOT_EXECUTED = "not executed by a test"


class Executions(NamedTuple):
    """What the tests of an area execute, by coverage, and how long each of them takes."""

    data: CoverageData
    seconds: dict[str, float]

    @classmethod
    def measure(cls, area: Area, data_file: Path) -> "Executions":
        durations = _Durations(data_file.with_suffix(".json"))
        options = ["--cov-context=test", "--cov-report=", "--cov-fail-under=0", f"--cov-config={os.devnull}"]
        os.environ["COVERAGE_FILE"] = str(data_file)
        arguments = [*options, *(f"--cov={folder}" for folder in area.measured_folders()), *area.tests]
        if run_tests(arguments, plugins=[durations]) != pytest.ExitCode.OK:
            sys.exit(f"these tests fail without a mutant: pytest {' '.join(area.tests)}")
        data = CoverageData(str(data_file))
        data.read()
        return cls(data, json.loads(durations.path.read_text()))

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Ids of the tests that execute the mutant's lines, the quickest first."""
        by_line = self._contexts(mutant)
        lines = range(mutant.line, mutant.last_line + 1)
        tests = {context.rpartition("|")[0] for line in lines for context in by_line.get(line, ()) if context}
        return sorted(tests, key=lambda test: (self.seconds[test], test))

    def is_executed_at_import(self, mutant: Mutant) -> bool:
        return "" in self._contexts(mutant).get(mutant.line, ())

    def timeout_seconds(self, tests: Sequence[str]) -> float:
        return 30 + 5 * sum(self.seconds[test] for test in tests)

    def _contexts(self, mutant: Mutant) -> dict[int, list[str]]:
        return self.data.contexts_by_lineno(str(Path(mutant.path).resolve()))


class _Durations:
    """A plugin that writes how long each test took."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.seconds))


class _Selection:
    """A plugin that runs some of the collected tests, in the given order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.tests = tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[test] for test in self.tests]


class CollectedTests:
    """A process that collects an area's tests once, and runs some of them in a fork for each mutant."""

    def __init__(self, area: Area) -> None:
        self._connection, self._served = multiprocessing.Pipe()
        self._process = _FORK.Process(target=_pytest, args=(["-x", *area.tests], None, [self]))

    def __enter__(self) -> "CollectedTests":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.send(None)
        self._process.join()

    def run(self, tests: Sequence[str], mutant: Mutant, timeout_seconds: float) -> int | None:
        """Exit code of the tests; None if they take too long."""
        self._connection.send((tests, mutant, timeout_seconds))
        return self._connection.recv()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while request := self._served.recv():
            tests, mutant, timeout_seconds = request
            fork = _FORK.Process(target=self._run, args=(session, tests, mutant))
            fork.start()
            self._served.send(_exit_code(fork, timeout_seconds))
        return True

    def _run(self, session: pytest.Session, tests: Sequence[str], mutant: Mutant) -> None:
        os.setsid()
        if not _replace_functions(mutant):
            os._exit(_NOT_REPLACED)
        _Selection(tests).pytest_collection_modifyitems(session.items)
        run_loop = session.config.pluginmanager.subset_hook_caller("pytest_runtestloop", [self])
        with contextlib.suppress(session.Failed):
            run_loop(session=session)
        os._exit(pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK)


def run_tests(
    arguments: Sequence[str],
    mutant: Mutant | None = None,
    timeout_seconds: float | None = None,
    plugins: Sequence[object] = (),
) -> int | None:
    """Exit code of pytest in a fork of this process, which imports the mutant; None if it takes too long."""
    child = _FORK.Process(target=_pytest, args=(arguments, mutant, plugins))
    child.start()
    return _exit_code(child, timeout_seconds)


def _exit_code(process: multiprocessing.process.BaseProcess, timeout_seconds: float | None) -> int | None:
    """Waits for the process, and ends it and all that it has started."""
    process.join(timeout_seconds)
    exit_code = process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join()
    return exit_code


def _pytest(arguments: Sequence[str], mutant: Mutant | None, plugins: Sequence[object]) -> None:
    os.setsid()
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    if mutant is not None:
        _replace_module(mutant)
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", "-s", "-n0", "--dist=no", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        code = pytest.main([*options, *arguments], plugins=plugins)
    os._exit(code)


def _replace_module(mutant: Mutant) -> None:
    """Load the mutant in the place of its module, past the bytecode that Python has stored."""
    path, original = Path(mutant.path).resolve(), SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        return compile_mutant(path, mutant.number) if Path(loader.path) == path else original(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _replace_functions(mutant: Mutant) -> bool:
    """Give the mutant's code to the functions of its module, which is imported already; whether there was one."""
    path, replaced = Path(mutant.path).resolve(), False
    original = compile(path.read_text(), str(path), "exec")
    try:
        codes = dict(zip(_codes(original), _codes(compile_mutant(path, mutant.number)), strict=True))
        for function in gc.get_objects():
            if isinstance(function, FunctionType) and (code := codes.get(function.__code__, function.__code__)):
                replaced |= code != function.__code__
                function.__code__ = code
    except ValueError:  # another number of lambdas, or of variables of an outer function
        return False
    return replaced


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def try_mutant(mutant: Mutant, area: Area, executions: Executions, collected: CollectedTests) -> Outcome:
    """What the tests say of the mutant."""
    tests, at_import = executions.tests_of(mutant), executions.is_executed_at_import(mutant)
    if at_import and not tests:
        tests = sorted(executions.seconds, key=executions.seconds.__getitem__)
    if not tests:
        return Outcome.NOT_EXECUTED
    timeout = executions.timeout_seconds(tests)
    exit_code = _NOT_REPLACED if at_import else collected.run(tests, mutant, timeout)
    if exit_code == _NOT_REPLACED:
        files = sorted({test.partition("::")[0] for test in tests})
        exit_code = run_tests(["-x", *files], mutant, timeout, [_Selection(tests)])
    match exit_code:
        case None:
            return Outcome.TIMED_OUT
        case pytest.ExitCode.OK:
            return Outcome.SURVIVED
        case _:
            return Outcome.NOTICED


def try_area(
    name: str, seconds: float, seed: int, sample: int | None = None, kinds: Collection[str] = tuple(Kind)
) -> None:
    """Try mutants of one area until the sample or the time is spent, and print those that no test noticed."""
    area, counts = AREAS[name], Counter[Outcome]()
    paths = area.modules()
    mutants = [mutant for path in paths for mutant in list_mutants(path) if mutant.kind in kinds]
    random.Random(seed).shuffle(mutants)
    with tempfile.TemporaryDirectory() as folder:
        executions = Executions.measure(area, Path(folder, "coverage"))
        deadline = time.monotonic() + seconds
        with CollectedTests(area) as collected:
            for mutant in mutants[:sample]:
                if time.monotonic() > deadline:
                    break
                counts[outcome := try_mutant(mutant, area, executions, collected)] += 1
                if outcome is not Outcome.NOTICED:
                    _say(f"- {outcome}: {mutant}")
    noticed, tried = counts[Outcome.NOTICED] + counts[Outcome.TIMED_OUT], counts.total()
    share = noticed / max(tried, 1)
    _say(f"{name}: {tried} of {len(mutants)} mutants tried, seed {seed}; {noticed} noticed ({share:.0%})")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--area", choices=AREAS, action="append", help="all areas by default")
    parser.add_argument("--kind", choices=tuple(Kind), action="append", help="all kinds by default")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all areas together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, help="mutants of each area; as many as the time allows by default")
    options = parser.parse_args()
    for module in _PRELOADED:
        importlib.import_module(module)
    areas = options.area or list(AREAS)
    for name in areas:
        try_area(name, options.minutes * 60 / len(areas), options.seed, options.sample, options.kind or tuple(Kind))


if __name__ == "__main__":
    main()
