"""The calls that change or tell something: ``POST /v1/alerts`` and those about runs.

The token stands for the administrator: it reaches every tenant that is served.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tiphys.errors import NotFoundError, UsageError
from tiphys.lineage import timeline, tree
from tiphys.store import Store
from tiphys_controller.alerts.webhook import Inbox, parse
from tiphys_controller.server.access import Door, json_body
from tiphys_controller.submit.idempotency import start_once
from tiphys_controller.submit.plan_report import API_VERSION, plan_run
from tiphys_controller.submit.resume import resume
from tiphys_controller.submit.submitter import Submitter

KEY_HEADER = "Idempotency-Key"


@dataclass(frozen=True)
class Calls:
    """What the calls need."""

    inbox: Inbox
    stores: Callable[[str], Store]
    submitter: Callable[[], Submitter]
    namespaces: tuple[str, ...] | None
    """Those that are served; None for all."""

    def routes(self, door: Door) -> list[Route]:
        """All calls behind ``door``."""
        told = {"plan": self._plan, "events": self._events, "lineage": self._lineage}
        return [
            Route("/v1/alerts", door.guard("alerts", self._alerts), methods=["POST"]),
            Route("/v1/runs", door.guard("start", self._start), methods=["POST"]),
            Route("/v1/runs/{run}/resume", door.guard("resume", self._resume), methods=["POST"]),
            *(
                Route(f"/v1/runs/{{run}}/{name}", door.guard(name, work), methods=["GET"])
                for name, work in told.items()
            ),
        ]

    def _alerts(self, _: Request, body: bytes) -> Response:
        taken = self.inbox.take(parse(json_body(body)))
        return JSONResponse(taken._asdict(), status_code=202)

    def _start(self, request: Request, body: bytes) -> Response:
        key = request.headers.get(KEY_HEADER, "")
        if not key:
            raise UsageError(f"header {KEY_HEADER} is missing: give any text, the same whenever the call is repeated")
        manifest = _manifest(request, body)
        named = (manifest.get("metadata") or {}).get("namespace", "") if isinstance(manifest, dict) else ""
        namespace = self._namespace(request.query_params.get("namespace") or str(named))
        run = request.query_params.get("run")
        started = start_once(self.stores(namespace), self.submitter(), manifest, key, run, namespace)
        answer = {"namespace": namespace, **started._asdict()}
        return JSONResponse(answer, status_code=201 if started.created else 200)

    def _resume(self, request: Request, body: bytes) -> Response:
        asked = json_body(body) if body else {}
        if not isinstance(asked, dict) or not set(asked) <= {"force", "dryRun"}:
            raise UsageError("the body may be a JSON object with force and dryRun, each true or false")
        store, run = self._place(request)
        key = request.headers.get(KEY_HEADER, "")
        force, dry_run = bool(asked.get("force")), bool(asked.get("dryRun"))
        resumed = resume(store, self.submitter(), run, force=force, dry_run=dry_run, key=key)
        answer: dict[str, Any] = {
            "run": resumed.run,
            "submission": resumed.submission,
            "workflow_name": resumed.workflow_name,
            "uid": resumed.uid,
            "created": resumed.created and resumed.submission is not None,
            "plan": resumed.plan.model_dump(mode="json"),
        }
        return JSONResponse(answer, status_code=201 if answer["created"] else 200)

    def _plan(self, request: Request, _: bytes) -> Response:
        return JSONResponse(plan_run(*self._place(request)).model_dump(mode="json"))

    def _events(self, request: Request, _: bytes) -> Response:
        events = [one.model_dump(mode="json", exclude_none=True) for one in timeline(*self._place(request))]
        return JSONResponse({"apiVersion": API_VERSION, "kind": "EventList", "items": events})

    def _lineage(self, request: Request, _: bytes) -> Response:
        found = tree(*self._place(request))
        return JSONResponse({"apiVersion": API_VERSION, "kind": "Lineage", **found.model_dump(mode="json")})

    def _place(self, request: Request) -> tuple[Store, str]:
        return self.stores(self._namespace(request.query_params.get("namespace", ""))), request.path_params["run"]

    def _namespace(self, named: str) -> str:
        tenant = self.inbox.tenant({"namespace": named} if named else {})
        if not tenant and named:
            raise NotFoundError(f"namespace {named!r} is not served here; have the administrator add it")
        if not tenant:
            raise UsageError("several namespaces are served here: say which, as ?namespace=…")
        return tenant


class _PlainLoader(yaml.SafeLoader):
    """Refuses aliases: a few lines of them stand for more than any memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds an alias (*), which is not read here; write it out")
        return super().compose_node(parent, index)


def _manifest(request: Request, body: bytes) -> Any:
    if "yaml" not in request.headers.get("content-type", ""):
        manifest = json_body(body)
    else:
        try:
            manifest = yaml.load(body, _PlainLoader)  # noqa: S506  a SafeLoader
        except (yaml.YAMLError, RecursionError) as error:
            raise UsageError(f"the body is not YAML: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("spec"), dict):
        raise UsageError("the body is no Workflow: send what `tiphys compile` writes, as JSON, or as application/yaml")
    return manifest
