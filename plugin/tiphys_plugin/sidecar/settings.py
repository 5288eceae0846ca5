"""What the sidecar is told by its environment.

One JSON object per line on stderr, in the words that the service uses; never a token or a body.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from tiphys.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """Tokens are files that are read at each call, because Kubernetes replaces the account's while we run."""

    service: SplitResult
    ca_file: str | None
    """None: the certificate authorities of the system."""
    token_file: Path
    """Written by Argo for this pod."""
    account_token_file: Path
    host: str
    """Empty: all addresses, of both families where there are two."""
    port: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Settings":
        """Read the variables. Raises `UsageError`, which names the one that is missing or wrong."""
        port = environment.get("TIPHYS_SIDECAR_PORT", "7243")
        if not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"TIPHYS_SIDECAR_PORT is {port!r}; expected a number up to 65535")
        account = "/var/run/secrets/kubernetes.io/serviceaccount/token"
        return cls(
            service=_service(environment.get("TIPHYS_SERVICE_URL", "")),
            ca_file=environment.get("TIPHYS_SERVICE_CA_FILE") or None,
            token_file=Path(environment.get("TIPHYS_TOKEN_FILE") or "/var/run/argo/token"),
            account_token_file=Path(environment.get("TIPHYS_ACCOUNT_TOKEN_FILE") or account),
            host=environment.get("TIPHYS_SIDECAR_HOST", ""),
            port=int(port),
        )


def _service(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = None
    if not known or "@" in parts.netloc:
        raise UsageError(
            f"TIPHYS_SERVICE_URL is {url!r}; expected the plugin's service, such as http://tiphys-plugin.tiphys.svc:7243"
        )
    return parts


def log(level: str, event: str, **fields: object) -> None:
    """Write one line."""
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    sys.stderr.write(json.dumps({**fields, "event": event, "log_level": level, "ts": moment}) + "\n")
    sys.stderr.flush()
