"""The settings of the sidecar, from environment variables, and its log.

The log is one JSON object per line on stderr, with the field names of the
service's log. It never contains a token or a body. The sidecar has no other
dependencies, so it does not use structlog.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from tiphys.errors import UsageError
from tiphys_plugin.sidecar.outages import OUTAGE_LIMIT_SECONDS, OUTAGE_LIMIT_VARIABLE

_MAX_LIMIT_DIGITS = 9


@dataclass(frozen=True)
class SidecarSettings:
    """Settings of one sidecar. Token files are read at each call, because Kubernetes rotates the account's token."""

    service_url: SplitResult
    ca_file: str | None
    """File of certificate authorities; None for those of the system."""
    ca_pem: str | None
    """Certificate authorities as PEM text, because the pod can have no volume for a file; None for none."""
    token_file: Path
    """Token that Argo writes for this pod, and sends with each call."""
    account_token_file: Path
    """Token of the service account, by which the service knows the namespace."""
    token_audience: str
    """Audience of the short-lived token that is requested with the account's token, and sent in its place; empty: the
    account's token is sent."""
    api_server: tuple[str, int]
    """Host and port of the API server, which issues that token."""
    host: str
    """Address to listen on. Argo's agent is in the same pod, and calls ``localhost``."""
    port: int
    outage_limit_seconds: float = OUTAGE_LIMIT_SECONDS
    """How long a step waits for service, storage, API server or ledger."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "SidecarSettings":
        """Read the environment variables. Raises `UsageError`, which names a missing or wrong one."""
        audience = environment.get("TIPHYS_TOKEN_AUDIENCE", "")
        api_host = environment.get("KUBERNETES_SERVICE_HOST", "")
        if audience and not api_host:
            raise UsageError(
                "TIPHYS_TOKEN_AUDIENCE is set, but not KUBERNETES_SERVICE_HOST, which every pod has; run the sidecar "
                "in a pod, or unset TIPHYS_TOKEN_AUDIENCE"
            )
        account = "/var/run/secrets/kubernetes.io/serviceaccount/token"
        return cls(
            service_url=_parse_service_url(environment.get("TIPHYS_SERVICE_URL", "")),
            ca_file=environment.get("TIPHYS_SERVICE_CA_FILE") or None,
            ca_pem=environment.get("TIPHYS_SERVICE_CA") or None,
            token_file=Path(environment.get("TIPHYS_TOKEN_FILE") or "/var/run/argo/token"),
            account_token_file=Path(environment.get("TIPHYS_ACCOUNT_TOKEN_FILE") or account),
            token_audience=audience,
            api_server=(api_host, _read_port(environment, "KUBERNETES_SERVICE_PORT", "443")),
            host=environment.get("TIPHYS_SIDECAR_HOST") or "127.0.0.1",
            port=_read_port(environment, "TIPHYS_SIDECAR_PORT", "7243"),
            outage_limit_seconds=_read_outage_limit(environment.get(OUTAGE_LIMIT_VARIABLE, "")),
        )


def _read_port(environment: Mapping[str, str], name: str, default: str) -> int:
    port = environment.get(name, default)
    if not (port.isascii() and port.isdecimal() and len(port) <= 5) or int(port) > 65535:
        raise UsageError(f"{name} is {port!r}; expected a number up to 65535")
    return int(port)


def _read_outage_limit(text: str) -> float:
    if not text:
        return OUTAGE_LIMIT_SECONDS
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_LIMIT_DIGITS):
        raise UsageError(f"{OUTAGE_LIMIT_VARIABLE} is {text!r}; expected whole seconds, such as 1800")
    return float(text)


def _parse_service_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or "@" in parts.netloc:
        raise UsageError(
            f"TIPHYS_SERVICE_URL is {url!r}; expected the plugin's service, such as http://tiphys-plugin.tiphys.svc:7243"
        )
    return parts


def log(level: str, event: str, **fields: object) -> None:
    """Write one line of the log; ``event`` is its id."""
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    sys.stderr.write(json.dumps({**fields, "event": event, "log_level": level, "ts": moment}) + "\n")
    sys.stderr.flush()
