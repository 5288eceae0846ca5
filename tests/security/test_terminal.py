"""Nothing that a store, a ledger or a cluster holds can command the terminal of the person who looks at it.

| what holds the text | shown by |
|---|---|
| each text of each record of a run, with a valid seal | every command that reads a store |
| all texts together that still make a readable run | the same commands, on a pipe and on a terminal |
| names of objects in storage | the same commands |
| the GPU ledger, and Workflow objects | `why`, `queues show`, `nodes`, live progress |
| the log of a program, a traceback, the log of the plugin | `logs`, `run`, `--verbose` |
| names in pictures | SVG and HTML |
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
import structlog
import typer
import yaml
from support.builders.hostile_text import (
    HOSTILE,
    MARK,
    NAMES,
    Shown,
    control_characters,
    hostile_variants,
    on_pipe,
    on_terminal,
    write_full_run,
)
from support.builders.ledger import lease, ledger_status, waiting
from support.builders.lineage import RUN
from support.servers.kube_server import serving
from support.stories.kubeconfig_folder import QUEUES, Desk
from tiphys_controller import describe_run
from tiphys_controller.goodput import measure_time_usage
from tiphys_plugin.quota.lease import LedgerState

from hera_pipelines.cli import main, screen
from hera_pipelines.cli.app import COMMANDS
from hera_pipelines.cli.error_messages import report_error
from hera_pipelines.cli.progress.table import ProgressTable, show_live_progress
from hera_pipelines.cli.screen import Screen
from hera_pipelines.compile.output import to_workflow_yaml
from hera_pipelines.draw.lineage_graph import AttemptEnding, CheckpointPosition, Dot, Lane, LineageGraph
from hera_pipelines.draw.lineage_svg import render_lineage_svg
from hera_pipelines.draw.report_html import report_page
from hera_pipelines.local.nodes import WORKFLOW_KIND, NodeChange, NodePhase
from tiphys.errors import IntegrityError, TiphysError
from tiphys.kube.resources import GPU_LEDGERS
from tiphys.lineage.audit.audit import audit_run
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.timeline import read_timeline
from tiphys.lineage.tree import CheckpointStatus, read_lineage_tree
from tiphys.records import utc_now
from tiphys.store import DirectoryStore, Store, list_runs

FORMS = ("table", "json", "yaml")
READS: dict[str, list[list[str]]] = {
    "runs": [["runs", "-o", form] for form in FORMS],
    "runs rm": [["runs", "rm", RUN, "-o", form] for form in FORMS],
    "attach": [["attach", RUN]],
    "logs": [["logs", RUN, "--tail", "5"]],
    "runs diff": [["runs", "diff", RUN, RUN, "-o", form] for form in FORMS],
    "get": [["get", RUN, "-o", form] for form in FORMS],
    "events": [["events", RUN, "-o", form] for form in FORMS],
    "traces": [["traces", RUN, "-o", form] for form in ("json", "yaml")],
    "plan": [["plan", RUN, "-o", form] for form in FORMS],
    "lineage": [["lineage", RUN, "-o", form] for form in (*FORMS, "svg")],
    "report": [["report", RUN, "-o", form] for form in (*FORMS, "html")],
    "verify": [["verify", RUN, "--deep", "-o", form] for form in FORMS],
    "register": [["register", RUN, "--dry-run", "-o", form] for form in FORMS],
    "gc": [["gc", RUN, "--dry-run", "-o", form] for form in FORMS],
    "cache drop": [["cache", "drop", "-o", form] for form in FORMS],
    "sweep": [["sweep", RUN]],
    "resume": [["resume", RUN, "--dry-run", "-o", form] for form in FORMS],
    "fork": [["fork", RUN, "--dry-run", "-o", form] for form in FORMS],
    "stop": [["stop", RUN]],
    "checkpoint list": [["checkpoint", "list", RUN, "-o", form] for form in FORMS],
    "checkpoint show": [["checkpoint", "show", RUN, "1-10", "-o", form] for form in FORMS],
    "checkpoint pin": [["checkpoint", "pin", RUN, "1-99", "--name", "mine"]],
    "checkpoint unpin": [["checkpoint", "unpin", RUN, "1-99", "--name", "mine"]],
}
"""Commands that read a store, without its option; those that would write are called so that they do not."""

SHOW_TEXT = {"runs", "get", "events", "plan", "lineage", "checkpoint list", "checkpoint show"}
ON_A_CLUSTER = {
    "why",
    "queues show",
    "queues apply",
    "nodes",
    "janitor",
    "doctor",
    "conformance",
    "recover",
    "triggers",
}
OF_FILES = {
    "adopt",
    "import-kfp",
    "preflight",
    "demo",
    "ui",
    "run",
    "compile",
    "simulate",
}
"""They read files of the person who calls them; live progress and the pages of `ui` have their own tests."""


def test_a_new_command_is_tried_too() -> None:
    commands = {name: source.load(name) for name, source in COMMANDS.items()}
    names = {
        f"{name} {inner}".strip()
        for name, command in commands.items()
        for inner in (*getattr(command, "commands", ()), *(("",) if getattr(command, "callback", None) else ()))
    }
    assert names == {*READS, *ON_A_CLUSTER, *OF_FILES}, "add the new command to READS, or to one of the other tables"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("TIPHYS_STORE", "ARGO_SERVER", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def store(folder: Path) -> DirectoryStore:
    return DirectoryStore(folder / "store")


def tiphys(*arguments: str) -> Callable[[], int]:
    return lambda: main([*arguments, "--store", "store"])


def assert_contained(shown: Shown, arguments: list[str], *, terminal: bool) -> None:
    assert not shown.leaks(terminal=terminal), arguments
    assert "bug in Tiphys" not in shown.err, arguments


def _path(store: DirectoryStore, key: str) -> Path:
    return Path(unquote(urlsplit(store.url).path), key)


def overwrite(store: DirectoryStore, key: str, data: bytes) -> None:
    _path(store, key).write_bytes(data)


def shape(store: Store) -> object:
    """What the commands get as far as showing of the run, without its texts; None if one of them fails."""
    try:
        detail, tree = (
            describe_run(RunHistory.for_display(store, RUN)),
            read_lineage_tree(RunHistory.for_display(store, RUN)),
        )
        audit, events = audit_run(store, RUN, deep=True), read_timeline(RunHistory.for_display(store, RUN))
    except (TiphysError, ValueError):
        return None
    checkpoints = [node.status for step in tree.steps for attempt in step.attempts for node in attempt.checkpoints]
    return [step.name for step in detail.steps], detail.summary.steps_done, checkpoints, audit.damage, len(events)


def test_a_hostile_text_in_a_record_cannot_reach_the_terminal(store: DirectoryStore) -> None:
    records = write_full_run(store)
    # The same field of two records of one kind is shown by the same code: the first of them is tried.
    variants = {
        (type(record), path): (key, data)
        for key, record in reversed(records.items())
        for path, data in hostile_variants(record)
    }
    forms = [READS[name][0] for name in ("get", "events", "lineage", "verify")]
    reached = 0
    for (_, path), (key, data) in variants.items():
        overwrite(store, key, data)
        for arguments in forms:
            shown = on_pipe(tiphys(*arguments))
            assert_contained(shown, [*arguments, key, path], terminal=False)
            reached += MARK in shown.out + shown.err
        overwrite(store, key, records[key].to_bytes())
    assert reached >= 40, "the text has to get as far as the screen, or this shows nothing"


@pytest.fixture(scope="module")
def made_hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every text is hostile that does not keep the run from being read."""
    store = DirectoryStore(tmp_path_factory.mktemp("hostile") / "store")
    records = write_full_run(store)
    sound = shape(store)
    assert sound is not None
    for key, record in records.items():
        kept = json.loads(record.to_bytes())
        for path, _ in hostile_variants(record):
            before = store.read(key)
            # One text more than those that were kept.
            changed = next(data for name, data in hostile_variants(_Document(kept)) if name == path)
            overwrite(store, key, changed)
            if shape(store) == sound:
                kept = json.loads(changed)
            else:
                overwrite(store, key, before)
    for name in NAMES.values():
        store.create(name, b"{}")
    return _path(store, "")


@pytest.fixture
def hostile_store(made_hostile: Path, folder: Path) -> DirectoryStore:
    shutil.copytree(made_hostile, folder / "store")
    return DirectoryStore(folder / "store")


class _Document:
    """A document in the place of a record."""

    def __init__(self, document: object) -> None:
        self._document = document

    def to_bytes(self) -> bytes:
        return json.dumps(self._document).encode()


def test_hostile_texts_cannot_command_a_pipe_or_a_terminal(hostile_store: DirectoryStore) -> None:
    showing = set()
    for name, lines in READS.items():
        for arguments in lines:
            pipe, terminal = on_pipe(tiphys(*arguments)), on_terminal(tiphys(*arguments))
            assert_contained(pipe, arguments, terminal=False)
            assert_contained(terminal, arguments, terminal=True)
            assert pipe.result == terminal.result
            if MARK in pipe.out + pipe.err and MARK in terminal.out + terminal.err:
                showing.add(name)
    assert showing >= SHOW_TEXT


def test_a_document_keeps_each_character_as_an_escape(hostile_store: DirectoryStore) -> None:
    for form, load in (("json", json.loads), ("yaml", yaml.safe_load)):
        shown = on_pipe(tiphys("get", RUN, "-o", form))
        assert shown.out.isascii()
        assert any(HOSTILE in text for text in _texts(load(shown.out)))
    lines = on_pipe(tiphys("events", RUN, "-o", "json")).out.splitlines()
    assert any(HOSTILE in text for line in lines for text in _texts(json.loads(line)))


def _texts(value: object) -> list[str]:
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for item in inner for text in _texts(item)]


def test_every_control_character_stays_visible(folder: Path) -> None:
    shown = on_pipe(lambda: Screen().table(("A", "B"), [("a\x1bb\x9bc\u202ed", "e")]))
    assert shown.out == "A         B\na␛b\ufffdc\ufffdd   e\n"


def test_text_without_control_characters_is_shown_unchanged(folder: Path) -> None:
    text = "größer → 日本語 👩\u200d🔬 a\u00a0b עברית \ue0b0"
    screen_call = lambda: (Screen().write(text), Screen().note(text), Screen().show(text))  # noqa: E731
    for shown in (on_pipe(screen_call), on_terminal(screen_call)):
        assert (shown.out.splitlines(), shown.err.splitlines()) == ([text, text], [text])


def test_half_a_character_is_no_way_around(folder: Path) -> None:
    """Where a locale has no UTF-8, Python writes the surrogate U+DC9B as the byte 9B: a control sequence."""
    shown = on_pipe(lambda: Screen().write("a\udc9b2Jb"))
    assert shown.out == "a\ufffd2Jb\n"


@pytest.fixture
def desk(folder: Path, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    with serving() as server:
        made = Desk(server, folder, capsys)
        made.queues("apply", text=QUEUES)
        yield made


def test_the_ledger_of_a_cluster(desk: Desk) -> None:
    book = ledger_status(LedgerState((lease(4, uid="u1"),), (waiting(8, 1, uid="u2"),)))
    reached = 0
    for path, data in hostile_variants(_Document(json.loads(json.dumps(book)))):
        desk.api.patch(GPU_LEDGERS, "ml", "default", {"status": json.loads(data)}, subresource="status")
        for arguments in (["queues", "show"], ["why", "run-u2"], ["nodes"]):
            call = lambda words=arguments: main([*words, "--kubeconfig", "kubeconfig"])  # noqa: E731
            document = lambda words=arguments: main([*words, "-o", "json", "--kubeconfig", "kubeconfig"])  # noqa: E731
            for shown in (on_terminal(call), on_pipe(document)):
                assert_contained(shown, [*arguments, path], terminal=True)
                reached += MARK in shown.out + shown.err
    assert reached > 20
    book = ledger_status(LedgerState((lease(4, uid="u1", run=HOSTILE, step=HOSTILE, workflow=HOSTILE),), ()))
    desk.api.patch(GPU_LEDGERS, "ml", "default", {"status": book}, subresource="status")
    for arguments in (["doctor", "--cluster", "-n", HOSTILE], ["janitor", str(desk.folder), "--cluster", "--dry-run"]):
        shown = on_terminal(lambda words=arguments: main([*words, "--kubeconfig", "kubeconfig"]))
        assert MARK in shown.out + shown.err
        assert_contained(shown, arguments, terminal=True)


CHANGES = [
    NodeChange(datetime.now(UTC), f"wf.fit({HOSTILE}).run", "fit", kind, "t", phase, HOSTILE, (HOSTILE,))
    for kind in ("Plugin", "Pod", WORKFLOW_KIND)
    for phase in (NodePhase.RUNNING, NodePhase.FAILED)
] + [NodeChange(datetime.now(UTC), "wf", "", WORKFLOW_KIND, "t", NodePhase.RUNNING, HOSTILE)]


def test_live_progress(folder: Path) -> None:
    def follow() -> None:
        progress = ProgressTable([f"other {HOSTILE}", "fit"])
        with screen.guard_streams(), show_live_progress(Screen(), progress, lambda *_: None) as observe:
            for change in CHANGES:
                observe(change)
            sys.stderr.write(f"a traceback of a thread {HOSTILE}\n\x1b[38;5;201mred\n")

    for call, terminal in ((on_pipe, False), (on_terminal, True)):
        shown = call(follow)
        assert MARK in shown.err
        assert not shown.leaks(terminal=terminal)


ONE_STEP = """
from hera_pipelines import Pipeline, Step

with Pipeline("loud") as loud:
    Step(name="shout", image="any", command=["python", "-c"], args=[{program!r}])()
"""


def test_the_last_lines_of_a_program_that_failed(folder: Path) -> None:
    program = f"import sys; sys.stdout.buffer.write({HOSTILE.encode()!r}); sys.exit('broken')"
    (folder / "loud.py").write_text(ONE_STEP.format(program=program))
    for call, terminal in ((on_pipe, False), (on_terminal, True)):
        shown = call(tiphys("--verbose", "run", "loud.py", "--speed", "100"))
        assert shown.result == 1
        assert MARK in shown.err
        assert not shown.leaks(terminal=terminal)


def test_the_output_of_a_program(folder: Path) -> None:
    program = f"import sys; sys.stdout.buffer.write({HOSTILE.encode()!r})"
    (folder / "loud.py").write_text(ONE_STEP.format(program=program))
    assert on_pipe(tiphys("run", "loud.py", "--speed", "100")).result == 0
    (run,) = list_runs(DirectoryStore(folder / "store"))
    for call, terminal in ((on_pipe, False), (on_terminal, True)):
        shown = call(tiphys("logs", run))
        assert shown.result == 0
        assert MARK in shown.out
        assert not shown.leaks(terminal=terminal)


def test_errors_with_their_traceback_and_the_log(folder: Path) -> None:
    def fail() -> int:
        try:
            raise IntegrityError(HOSTILE)
        except IntegrityError as error:
            return report_error(error, Screen(verbose=True))

    for call, terminal in ((on_pipe, False), (on_terminal, True)):
        shown = call(fail)
        assert shown.err.count(MARK) >= 2
        assert not shown.leaks(terminal=terminal)


def test_output_that_bypasses_the_screen_is_held_by_the_same_rule(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that prints, warns, logs or echoes as any Python program does is held by the same rule."""
    monkeypatch.setattr("hera_pipelines.cli.store.janitor.janitor", _careless)

    for call in (on_pipe, on_terminal):
        shown = call(lambda: main(["--verbose", "janitor"]))
        assert shown.result == 0
        assert shown.out.count(MARK) == 2 * HOSTILE.count(MARK)
        assert shown.err.count(MARK) == 2 * HOSTILE.count(MARK)
        assert not shown.leaks(terminal=call is on_terminal)


def _careless() -> None:
    print(HOSTILE)  # noqa: T201
    sys.stderr.writelines([HOSTILE, "\n"])
    typer.echo(HOSTILE)
    structlog.get_logger().info("careless", message=HOSTILE.replace(MARK, ""), mark=HOSTILE)


def test_no_command_leads_past_the_guard() -> None:
    """The file of a console is the unguarded stream, because colours have to pass; only the screen writes to it."""
    constant = r"os\.write\((?!\w+(?:\.\w+)?, b\")"
    past = re.compile(rf"\.file\.write|unguarded|__stdout__|__stderr__|{constant}|/dev/tty")
    folder = Path(screen.__file__).parent
    assert [str(path) for path in folder.rglob("*.py") if past.search(path.read_text())] == [screen.__file__]


def test_the_workflow_of_a_pipeline_keeps_its_text() -> None:
    """What compile prints is submitted, so an Arabic mark in a program must not become another character."""
    manifest = {"metadata": {"name": "a"}, "spec": {"source": f"print('\u200f')\n{HOSTILE}\n", "value": "größer\u061c"}}
    text = to_workflow_yaml(manifest)
    assert not control_characters(text)
    assert yaml.safe_load(text) == manifest
    assert "größer" in to_workflow_yaml({"value": "größer"})


BREAKOUT = f"</text></title></style><script>alert(1)</script><!-- \"' onload='x' {HOSTILE}"


def test_a_picture_with_hostile_names(folder: Path) -> None:
    """Any viewer can read the whole picture, and it holds nothing but what Tiphys draws."""
    dots = tuple(
        Dot(CheckpointPosition(1, step), status, BREAKOUT, (BREAKOUT,))
        for step, status in enumerate(CheckpointStatus, start=1)
    )
    lanes = [Lane(number, 1, None, ending, BREAKOUT, dots) for number, ending in enumerate(AttemptEnding, start=1)]
    graphs = [LineageGraph(BREAKOUT, BREAKOUT, tuple(lanes)), LineageGraph(BREAKOUT, BREAKOUT, ())]
    text = render_lineage_svg(BREAKOUT, graphs)
    assert not control_characters(text)
    root = ElementTree.fromstring(text)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} == {
        *("svg", "title", "style", "rect", "text", "tspan", "g", "path", "circle")
    }
    assert not [name for element in root.iter() for name in element.attrib if name.startswith(("on", "href"))]
    assert sum("alert(1)" in (element.text or "") for element in root.iter()) > 10


def test_a_page_with_hostile_names(store: DirectoryStore) -> None:
    write_full_run(store)
    usage = measure_time_usage(RunHistory.for_display(store, RUN), utc_now())
    steps = tuple(step.model_copy(update={"step": BREAKOUT}) for step in usage.steps)
    page = report_page(BREAKOUT, [(BREAKOUT, BREAKOUT)], usage.model_copy(update={"name": BREAKOUT, "steps": steps}))
    assert "alert(1)" in page
    assert not re.search(r"<script|<!--", page)
    assert not control_characters(page)
    ElementTree.fromstring(re.sub(r"<!doctype html>|<meta[^>]*>", "", page))


def test_a_process_on_a_terminal(hostile_store: DirectoryStore) -> None:
    line = [sys.executable, "-m", "hera_pipelines.cli", "get", RUN, "--store", "store"]
    shown = on_terminal(lambda: subprocess.run(line, stdout=sys.stdout, stderr=sys.stderr, check=False).returncode)
    assert (shown.result, MARK in shown.out) == (0, True)
    assert "\x1b[" in shown.out, "it was no terminal to the command"
    assert not shown.leaks(terminal=True)
