"""Asks the web application without a server, and reads its pages."""

import re
from collections.abc import Mapping
from html.parser import HTMLParser

import anyio
import httpx
from starlette.applications import Starlette
from tiphys_controller import PlanReport, WorkflowChange, fork_run, resume_run

from hera_pipelines.cli.shared_options import with_parameters
from hera_pipelines.ui.run_actions import ActionRequest, RunAction
from support.fakes.submitter import FakeSubmitter
from tiphys.lineage.run_history import RunHistory
from tiphys.store import Store, Submission, read_submissions


class Texts(HTMLParser):
    """Texts and elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))


class Pages:
    """Asks the application without a server, as one browser: it keeps cookies, and says which site a form is from."""

    def __init__(self, app: Starlette, address: str = "127.0.0.1") -> None:
        self._app = app
        self._address = address
        self.cookies: dict[str, str] = {}

    def get(self, path: str, host: str = "localhost:8321", **headers: str) -> httpx.Response:
        return self.request("GET", path, host, headers)

    def post(self, path: str, form: Mapping[str, str], **headers: str) -> httpx.Response:
        """Send a form as a page of this site does, unless the headers say otherwise; ``_`` stands for ``-``."""
        same_site = {"Origin": "http://localhost:8321", "Sec-Fetch-Site": "same-origin"}
        return self.request("POST", path, headers={**same_site, **headers}, form=form)

    def request(
        self,
        method: str,
        path: str,
        host: str = "localhost:8321",
        headers: Mapping[str, str] | None = None,
        form: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        sent = {"Host": host, **{name.replace("_", "-"): value for name, value in (headers or {}).items()}}
        if self.cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, client=(self._address, 50000))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                answer = await client.request(method, path, headers=sent, data=dict(form) if form is not None else None)
                self.cookies |= dict(client.cookies)
                return answer

        return anyio.run(ask)


def form_fields(page: str) -> dict[str, str]:
    """Names and values of the hidden fields of a page."""
    inputs = [attributes for tag, attributes in Texts(page).elements if tag == "input"]
    return {str(one["name"]): one["value"] or "" for one in inputs if one.get("type") == "hidden"}


class ControllerActions:
    """Carries actions out in this process, by the functions that the commands call."""

    def __init__(self, store: Store, submitter: FakeSubmitter) -> None:
        self.store = store
        self.submitter = submitter
        self.requests: list[ActionRequest] = []
        self.obstacle = ""

    def find_obstacle(self, run: str, last: Submission | None) -> str:
        assert run
        return self.obstacle

    def plan_fork(self, run: str, parameters: Mapping[str, str]) -> PlanReport:
        return fork_run(self.store, self.submitter, run, change=self._build_change(run, parameters), dry_run=True).plan

    def perform(self, request: ActionRequest) -> str:
        self.requests.append(request)
        run, key = request.run, request.key
        if request.action is RunAction.RESUME:
            resume_run(self.store, self.submitter, run, key=key)
        elif request.action is RunAction.STOP:
            self.submitter.end(read_submissions(self.store, run)[-1].claim.workflow_name)
        else:
            change = self._build_change(run, request.parameters)
            forked = fork_run(self.store, self.submitter, run, request.name or None, "default", change=change, key=key)
            assert forked.started is not None
            return forked.started.run
        return run

    def _build_change(self, run: str, parameters: Mapping[str, str]) -> WorkflowChange:
        return WorkflowChange(with_parameters(RunHistory(self.store, run).workflow, parameters), {})
