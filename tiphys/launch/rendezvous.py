"""Where the members of a gang meet: the host, and whether the rendezvous of an elastic gang there takes connections.

torchrun's rendezvous is a store in the torchrun of one member. Without it no other one can go on, and torchrun itself
may wait for many minutes for a store that no longer answers, or for its own ranks to end. So the launchers of the
others try a connection every few seconds.
"""

import re
import socket
import time
from collections.abc import Callable, Mapping

from tiphys.protocol import environment
from tiphys.records import GangRestartDecision

PORT_VARIABLES, ENDPOINT, SETTINGS = ("MASTER_PORT", "PET_MASTER_PORT"), "PET_RDZV_ENDPOINT", "PET_RDZV_CONF"
HOST_LOST_SECONDS = 10.0
"""How long a host that took connections may take none before it counts as lost."""
_HOST_START_SECONDS = 120.0
"""The same for one that still starts its program again."""
_PAUSE_SECONDS, _CONNECT_SECONDS = 2.0, 3.0
"""Time between two connections, and for one of them."""


class Rendezvous:
    """The host of one gang, as one member sees it. At first it is the first member.

    Args:
        environ: Variables of the member, as compile wrote them.
        number: Number of the member.
        pause_seconds: Shortest time between two looks of `is_host_lost`.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        number: int,
        pause_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environ, self._number, self._clock = environ, number, clock
        self._pause_seconds = max(_PAUSE_SECONDS, pause_seconds)
        self.host = 0
        """The member at which all meet."""
        self._endpoint = environ.get(ENDPOINT, "")
        # At first the host may still have to pull its image, which takes no one knows how long.
        self._patience_seconds = float("inf")
        self._looked_at = self._last_met_at = clock()

    def move(self, decision: GangRestartDecision) -> dict[str, str]:
        """Meet where ``decision`` says; return the variables that tell a program."""
        self.host, self._patience_seconds = decision.host, _HOST_START_SECONDS
        self._looked_at = self._last_met_at = self._clock()
        if decision.port is None:
            return {}
        named = {name: str(decision.port) for name in PORT_VARIABLES if name in self._environ}
        if not (address := self._environ.get(ENDPOINT, "").rpartition(":")[0]):
            return named
        name, dot, domain = address.partition(".")
        # A Job names its pods by their numbers. On one machine all have one address.
        endpoint = f"{re.sub('-0$', f'-{self.host}', name)}{dot}{domain}:{decision.port}"
        self._endpoint = endpoint
        settings = re.sub(r"is_host=\w+", f"is_host={int(self._number == self.host)}", self._environ.get(SETTINGS, ""))
        return {**named, ENDPOINT: endpoint, **({SETTINGS: settings} if settings else {})}

    def misses_host(self) -> bool:
        """Whether another member hosts the rendezvous, which has taken connections, and takes none now."""
        if environment.ELASTIC not in self._environ or self._number == self.host:
            return False
        self._looked_at = self._clock()
        address = find_listener(self._endpoint)
        if not address:
            return self._patience_seconds == HOST_LOST_SECONDS
        # From now on without the name service, whose failure is no loss of the host: a pod keeps its address.
        self._endpoint = address
        self._last_met_at, self._patience_seconds = self._clock(), HOST_LOST_SECONDS
        return False

    def is_host_lost(self) -> bool:
        """Try a connection if one is due; return whether there was none for so long that the host counts as lost."""
        if self._clock() - self._looked_at < self._pause_seconds:
            return False
        self.misses_host()
        return self._looked_at - self._last_met_at >= self._patience_seconds


def find_listener(endpoint: str) -> str:
    """The address and port at which ``endpoint``, a name and a port, takes a connection; empty if it takes none."""
    name, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((name, int(port)), _CONNECT_SECONDS) as connection:
            return "{}:{}".format(*connection.getpeername()[:2])
    except (OSError, ValueError):
        return ""
