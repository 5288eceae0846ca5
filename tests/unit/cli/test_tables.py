"""How a table fits a terminal.

| the table is | it |
|---|---|
| narrow enough | is shown whole |
| too wide | hides columns by rank, until the last column keeps 24 characters |
| still too wide | cuts its widest cells, which then end with … |
| of more columns than fit at all | hides those in the middle, from the right |
| in a pipe, or asked for with -o wide | is shown whole |
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from support.builders.hostile_text import Shown, on_pipe, on_terminal, write_full_run
from support.builders.ledger import lease, ledger_status, waiting
from support.builders.lineage import RUN
from support.servers.kube_server import serving
from support.stories.kubeconfig_folder import QUEUES, Desk
from tiphys_plugin.quota.lease import LedgerState

from hera_pipelines.cli import main
from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.tables import fit_columns, fit_table
from tiphys.kube.resources import GPU_LEDGERS
from tiphys.store import DirectoryStore

WIDTHS = (80, 120, 200)
RUNS = ("RUN", "PIPELINE", "PHASE", "STEPS", "SUBMISSIONS", "LAST ACTIVITY", "REASON")
HIDE = ("SUBMISSIONS", "PIPELINE", "LAST ACTIVITY")
REASON = "submission 2 failed: report failed in attempt 1 by user error: the program exited with 1"
ROWS = [
    ("digits-7xk2p", "digits", "Succeeded", "3/3", "1", "2026-05-04 10:12:13", ""),
    ("a-sweep-over-many-rates-1", "sweep", "Failed", "12/40", "2", "2026-05-04 11:00:00", REASON),
]
SHOWN_AT = {
    80: """\
RUN                        PHASE      STEPS  REASON                            …
digits-7xk2p               Succeeded  3/3
a-sweep-over-many-rates-1  Failed     12/40  submission 2 failed: report fai…
""",
    120: """\
RUN                        PIPELINE  PHASE      STEPS  SUBMISSIONS  LAST ACTIVITY        REASON
digits-7xk2p               digits    Succeeded  3/3    1            2026-05-04 10:12:13
a-sweep-over-many-rates-1  sweep     Failed     12/40  2            2026-05-04 11:00:00  submission 2 failed: report fa…
""",
    200: """\
RUN                         PIPELINE   PHASE       STEPS   SUBMISSIONS   LAST ACTIVITY         REASON
digits-7xk2p                digits     Succeeded   3/3     1             2026-05-04 10:12:13
a-sweep-over-many-rates-1   sweep      Failed      12/40   2             2026-05-04 11:00:00   """
    + REASON
    + "\n",
}


def rendered(width: int | None, *, wraps: bool = False) -> str:
    rows = [[Text(cell) for cell in row] for row in ROWS]
    lines = fit_table(Console(), RUNS, rows, width, hide=HIDE, wraps=wraps).lines
    return "".join(f"{line.plain}\n" for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_at_the_widths_of_terminals(width: int) -> None:
    assert rendered(width) == SHOWN_AT[width]


def test_a_sentence_that_is_wrapped_keeps_its_words() -> None:
    assert rendered(80, wraps=True).splitlines()[2:] == [
        "a-sweep-over-many-rates-1  Failed     12/40  submission 2 failed: report",
        "                                             failed in attempt 1 by user",
        "                                             error: the program exited with 1",
    ]


def test_a_table_without_a_terminal_is_whole() -> None:
    assert rendered(None) == SHOWN_AT[200]


widths = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@given(widths, st.integers(40, 300), st.data())
def test_every_table_fits(natural: list[int], width: int, data: st.DataObject) -> None:
    middle = range(1, max(1, len(natural) - 1))
    hide = data.draw(st.lists(st.sampled_from(middle), unique=True)) if middle else []
    layout = fit_columns(natural, width, hide)
    marked = len(layout.shown) < len(natural)
    assert sum(layout.widths) + layout.gap * (len(layout.widths) - 1 + marked) + marked <= width
    assert {layout.shown[0], layout.shown[-1]} == {0, len(natural) - 1}
    assert min(layout.widths) >= 1
    assert all(shown <= natural[column] for column, shown in zip(layout.shown, layout.widths, strict=True))


# Every table of a command, on a terminal.

READS = (
    ["runs"],
    ["get", RUN],
    ["plan", RUN],
    ["report", RUN],
    ["verify", RUN, "--deep"],
    ["gc", RUN, "--dry-run"],
    ["checkpoint", "list", RUN],
    ["checkpoint", "show", RUN, "1-10"],
    ["doctor", "store"],
    ["janitor", "store", "--dry-run"],
)
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("ARGO_SERVER", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TIPHYS_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TERM", "xterm-256color")
    return tmp_path


@pytest.fixture
def store(folder: Path) -> None:
    write_full_run(DirectoryStore(folder / "store"))


def assert_legible(call: Callable[[], int], width: int, monkeypatch: pytest.MonkeyPatch) -> Shown:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = on_terminal(call)
    lines = CODES.sub("", shown.out).splitlines()
    assert lines or shown.err
    too_long = [line for line in lines if cell_len(line) > width]
    assert not too_long
    titles = [line for line in lines if line.endswith(" …") and line.isupper()]
    assert bool(titles) == ("-o wide shows all columns" in shown.err)
    return shown


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("arguments", READS, ids=" ".join)
def test_every_table_of_a_store_fits(
    arguments: list[str], width: int, store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_legible(lambda: main(arguments), width, monkeypatch)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_table_of_a_ledger_fits(
    width: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        desk = Desk(server, folder, capsys)
        desk.queues("apply", text=QUEUES)
        state = LedgerState((lease(4, uid="u1", run="r" * 50),), (waiting(8, 1, uid="u2"),))
        desk.api.patch(GPU_LEDGERS, "ml", "default", {"status": ledger_status(state)}, subresource="status")
        for words in (["queues", "show"], ["nodes"], ["why", "run-u2"]):
            assert_legible(lambda words=words: main([*words, "--kubeconfig", "kubeconfig"]), width, monkeypatch)


def test_wide_is_the_table_of_a_pipe(store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wide, piped = on_terminal(lambda: main(["runs", "-o", "wide"])), on_pipe(lambda: main(["runs"]))
    assert CODES.sub("", wide.out).replace("\r", "") == piped.out
    assert "SUBMISSIONS" in piped.out


def test_colour_is_for_terminals_that_want_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = lambda: Screen().table(("A",), [(Text("bad", style="red"),)])  # noqa: E731
    assert "\x1b[31mbad" in on_terminal(call).out
    assert "\x1b" not in on_pipe(call).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in on_terminal(call).out
