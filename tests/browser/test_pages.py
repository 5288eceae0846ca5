"""The pages in a real browser: both themes, wide and narrow, by keyboard, without script, and for screen readers.

Chromium enforces the content security policy, so whatever a page loads or runs against it is an error here.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from browser.conftest import PATIENCE_MILLISECONDS
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.hostile_text import write_full_run
from support.builders.lineage import RUN, STEP
from support.fakes.gpu_pages import SINCE, FakeGpus, view_of, waiting
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import start_run

from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.gpu_page import NodeRow, NodesView
from hera_pipelines.ui.run_index import RunIndex
from tiphys.records import Cause
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore

pytestmark = pytest.mark.browser
WIDE, NARROW = 1280, 320
PIPELINE = pipeline_of(
    gated("prepare"),
    gated("probe", depends="prepare", withItems=["a", "b"]),
    gated("fit", depends="prepare && probe"),
    gated("report-" + "x" * 40, depends="fit"),
)
PAGES = (
    "/",
    "/?phase=Failed",
    "/runs/failed",
    "/runs/running",
    f"/runs/{RUN}",
    f"/runs/{RUN}/checkpoints",
    "/runs/running?submission=1",
    f"/runs/{RUN}/logs/{STEP}?attempt=1",
    "/queues",
    "/nodes",
    "/absent",
)


class Site(NamedTuple):
    url: str
    store: DirectoryStore
    submitter: FakeSubmitter


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """The log of every attempt."""
    return [f"step {number}: loss {1 / number:.4f} {'x' * 200}" for number in range(1, 200)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("site")
    store, submitter = DirectoryStore(folder / "store"), FakeSubmitter(folder / "cluster")
    write_full_run(store)
    failed = start_run(store, submitter, PIPELINE, "failed")
    history = History(store, failed.run)
    history.done("prepare")
    history.failed("fit", cause=Cause.USER_ERROR, message="the loss is not a number " + "m" * 300)
    submitter.end(failed.workflow_name)
    History(store, start_run(store, submitter, PIPELINE, "running").run).opened("prepare")
    index = RunIndex(store, submitter, reads_holds=True)
    index.refresh()
    evidence = (("condition GpuMemWatch", "a double bit error", SINCE),)
    nodes = NodesView("namespace ml", (NodeRow("n1", "A100", 8, 4, 3, 1, "r1", "unhealthy", evidence),), ())
    gpus = FakeGpus(view_of(waiting(), waiting("running")), nodes)
    app = build_app(
        store,
        submitter,
        index=index,
        find_logs=lambda *_: [("fit-pod", "pod in ml", lines)],
        gpus=gpus,
    )
    with AppServer(app) as server:
        yield Site(server.url, store, submitter)


IS_HIDDEN = "Object.defineProperty(document, 'hidden', { configurable: true, get: () => %s })"


def hide(page: Any) -> None:
    """Have a page that will be opened take itself for hidden: it exchanges nothing while a test looks."""
    page.add_init_script(IS_HIDDEN % "true")


@pytest.fixture
def open_page(chromium: Any, site: Site) -> Iterator[Callable[..., Any]]:
    contexts, errors = [], []

    def open_at(
        path: str, width: int = WIDE, theme: str = "light", prepare: Callable[[Any], None] = id, **options: Any
    ) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=theme, **options)
        context.set_default_timeout(PATIENCE_MILLISECONDS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        prepare(page)
        page.goto(site.url + path)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not [error for error in errors if "404" not in error and "503" not in error]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("path", PAGES)
def test_a_page_fits_its_window_and_is_accessible(
    open_page: Callable[..., Any], path: str, width: int, theme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = open_page(path, width, theme, prepare=hide)

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page)
    assert not found.response["violations"], found.generate_report()


@pytest.mark.parametrize("path", ["/", "/runs/failed"])
def test_a_row_is_a_card_with_names_in_a_narrow_window(open_page: Callable[..., Any], path: str) -> None:
    cards = open_page(path, NARROW).locator(".cards tbody tr")
    assert cards.count() > 0
    for card in cards.all():
        assert card.bounding_box()["width"] <= NARROW
    label = "getComputedStyle(document.querySelector('.cards td'), '::before').content"
    assert open_page(path, NARROW).evaluate(label) != "none"
    assert open_page(path, WIDE).evaluate(label) == "none"


def test_the_themes_differ(open_page: Callable[..., Any]) -> None:
    colours = {
        theme: open_page("/", theme=theme).evaluate("getComputedStyle(document.body).backgroundColor")
        for theme in ("light", "dark")
    }
    assert colours["light"] == "rgb(255, 255, 255)"
    assert colours["dark"] != colours["light"]


def test_pictures_are_loaded(open_page: Callable[..., Any]) -> None:
    for path, least in ((f"/runs/{RUN}", 2), ("/queues", 1)):
        page = open_page(path, prepare=hide)
        widths = page.eval_on_selector_all("img.picture", "images => images.map(image => image.naturalWidth)")
        assert len(widths) >= least
        assert all(width > 100 for width in widths)


def test_a_page_is_complete_without_script(open_page: Callable[..., Any]) -> None:
    page = open_page("/runs/failed", java_script_enabled=False)
    assert "tiphys resume failed" in page.inner_text(".command")
    assert page.inner_text("h1").startswith("failed")
    page.click(".dag a >> nth=0")
    assert page.url.endswith("#step-prepare")


def test_a_run_is_found_by_keyboard(open_page: Callable[..., Any]) -> None:
    page = open_page("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.focus("input[type=search]")
    page.keyboard.type("fail")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?search=fail*")
    assert page.locator("tbody tr").count() == 1
    page.focus("a.name")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/failed")


def test_the_command_is_copied(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page("/runs/failed", permissions=["clipboard-read", "clipboard-write"])
    page.click("button:has-text('Copy')")
    page.wait_for_selector("button:has-text('Copied')")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == f"tiphys resume failed --store {site.store.url}"


def test_a_page_follows_a_run_until_it_ends(open_page: Callable[..., Any], site: Site) -> None:
    started = start_run(site.store, site.submitter, PIPELINE, "followed")
    page = open_page("/runs/followed")
    assert page.inner_text(".badge") == "running"

    History(site.store, "followed").failed("prepare", message="the node went away")
    page.wait_for_selector("text=the node went away")
    site.submitter.end(started.workflow_name)
    page.wait_for_selector(".badge.failed")
    page.wait_for_function("!document.getElementById('main').dataset.follow")


def test_a_page_says_that_the_store_is_slow_until_it_is_not(open_page: Callable[..., Any], site: Site) -> None:
    start_run(site.store, site.submitter, PIPELINE, "slow")
    page = open_page("/runs/slow")
    page.route("**/runs/slow", lambda route: route.fulfill(status=503))
    page.wait_for_selector("header:has-text('slow to answer')")
    page.unroute("**/runs/slow")
    page.wait_for_selector("header:not(:has-text('slow to answer'))")


def test_a_page_says_what_the_server_answers_where_the_store_is_not_slow(
    open_page: Callable[..., Any], site: Site
) -> None:
    start_run(site.store, site.submitter, PIPELINE, "removed")
    page = open_page("/runs/removed")
    page.route("**/runs/removed", lambda route: route.fulfill(status=404))
    page.wait_for_selector("header:has-text('answers 404 Not Found: this page may be old')")
    assert "slow to answer" not in page.inner_text("header")


def test_a_hidden_page_asks_for_nothing(open_page: Callable[..., Any], site: Site) -> None:
    start_run(site.store, site.submitter, PIPELINE, "hidden")
    page = open_page("/runs/hidden", prepare=hide)
    History(site.store, "hidden").failed("prepare", message="the node went away")
    page.wait_for_timeout(8_000)  # it would ask every three seconds
    assert "the node went away" not in page.inner_text("main")
    page.evaluate(IS_HIDDEN % "false")
    page.wait_for_selector("text=the node went away")


def test_text_that_is_typed_while_a_page_is_loaded_again_stays(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page("/")
    asked: list[Any] = []

    def hold(route: Any) -> None:
        asked.append(route)

    page.route(f"{site.url}/", hold)
    while not asked:
        page.wait_for_timeout(100)
    page.focus("input[type=search]")
    page.keyboard.type("fail")
    answer = asked[0].fetch()
    asked[0].fulfill(response=answer, body=answer.text().replace("</h1>", " of another hour</h1>"))
    page.wait_for_timeout(1_000)  # it would take the new page at once
    assert page.input_value("input[type=search]") == "fail"


def test_queues_are_reached_by_keyboard_from_every_page(open_page: Callable[..., Any]) -> None:
    page = open_page("/runs/failed")
    page.focus("nav.places a:has-text('Queues')")
    page.keyboard.press("Enter")
    page.wait_for_url("**/queues")
    page.click("a:has-text('spare')")
    page.wait_for_url("**/queues?queue=spare")
    assert "run-7" in page.inner_text("main")
    assert "Nothing waits." in page.inner_text("main")


def test_a_log_begins_at_its_end_and_stays_where_it_is_read(
    open_page: Callable[..., Any], site: Site, lines: list[str]
) -> None:
    start_run(site.store, site.submitter, PIPELINE, "spoken")
    History(site.store, "spoken").opened("prepare")
    page = open_page("/runs/spoken/logs/prepare")
    at_end = "log => log.scrollTop + log.clientHeight >= log.scrollHeight - 4"
    assert page.eval_on_selector("pre.log", at_end)

    lines.append("the newest line")
    page.wait_for_selector("text=the newest line")
    assert page.eval_on_selector("pre.log", at_end)

    page.focus("pre.log")
    page.eval_on_selector("pre.log", "log => { log.scrollTop = 40; }")
    lines.append("and another")
    page.wait_for_selector("text=and another")
    assert page.eval_on_selector("pre.log", "log => log.scrollTop") == 40
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Output of fit-pod"
