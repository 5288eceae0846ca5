"""Listens for Kubernetes, Prometheus and `tiphys doctor`, and for the calls behind the door."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.routing import Route

from tiphys.web import AppServer
from tiphys_controller.http.app import create_app
from tiphys_controller.kubernetes.controller import Controller


class HealthServer(AppServer):
    """Answers between ``__enter__`` and ``__exit__``. ``port`` 0 takes a free one.

    Raises:
        ConflictError: the port is in use.
        UsageError: the host cannot be listened on.
    """

    def __init__(self, controller: Controller, host: str, port: int, calls: Sequence[Route] = ()) -> None:
        super().__init__(create_app(controller.check, controller.metrics.render, calls), host, port)

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0
