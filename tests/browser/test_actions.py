"""Actions in a real browser: sign in, look at the plan, confirm it; and forms of other sites, which Chromium sends too.

Another port of the same host is the hardest case: it is the same site, so that the
browser sends the cookie of the session along.
"""

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from browser.conftest import PATIENCE_MILLISECONDS
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.submitter import FakeSubmitter
from support.stories.pages import ControllerActions
from tiphys_controller import start_run

from hera_pipelines.ui.action_routes import ActionRoutes
from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.page_access import PageAccess
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore, list_runs, read_events, read_submissions

pytestmark = pytest.mark.browser
TOKEN = "a token of sufficient length"
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"), parameters={"lr": "0.1"})


class Site(NamedTuple):
    url: str
    store: DirectoryStore
    submitter: FakeSubmitter

    def begin_failed(self, run: str) -> None:
        started = start_run(self.store, self.submitter, PIPELINE, run)
        History(self.store, run).done("prep")
        History(self.store, run).failed("fit", message="the node went away")
        self.submitter.end(started.workflow_name)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    store, submitter = DirectoryStore(tmp_path / "store"), FakeSubmitter(tmp_path / "cluster")
    actions = ActionRoutes(store, ControllerActions(store, submitter), PageAccess(TOKEN), submitter)
    with AppServer(build_app(store, submitter, actions=actions)) as server:
        yield Site(server.url, store, submitter)


@pytest.fixture(params=["light", "dark"])
def context(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One browser, in each theme."""
    context = chromium.new_context(viewport={"width": 320, "height": 800}, color_scheme=request.param)
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    yield context
    context.close()


def sign_in(page: Any, site: Site, run: str) -> None:
    page.goto(f"{site.url}/runs/{run}")
    page.click("text=Sign in to")
    page.fill("input[type=password]", TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{run}")


def check(page: Any, width: int = 320) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.wait_for_load_state("load")  # the text of a page may stand before its style sheet
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page)
    assert not found.response["violations"], found.generate_report()


def test_a_run_is_resumed_and_stopped(context: Any, site: Site) -> None:
    site.begin_failed("digits-1")
    page = context.new_page()
    sign_in(page, site, "digits-1")
    check(page)

    page.click("a.primary:has-text('Resume')")
    page.wait_for_url("**/resume")
    assert "1 of 2 steps would run as submission 2" in page.inner_text("main")
    check(page)
    page.click("button:has-text('Resume now')")
    page.wait_for_url("**/runs/digits-1")
    assert page.inner_text(".badge") == "running"
    assert len(read_submissions(site.store, "digits-1")) == 2

    History(site.store, "digits-1").opened("fit", 2, submission=2)
    page.reload()
    page.click("a.button:has-text('Stop')")
    page.wait_for_url("**/stop")
    assert "fit/2" in page.inner_text("main")
    check(page)
    page.focus("button.primary")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/digits-1")
    assert page.inner_text(".badge") != "running"
    asked = [event.name for event in read_events(site.store, "digits-1") if event.name.endswith("requested")]
    assert asked == ["run.resume_requested", "run.stop_requested"]


def test_a_run_is_forked_with_another_parameter(context: Any, site: Site) -> None:
    site.begin_failed("digits-1")
    page = context.new_page()
    sign_in(page, site, "digits-1")
    page.click("a.button:has-text('Fork')")
    page.fill("label:has-text('Name of the fork') input", "warmer")
    page.fill("label:has-text('lr') input", "0.3")
    page.click("text=Show the plan with these values")
    page.wait_for_url("**/fork?name=warmer*")
    assert "-p lr=0.3" in page.inner_text("main")
    check(page)
    page.click("button:has-text('Fork now')")
    page.wait_for_url("**/runs/warmer")
    assert "lr=0.3" in page.inner_text("main")


def test_a_resume_pressed_in_two_tabs_has_one_effect(context: Any, site: Site) -> None:
    site.begin_failed("digits-1")
    tabs = [context.new_page(), context.new_page()]
    sign_in(tabs[0], site, "digits-1")
    for tab in tabs:
        tab.goto(f"{site.url}/runs/digits-1/resume")
    for tab in tabs:
        tab.click("button:has-text('Resume now')")
        tab.wait_for_url("**/runs/digits-1")
    assert len(read_submissions(site.store, "digits-1")) == 2


def test_a_wrong_token_is_refused(context: Any, site: Site) -> None:
    site.begin_failed("digits-1")
    page = context.new_page()
    page.goto(f"{site.url}/sign-in")
    page.fill("input[type=password]", "not the token at all")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=This is not the token.")
    check(page)
    page.goto(f"{site.url}/runs/digits-1/resume")
    assert urlsplit(page.url).path == "/sign-in"


def create_other_site(target: str, fields: dict[str, str]) -> Starlette:
    """A site whose page has a form that is sent to ``target``."""
    inputs = "".join(f'<input type=hidden name="{name}" value="{escape(value)}">' for name, value in fields.items())

    async def page(_: object) -> Response:
        return HTMLResponse(f'<form method=post action="{target}">{inputs}<button>You have won</button></form>')

    return Starlette(routes=[Route("/", page)])


@pytest.mark.parametrize("name_of", [lambda url: url, lambda url: url.replace("127.0.0.1", "localhost")])
def test_a_form_of_another_site_has_no_effect(context: Any, site: Site, name_of: Callable[[str], str]) -> None:
    site.begin_failed("digits-1")
    page = context.new_page()
    sign_in(page, site, "digits-1")
    page.goto(f"{site.url}/runs/digits-1/resume")
    stolen = {field: page.get_attribute(f"input[name={field}]", "value") for field in ("form_token", "after")}

    with AppServer(create_other_site(f"{site.url}/runs/digits-1/resume", stolen)) as other:
        page.goto(name_of(other.url))
        page.click("button")
        page.wait_for_url(f"{site.url}/**")
        text = page.inner_text("main")

    assert "Nothing was done: the form comes from another site" in text
    assert len(read_submissions(site.store, "digits-1")) == 1
    assert list(list_runs(site.store)) == ["digits-1"]
