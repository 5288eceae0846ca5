"""Routes of the HTTP API: ``POST /v1/alerts`` and ``POST /v1/storage-events``.

The token of alerts is the administrator's: it reaches every served tenant. Notifications about objects may have
a token of their own, because it is kept in the settings of storage services.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tiphys.errors import NotFoundError
from tiphys.protocol.json_documents import parse_json
from tiphys_controller.alerts.webhook import AlertInbox, parse_delivery
from tiphys_controller.server.access import AccessControl
from tiphys_controller.submit.triggers.notification import (
    MAX_NOTIFICATION_BYTES,
    MAX_NOTIFICATION_VALUES,
    parse_notification,
)
from tiphys_controller.submit.triggers.worker import TriggerWorker


def create_alerts_route(inbox: AlertInbox, access: AccessControl) -> Route:
    """Create the route of Alertmanager's webhook, behind ``access``."""

    def answer(_: Request, body: bytes) -> Response:
        taken = inbox.store_delivery(parse_delivery(parse_json(body)))
        return JSONResponse(taken._asdict(), status_code=202)

    return Route("/v1/alerts", access.guard("alerts", answer), methods=["POST"])


def create_storage_events_route(triggers: TriggerWorker | None, access: AccessControl) -> Route:
    """Create the route of notifications about objects, behind ``access``; without ``triggers`` it answers 404."""

    def answer(_: Request, body: bytes) -> Response:
        if triggers is None:
            raise NotFoundError("triggers are off: the administrator sets triggers.sources of the chart")
        document = parse_json(body, max_values=MAX_NOTIFICATION_VALUES)
        return JSONResponse(triggers.handle_notification(parse_notification(document)))

    guarded = access.guard("storage-events", answer, MAX_NOTIFICATION_BYTES)
    return Route("/v1/storage-events", guarded, methods=["POST"])
