"""Run the service in a thread: for the local engine and for tests. `AppServer` is what every process listens with."""

from tiphys.web import AppServer
from tiphys_plugin.app import create_app
from tiphys_plugin.core import PluginCore

__all__ = ["AppServer", "PluginServer"]


class PluginServer(AppServer):
    """One plugin for everybody on this machine who has the token.

    Raises:
        ConflictError: the port is in use.
        UsageError: the token is empty, or the host cannot be listened on.
    """

    def __init__(self, core: PluginCore, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(create_app(core, token), host, port)
