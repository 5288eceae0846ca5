"""finalize leaves a page for Argo's UI: why each attempt ended, and the command that goes on.

A repeated call leaves the first page, text of programs cannot become markup, and a store that refuses the page does
not keep a workflow from its end.
"""

from html.parser import HTMLParser

import pytest
from support.fakes.memory_store import MemoryStore
from support.stories.plugin import Flow, fit, gpus, phase, said, world

from tiphys.protocol.operations import REPORT_ARTIFACT

KEY = "control/runs/digits-abc12/reports/000000001.html"
MARKUP = "<script>alert(1)</script>"


class Cells(HTMLParser):
    """The text of the cells of a page, and the names of its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data.rstrip()


def failed_flow(tmp_path, store=None, message: str = "RuntimeError: nan") -> Flow:
    flow = world(tmp_path, store=store).submit(fit(gpu=gpus(2)))
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Failed", exit_code=1, message=message)
    flow.end_try("fit", 0)
    return flow


def test_page_tells_why_attempts_ended_and_what_to_do(tmp_path):
    flow = failed_flow(tmp_path)
    reply = flow.finalize("Failed")
    assert reply.node.outputs.artifacts[0].name == REPORT_ARTIFACT
    assert reply.node.outputs.artifacts[0].s3.key == KEY
    page = flow.world.store.read(KEY).decode()
    assert '<h1 class="failed">Run digits-abc12, submission 1: Failed</h1>' in page
    assert "<code>tiphys resume digits-abc12</code>" in page
    step, attempt, submission, result, _, count, node = Cells(page.partition("</table>")[0]).cells
    assert (step, attempt, submission, count, node) == ("fit", "1", "1", "2", "-")
    assert result.startswith("user error")


def test_page_of_a_run_that_succeeded_does_not_advise_a_resume(tmp_path):
    flow = world(tmp_path).submit(fit())
    flow.finalize("Succeeded")
    assert "tiphys resume" not in flow.world.store.read(KEY).decode()


def test_first_page_stands(tmp_path):
    flow = failed_flow(tmp_path)
    first = flow.finalize("Failed"), flow.world.store.read(KEY)
    flow.admit("fit", 1)
    assert (flow.finalize("Failed"), flow.world.store.read(KEY)) == first


def test_text_of_a_program_cannot_become_markup(tmp_path):
    flow = failed_flow(tmp_path, message=MARKUP)
    flow.finalize("Failed", f'[{{"displayName": "fit", "message": "{MARKUP}"}}]')
    page = flow.world.store.read(KEY).decode()
    assert "&lt;script&gt;" in page and "script" not in Cells(page).tags


@pytest.mark.parametrize("operation", ["create", "list"])
def test_workflow_ends_without_its_page(tmp_path, operation):
    store = MemoryStore()
    flow = failed_flow(tmp_path, store)
    seen = []

    def refuses(called: str, key: str) -> bool:
        refused = called == operation and (key == KEY or (operation == "list" and bool(sealed())))
        seen.append(refused)
        return refused

    def sealed() -> list[str]:
        return [key for key in store.objects if key.endswith("submissions/000000001.end.json")]

    store.refuses = refuses
    reply = flow.finalize("Failed")
    assert any(seen)
    assert (phase(reply), said(reply)) == ("Succeeded", "Run digits-abc12, submission 1: Failed")
    assert reply.node.outputs is None
    assert KEY not in store.objects


def test_run_with_too_many_attempts_gets_a_short_page(tmp_path, monkeypatch):
    monkeypatch.setattr("tiphys_plugin.operations.run_report._MAX_ATTEMPTS", 0)
    flow = failed_flow(tmp_path)
    flow.finalize("Failed")
    page = flow.world.store.read(KEY).decode()
    assert "The run has 1 attempts, too many for this page" in page and not Cells(page).cells
