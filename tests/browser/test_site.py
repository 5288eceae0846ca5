"""The pages of docs/ as `make docs` builds them: read from a folder and from a web server, in real Chromium."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser.conftest import PATIENCE_MILLISECONDS

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html") if page.name != "404.html")
PHONE, WIDE = 390, 1600
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not PAGES, reason="`make docs` builds the site")]


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module", params=["folder", "web server"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "folder":
        yield SITE.as_uri()
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    opened = chromium.new_page()
    opened.set_default_timeout(PATIENCE_MILLISECONDS)
    yield opened
    opened.close()


def test_a_search_finds_a_section_and_leads_to_it(page: Any, address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{address}/contracts/storage.html")
    page.click("input[name=query]")
    page.keyboard.type("backfill")
    page.click("a.md-search-result__link[href*='queues.html']")
    page.wait_for_url("**/queues.html*")
    assert not [url for url in asked if not url.startswith((address, "data:"))], "nothing is loaded from elsewhere"


@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_no_page_is_wider_than_a_phone_or_a_wide_window(page: Any, width: int) -> None:
    # Before the page is opened: the theme moves its menus for a while after the size has changed.
    page.set_viewport_size({"width": width, "height": 900})
    wider = []
    for name in PAGES:
        page.goto(f"{SITE.as_uri()}/{name}")
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wider.append(name)
    assert not wider


def test_the_text_takes_two_thirds_of_a_wide_window(page: Any, address: str) -> None:
    page.set_viewport_size({"width": WIDE, "height": 900})
    page.goto(f"{address}/architecture.html")
    assert page.evaluate("document.querySelector('article p').getBoundingClientRect().width") > WIDE * 0.64
