"""Routes of the HTTP API: ``POST /v1/alerts``, calls about runs, and ``POST /v1/storage-events``.

The token of the API is the administrator's: it reaches every served tenant. Notifications about objects may have
a token of their own, because it is kept in the settings of storage services.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tiphys.errors import NotFoundError, UsageError
from tiphys.lineage import RunHistory, read_lineage_tree, read_timeline
from tiphys.protocol.json_documents import parse_json
from tiphys.service.yaml_documents import parse_yaml
from tiphys.store import Store
from tiphys_controller.alerts.webhook import AlertInbox, parse_delivery
from tiphys_controller.server.access import AccessControl
from tiphys_controller.submit.idempotency import start_run_once
from tiphys_controller.submit.plan_report import API_VERSION
from tiphys_controller.submit.resume import plan_run, resume_run
from tiphys_controller.submit.submitter import ClusterSubmitter, TenantSubmitter
from tiphys_controller.submit.triggers.notification import (
    MAX_NOTIFICATION_BYTES,
    MAX_NOTIFICATION_VALUES,
    parse_notification,
)
from tiphys_controller.submit.triggers.worker import TriggerWorker

IDEMPOTENCY_KEY_HEADER = "Idempotency-Key"
MAX_YAML_BYTES = 256 << 10
"""Largest YAML body. YAML takes a hundred times the time and the memory of JSON, which may have 2 MiB."""


@dataclass(frozen=True)
class ApiRoutes:
    """The routes of the administrator's token, and their dependencies."""

    inbox: AlertInbox
    stores: Callable[[str], Store]
    submitter: Callable[[], ClusterSubmitter]
    namespaces: tuple[str, ...] | None
    """Namespaces that are served; None for all."""

    def create_routes(self, access: AccessControl) -> list[Route]:
        """Create all routes, behind ``access``."""
        read_handlers = {"plan": self._plan, "events": self._events, "lineage": self._lineage}
        return [
            Route("/v1/alerts", access.guard("alerts", self._alerts), methods=["POST"]),
            Route("/v1/runs", access.guard("start", self._start), methods=["POST"]),
            Route("/v1/runs/{run}/resume", access.guard("resume", self._resume), methods=["POST"]),
            *(
                Route(f"/v1/runs/{{run}}/{name}", access.guard(name, handler), methods=["GET"])
                for name, handler in read_handlers.items()
            ),
        ]

    def _alerts(self, _: Request, body: bytes) -> Response:
        taken = self.inbox.store_delivery(parse_delivery(parse_json(body)))
        return JSONResponse(taken._asdict(), status_code=202)

    def _start(self, request: Request, body: bytes) -> Response:
        key = request.headers.get(IDEMPOTENCY_KEY_HEADER, "")
        if not key:
            raise UsageError(
                f"header {IDEMPOTENCY_KEY_HEADER} is missing: send any text, and repeat it if you repeat the call"
            )
        manifest = _parse_manifest(request, body)
        named = (manifest.get("metadata") or {}).get("namespace", "") if isinstance(manifest, dict) else ""
        namespace = self._find_namespace(request.query_params.get("namespace") or str(named))
        run = request.query_params.get("run")
        started = start_run_once(self.stores(namespace), self._submitter(namespace), manifest, key, run, namespace)
        answer = {"namespace": namespace, **started._asdict()}
        return JSONResponse(answer, status_code=201 if started.created else 200)

    def _resume(self, request: Request, body: bytes) -> Response:
        options = parse_json(body) if body else {}
        if not isinstance(options, dict) or not set(options) <= {"force", "dryRun"}:
            raise UsageError("the body may be a JSON object with force and dryRun, each true or false")
        namespace, run = self._find_namespace(request.query_params.get("namespace", "")), request.path_params["run"]
        key = request.headers.get(IDEMPOTENCY_KEY_HEADER, "")
        force, dry_run = bool(options.get("force")), bool(options.get("dryRun"))
        resumed = resume_run(
            self.stores(namespace), self._submitter(namespace), run, force=force, dry_run=dry_run, key=key
        )
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
        return JSONResponse(plan_run(*self._locate_run(request)).model_dump(mode="json"))

    def _events(self, request: Request, _: bytes) -> Response:
        history = RunHistory.for_display(*self._locate_run(request))
        events = [event.model_dump(mode="json", exclude_none=True) for event in read_timeline(history)]
        return JSONResponse({"apiVersion": API_VERSION, "kind": "EventList", "items": events})

    def _lineage(self, request: Request, _: bytes) -> Response:
        found = read_lineage_tree(RunHistory.for_display(*self._locate_run(request)))
        return JSONResponse({"apiVersion": API_VERSION, "kind": "Lineage", **found.model_dump(mode="json")})

    def _submitter(self, namespace: str) -> TenantSubmitter:
        return TenantSubmitter(self.submitter(), namespace)

    def _locate_run(self, request: Request) -> tuple[Store, str]:
        return self.stores(self._find_namespace(request.query_params.get("namespace", ""))), request.path_params["run"]

    def _find_namespace(self, name: str) -> str:
        tenant = self.inbox.find_tenant({"namespace": name} if name else {})
        if not tenant and name:
            raise NotFoundError(f"namespace {name!r} is not served by this controller; ask its administrator to add it")
        if not tenant:
            raise UsageError("this controller serves several namespaces: name one, as ?namespace=…")
        return tenant


def create_storage_events_route(triggers: TriggerWorker | None, access: AccessControl) -> Route:
    """Create the route of notifications about objects, behind ``access``; without ``triggers`` it answers 404."""

    def answer(_: Request, body: bytes) -> Response:
        if triggers is None:
            raise NotFoundError("triggers are off: the administrator sets triggers.sources of the chart")
        document = parse_json(body, max_values=MAX_NOTIFICATION_VALUES)
        return JSONResponse(triggers.handle_notification(parse_notification(document)))

    guarded = access.guard("storage-events", answer, MAX_NOTIFICATION_BYTES)
    return Route("/v1/storage-events", guarded, methods=["POST"])


class _NoAliasLoader(yaml.SafeLoader):
    """Refuses aliases: a few lines of them can expand to more than memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds an alias (*), which is not supported; write the value out")
        return super().compose_node(parent, index)


def _parse_manifest(request: Request, body: bytes) -> Any:
    if "yaml" not in request.headers.get("content-type", ""):
        manifest = parse_json(body)
    elif len(body) > MAX_YAML_BYTES:
        raise UsageError(f"a YAML body may have {MAX_YAML_BYTES >> 10} KiB; send the Workflow as JSON")
    else:
        manifest = parse_yaml(body, "the body", _NoAliasLoader)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("spec"), dict):
        raise UsageError("the body is no Workflow: send the output of `tiphys compile`, as JSON or application/yaml")
    return manifest
