"""Actions on the page of a run: who may act, what is shown first, and that two tabs have one effect.

| request                                              | effect                         |
|------------------------------------------------------|--------------------------------|
| no actions given                                     | pages only read                |
| form of a signed-in visitor, from a page of the site | the action, once; an event says who |
| without, or with another token                       | none, 403                      |
| from another site, or with another form token        | none, 403                      |
| identity from a listed proxy                         | the action                     |
| identity from any other address                      | none                           |
| a plan that is no longer true                        | none, 409                      |
"""

from collections.abc import Callable
from urllib.parse import quote

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.hostile_text import control_characters
from support.fakes.submitter import FakeSubmitter
from support.stories.pages import ControllerActions, Pages, Texts, form_fields
from tiphys_controller import resume_run, start_run

from hera_pipelines.ui.action_routes import ActionRoutes
from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.page_access import SESSION_SECONDS, PageAccess
from tiphys.errors import UsageError
from tiphys.records import Cause, Event
from tiphys.store import Store, list_runs, read_events, read_submissions

TOKEN = "a token of sufficient length"
HEADER = "X-Forwarded-User"
PROXY = "10.0.0.7"
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"), parameters={"lr": "0.1"})
RUN = "digits-1"


@pytest.fixture
def backend(store: Store, submitter: FakeSubmitter) -> ControllerActions:
    return ControllerActions(store, submitter)


Open = Callable[..., Pages]


@pytest.fixture
def open_pages(store: Store, submitter: FakeSubmitter, backend: ControllerActions) -> Open:
    """Opens browsers that share one application."""
    access = PageAccess(TOKEN, [PROXY, "192.168.7.0/24"], HEADER)
    app = build_app(store, submitter, actions=ActionRoutes(store, backend, access, submitter))

    def open_at(address: str = "127.0.0.1", *, signs_in: bool = False) -> Pages:
        pages = Pages(app, address)
        if signs_in:
            assert pages.post("/sign-in", {"token": TOKEN}).status_code == 303
        return pages

    return open_at


@pytest.fixture
def failed(store: Store, submitter: FakeSubmitter) -> str:
    started = start_run(store, submitter, PIPELINE, RUN)
    history = History(store, started.run)
    history.done("prep")
    history.failed("fit", cause=Cause.INFRASTRUCTURE, message="the node went away")
    submitter.end(started.workflow_name)
    return started.run


def requests_of(store: Store, run: str) -> list[Event]:
    return [event for event in read_events(store, run) if event.name.endswith("_requested")]


def test_a_resume_shows_its_plan_and_is_done_when_it_is_confirmed(store: Store, failed: str, open_pages: Open) -> None:
    pages = open_pages(signs_in=True)

    offer = pages.get(f"/runs/{failed}").text
    plan = pages.get(f"/runs/{failed}/resume")

    assert f'<a class="button primary" href="/runs/{failed}/resume">Resume</a>' in offer
    assert "1 of 2 steps would run as submission 2; the others are taken over." in Texts(plan.text).text
    assert "prep taken over done in attempt 1" in Texts(plan.text).text
    assert "fit run never finished" in Texts(plan.text).text
    assert f"tiphys resume {failed} --store {store.url}" in Texts(plan.text).text
    assert len(read_submissions(store, failed)) == 1

    done = pages.post(f"/runs/{failed}/resume", form_fields(plan.text))

    assert (done.status_code, done.headers["Location"]) == (303, f"/runs/{failed}")
    assert len(read_submissions(store, failed)) == 2
    [event] = requests_of(store, failed)
    assert event.name == "run.resume_requested"
    assert event.message == "resume requested on a web page by holder of the token, from 127.0.0.1"
    assert "Stop" in Texts(pages.get(f"/runs/{failed}").text).text


def test_a_resume_pressed_in_two_tabs_has_one_effect(
    store: Store, submitter: FakeSubmitter, failed: str, open_pages: Open
) -> None:
    tabs = [open_pages(signs_in=True), open_pages(PROXY)]
    headers = [{}, {HEADER: "alice@example.org"}]
    forms = [
        form_fields(tab.get(f"/runs/{failed}/resume", **sent).text) for tab, sent in zip(tabs, headers, strict=True)
    ]

    answers = [
        tab.post(f"/runs/{failed}/resume", form, **sent) for tab, form, sent in zip(tabs, forms, headers, strict=True)
    ]

    assert [answer.status_code for answer in answers] == [303, 303]
    assert len(read_submissions(store, failed)) == 2
    assert len(submitter.names()) == 2
    assert [event.data["by"] for event in requests_of(store, failed)] == ["holder of the token, from 127.0.0.1"]


def test_a_plan_that_is_no_longer_true_is_not_carried_out(
    store: Store, submitter: FakeSubmitter, backend: ControllerActions, failed: str, open_pages: Open
) -> None:
    pages = open_pages(signs_in=True)
    form = form_fields(pages.get(f"/runs/{failed}/resume").text)
    submitter.end(resume_run(store, submitter, failed).workflow_name)

    answers = [pages.post(f"/runs/{failed}/{action}", form) for action in ("resume", "stop")]

    assert [answer.status_code for answer in answers] == [409, 409]
    assert "has changed since this plan was shown: submission 2 was made meanwhile" in Texts(answers[0].text).text
    assert backend.requests == []
    assert requests_of(store, failed) == []


def test_a_stop_shows_which_attempts_would_end(
    store: Store, submitter: FakeSubmitter, backend: ControllerActions, open_pages: Open
) -> None:
    run = start_run(store, submitter, PIPELINE, RUN).run
    History(store, run).opened("prep")
    pages = open_pages(signs_in=True)

    plan = pages.get(f"/runs/{run}/stop").text
    assert "prep/1" in Texts(plan).text
    assert submitter.find("default", run).running  # type: ignore[union-attr]

    assert pages.post(f"/runs/{run}/stop", form_fields(plan)).status_code == 303
    assert not submitter.find("default", run).running  # type: ignore[union-attr]
    assert [event.name for event in requests_of(store, run)] == ["run.stop_requested"]
    assert "Resume" in Texts(pages.get(f"/runs/{run}").text).text


def test_a_fork_shows_the_plan_of_its_parameters_and_a_double_click_makes_one(
    store: Store, failed: str, open_pages: Open
) -> None:
    pages = open_pages(signs_in=True)
    plan = pages.get(f"/runs/{failed}/fork?name=warmer&parameter.lr=0.3").text
    assert f"tiphys fork {failed} --run warmer -p lr=0.3" in Texts(plan).text
    form = form_fields(plan)

    answers = [pages.post(f"/runs/{failed}/fork", form) for _ in range(2)]

    assert [answer.headers["Location"] for answer in answers] == ["/runs/warmer"] * 2
    assert set(list_runs(store)) == {failed, "warmer"}
    assert "lr=0.3" in Texts(pages.get("/runs/warmer").text).text
    [event] = requests_of(store, failed)
    assert (event.name, event.data["fork"], event.data["parameters"]) == ("run.fork_requested", "warmer", {"lr": "0.3"})
    other = pages.post(f"/runs/{failed}/fork", form_fields(pages.get(f"/runs/{failed}/fork").text))
    assert len(set(list_runs(store))) == 3
    assert other.headers["Location"] not in ("/runs/warmer", f"/runs/{failed}")


def test_a_visitor_without_sign_in_sees_the_page_and_can_change_nothing(
    store: Store, failed: str, open_pages: Open
) -> None:
    visitor, signed_in = open_pages(), open_pages(signs_in=True)
    form = form_fields(signed_in.get(f"/runs/{failed}/resume").text)

    page = visitor.get(f"/runs/{failed}")
    plan = visitor.get(f"/runs/{failed}/resume")
    answer = visitor.post(f"/runs/{failed}/resume", form)

    assert "Sign in to resume or fork this run" in Texts(page.text).text
    assert (plan.status_code, plan.headers["Location"]) == (303, f"/sign-in?next=/runs/{failed}/resume")
    assert answer.status_code == 403
    assert "Nothing was done: nobody is signed in." in Texts(answer.text).text
    assert len(read_submissions(store, failed)) == 1


@pytest.mark.parametrize("token", ["", "another token of that length", TOKEN[:-1], TOKEN + "x"])
def test_a_wrong_token_signs_no_visitor_in(failed: str, open_pages: Open, token: str) -> None:
    pages = open_pages()
    answer = pages.post("/sign-in", {"token": token})
    assert answer.status_code == 403
    assert "This is not the token." in Texts(answer.text).text
    assert "set-cookie" not in answer.headers
    assert pages.get(f"/runs/{failed}/resume").status_code == 303


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Origin": "https://evil.example"}, "the form comes from"),
        ({"Origin": "http://localhost:9999"}, "the form comes from"),
        ({"Origin": "null", "Sec-Fetch-Site": "same-origin"}, "the form comes from"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site"),
        ({"Sec-Fetch-Site": "same-site"}, "another site"),
        ({"Sec-Fetch-Site": "none"}, "another site"),
    ],
)
def test_a_form_of_another_site_is_refused(
    store: Store, failed: str, open_pages: Open, headers: dict[str, str], words: str
) -> None:
    pages = open_pages(signs_in=True)
    form = form_fields(pages.get(f"/runs/{failed}/resume").text)

    answers = [
        pages.post(f"/runs/{failed}/resume", form, **headers),
        pages.post("/sign-in", {"token": TOKEN}, **headers),
    ]

    assert [answer.status_code for answer in answers] == [403, 403]
    assert words in Texts(answers[0].text).text
    assert len(read_submissions(store, failed)) == 1
    assert requests_of(store, failed) == []


def test_a_form_without_a_word_about_its_site_is_refused(store: Store, failed: str, open_pages: Open) -> None:
    pages = open_pages(signs_in=True)
    form = form_fields(pages.get(f"/runs/{failed}/resume").text)
    assert pages.request("POST", f"/runs/{failed}/resume", form=form).status_code == 403
    assert len(read_submissions(store, failed)) == 1


def test_the_form_of_another_session_is_refused(store: Store, failed: str, open_pages: Open) -> None:
    first, second = open_pages(signs_in=True), open_pages(signs_in=True)
    form = form_fields(first.get(f"/runs/{failed}/resume").text)
    for fields in (form, {**form, "form_token": ""}, {name: value for name, value in form.items() if name == "after"}):
        assert second.post(f"/runs/{failed}/resume", fields).status_code == 403
    assert len(read_submissions(store, failed)) == 1


def test_the_cookie_is_sent_by_no_other_site_and_read_by_no_script(open_pages: Open) -> None:
    cookie = open_pages().post("/sign-in", {"token": TOKEN}).headers["set-cookie"].lower()
    assert "samesite=strict" in cookie
    assert "httponly" in cookie
    assert TOKEN not in cookie


def test_an_old_cookie_or_form_is_refused_after_sign_out(store: Store, failed: str, open_pages: Open) -> None:
    pages = open_pages(signs_in=True)
    form = form_fields(pages.get(f"/runs/{failed}/resume").text)
    page = pages.get(f"/runs/{failed}").text
    assert 'action="/sign-out"' in page
    assert pages.post("/sign-out", {"form_token": "no"}).status_code == 403
    assert pages.post("/sign-out", form_fields(page)).status_code == 303
    assert 'action="/sign-out"' not in pages.get(f"/runs/{failed}").text
    assert pages.post(f"/runs/{failed}/resume", form).status_code == 403
    assert len(read_submissions(store, failed)) == 1


def test_a_visitor_named_by_a_proxy_is_offered_no_sign_out(failed: str, open_pages: Open) -> None:
    pages = open_pages(PROXY)
    page = pages.get(f"/runs/{failed}", **{HEADER: "ada@example.org"}).text
    assert "ada@example.org" in page
    assert "/sign-out" not in page


@pytest.mark.parametrize("address", [PROXY, "192.168.7.200", "::ffff:10.0.0.7"])
def test_a_listed_proxy_names_the_visitor(store: Store, failed: str, open_pages: Open, address: str) -> None:
    pages = open_pages(address)
    sent = {HEADER: "alice@example.org"}
    form = form_fields(pages.get(f"/runs/{failed}/resume", **sent).text)
    assert pages.post(f"/runs/{failed}/resume", form, **sent).status_code == 303
    [event] = requests_of(store, failed)
    assert event.data["by"] == f"alice@example.org (by proxy {address})"


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.8", "192.168.8.1", "10.0.0.70"])
def test_a_name_from_an_unlisted_address_is_not_believed(
    store: Store, failed: str, open_pages: Open, address: str
) -> None:
    proxy, other = open_pages(PROXY), open_pages(address)
    sent = {HEADER: "alice@example.org"}
    form = form_fields(proxy.get(f"/runs/{failed}/resume", **sent).text)
    other.cookies = dict(proxy.cookies)
    for headers in (sent, {**sent, "X-Forwarded-For": PROXY, "X-Real-IP": PROXY, "Forwarded": f"for={PROXY}"}):
        assert other.get(f"/runs/{failed}/resume", **headers).status_code == 303
        assert other.post(f"/runs/{failed}/resume", form, **headers).status_code == 403
    assert len(read_submissions(store, failed)) == 1
    assert requests_of(store, failed) == []


@pytest.mark.parametrize("name", ["", " ", "x" * 201, "tab\there"])
def test_a_proxy_without_a_name_gives_no_right(failed: str, open_pages: Open, name: str) -> None:
    assert open_pages(PROXY).get(f"/runs/{failed}/resume", **{HEADER: name}).status_code == 303


def test_the_form_of_one_visitor_is_not_that_of_another_behind_the_same_proxy(
    store: Store, failed: str, open_pages: Open
) -> None:
    pages = open_pages(PROXY)
    form = form_fields(pages.get(f"/runs/{failed}/resume", **{HEADER: "mallory"}).text)
    assert pages.post(f"/runs/{failed}/resume", form, **{HEADER: "alice"}).status_code == 403
    assert len(read_submissions(store, failed)) == 1


def test_without_a_token_only_the_proxy_names_visitors(store: Store, backend: ControllerActions, failed: str) -> None:
    access = PageAccess("", [PROXY], HEADER)
    app = build_app(store, backend.submitter, actions=ActionRoutes(store, backend, access, backend.submitter))
    assert Pages(app).post("/sign-in", {"token": ""}).status_code == 404
    assert "The proxy before these pages named no visitor" in Texts(Pages(app).get(f"/runs/{failed}").text).text
    assert Pages(app).get(f"/runs/{failed}/resume").status_code == 403
    assert Pages(app, PROXY).get(f"/runs/{failed}/resume", **{HEADER: "alice"}).status_code == 200


def test_a_session_ends(store: Store, backend: ControllerActions, failed: str) -> None:
    now = [0.0]
    access = PageAccess(TOKEN, monotonic=lambda: now[0])
    pages = Pages(build_app(store, backend.submitter, actions=ActionRoutes(store, backend, access, backend.submitter)))
    pages.post("/sign-in", {"token": TOKEN})
    now[0] = SESSION_SECONDS - 1
    assert pages.get(f"/runs/{failed}/resume").status_code == 200
    now[0] = SESSION_SECONDS + 1
    assert pages.get(f"/runs/{failed}/resume").status_code == 303


@pytest.mark.parametrize(
    ("token", "proxies"), [("", []), ("short", []), (TOKEN, ["proxy.example.org"]), (TOKEN, ["10.0.0.7/24"])]
)
def test_settings_that_protect_nothing_are_refused(token: str, proxies: list[str]) -> None:
    with pytest.raises(UsageError):
        PageAccess(token, proxies, HEADER)


def test_an_impossible_action_is_not_offered(
    store: Store, backend: ControllerActions, failed: str, open_pages: Open
) -> None:
    pages = open_pages(signs_in=True)
    form = form_fields(pages.get(f"/runs/{failed}/resume").text)
    backend.obstacle = "it runs on kubernetes:east, which these pages do not ask"

    page, plan = pages.get(f"/runs/{failed}").text, pages.get(f"/runs/{failed}/resume").text

    assert "Nothing can be done with this run from here: it runs on kubernetes:east" in Texts(page).text
    assert '/resume"' not in page
    assert "Resume now" not in plan
    assert pages.post(f"/runs/{failed}/resume", form).status_code == 409
    assert backend.requests == []
    assert requests_of(store, failed) == []


def test_an_action_that_does_not_fit_the_phase_cannot_be_confirmed(failed: str, open_pages: Open) -> None:
    page = open_pages(signs_in=True).get(f"/runs/{failed}/stop").text
    assert "It cannot be done from here: the run is" in Texts(page).text
    assert "Stop now" not in page


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "/sign-in"])
def test_after_signing_in_no_other_site_is_opened(open_pages: Open, target: str) -> None:
    answer = open_pages().post(f"/sign-in?next={target}", {"token": TOKEN})
    assert answer.headers["Location"] == "/"
    assert open_pages().post("/sign-in?next=/runs/a/stop", {"token": TOKEN}).headers["Location"] == "/runs/a/stop"


@pytest.mark.parametrize("form", [{"after": "first"}, {"after": ""}, {"after": "9" * 40}])
def test_a_form_that_no_page_has_is_refused(store: Store, failed: str, open_pages: Open, form: dict[str, str]) -> None:
    pages = open_pages(signs_in=True)
    fields = form_fields(pages.get(f"/runs/{failed}/resume").text)
    assert pages.post(f"/runs/{failed}/resume", {**fields, **form}).status_code == 400
    assert pages.post(f"/runs/{failed}/resume", {**fields, "more": "x" * 70_000}).status_code == 400
    assert pages.post("/runs/absent/resume", fields).status_code in (404, 409)
    assert len(read_submissions(store, failed)) == 1


def test_parameters_made_of_html_stay_text(store: Store, submitter: FakeSubmitter, open_pages: Open) -> None:
    hostile = '"><script>alert(1)</script>\x1b[31m\u202e'
    pipeline = pipeline_of(gated("prep"), parameters={"lr": hostile, "note": "<b>"})
    run = start_run(store, submitter, pipeline, RUN).run
    page = open_pages(signs_in=True).get(f"/runs/{run}/fork?name={quote(hostile)}").text
    assert "<script>alert" not in page
    assert not control_characters(page)
    assert "parameter.lr" not in page, "a value that a field cannot hold is not changed by showing it"
    assert "parameter.note" in page


def test_an_unknown_parameter_is_named(failed: str, open_pages: Open) -> None:
    answer = open_pages(signs_in=True).get(f"/runs/{failed}/fork?parameter.tiphys-run=x")
    assert answer.status_code == 400
    assert "tiphys-run" in Texts(answer.text).text
