"""Where an argo-server is and how it is asked: by the variables that Argo's own command has, and the same transport
as the API server.

Neither Hera's service nor Argo's SDK is used: their models drop the bodies of plugin templates on the way, and Hera's
calls wait for ever.
"""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from urllib3 import PoolManager, disable_warnings
from urllib3.exceptions import InsecureRequestWarning

from tiphys.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
    TiphysError,
    UsageError,
)
from tiphys.kube.transport import Peer, Transport

URL, TOKEN = "ARGO_SERVER", "ARGO_TOKEN"
_TLS, _UNTRUSTED, _BASE = "ARGO_SECURE", "ARGO_INSECURE_SKIP_VERIFY", "ARGO_BASE_HREF"
_NO_REASON = "no reason given"


class ArgoServer(NamedTuple):
    """An argo-server, and the way to it. ``address`` is its URL."""

    address: str
    transport: Transport


def argo_server(given: str, environ: Mapping[str, str], authorization: Callable[[], str] = lambda: "") -> ArgoServer:
    """The argo-server at ``host:port`` (as Argo's command takes it) or a URL.

    Args:
        given: Where it is.
        environ: ARGO_TOKEN, ARGO_SECURE, ARGO_INSECURE_SKIP_VERIFY and ARGO_BASE_HREF, as Argo's command has them
            (``cmd/argo/commands/client/conn.go``). A scheme and a path in ``given`` go first. ARGO_HTTP1 has no
            meaning here: it is always HTTP/1.1.
        authorization: Credentials where ARGO_TOKEN is not set: those of the kubeconfig.

    Raises:
        UsageError: this is no address.
    """
    address = _address(given, environ)
    if untrusted := environ.get(_UNTRUSTED) == "true":
        disable_warnings(InsecureRequestWarning)  # somebody has asked for it by a name that says as much
    token = environ.get(TOKEN, "").strip()
    # Argo wants the scheme in the variable; a bare token can only be meant as a bearer's.
    token = token if " " in token or not token else f"Bearer {token}"
    pool = PoolManager(maxsize=4, cert_reqs="CERT_NONE" if untrusted else "CERT_REQUIRED")
    return ArgoServer(address, Transport(address, pool, (lambda: token) if token else authorization, _PEER))


def _address(given: str, environ: Mapping[str, str]) -> str:
    scheme = "http" if environ.get(_TLS) == "false" else "https"
    url = given if "://" in given else f"{scheme}://{given}"
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:  # a port that is none
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise UsageError(f"argo-server {given!r}: give host:port, such as argo.example:2746, or a URL; see {URL}")
    base = parts.path.strip("/") or environ.get(_BASE, "").strip("/")
    return f"{parts.scheme}://{parts.netloc}" + (f"/{base}" if base else "")


def _refusal(status: int, body: str, server: str, path: str) -> TiphysError:
    """What a status means; Argo answers as gRPC's gateway does, with a code and a message."""
    code, message = _words(body)
    told = f"argo-server {server} refused: {message}"
    match status:
        case 401:
            return ForbiddenError(
                f"argo-server {server} does not accept these credentials: {message}; set {TOKEN}, for instance by "
                f'`export {TOKEN}="Bearer $(kubectl create token ACCOUNT)"`, or see `argo auth token`'
            )
        case 403:
            return ForbiddenError(f"{told}; let the account of {TOKEN} get, create, watch and patch workflows")
        case 404 if code is None:
            return UsageError(f"argo-server {server} does not serve {path}: {message}; {_PAGE}")
        case 404:
            return NotFoundError(f"argo-server {server} says: {message}")
        case 409:
            return ObjectExistsError(message) if code == _ALREADY_EXISTS else ConflictError(message)
        case 400 | 405 | 413 | 415 | 422:
            secure = f" It speaks TLS: leave {_TLS}=false out, or write https://" if "HTTPS" in message else ""
            return UsageError(f"{told}{secure}")
    if 300 <= status < 400:
        return UsageError(f"argo-server {server} sends {path} elsewhere ({status}): a log-in, or a wrong URL; {_PAGE}")
    return StoreError(f"argo-server {server} answered {status}: {message}")


def _words(body: str) -> tuple[int | None, str]:
    """Code and message, or None and the beginning of whatever it is."""
    try:
        answer = json.loads(body)
        return int(answer["code"]), str(answer.get("message") or _NO_REASON)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, " ".join(body.split())[:300] or _NO_REASON


_ALREADY_EXISTS = 6  # google.golang.org/grpc/codes
_PAGE = f"where it lies behind a path, such as /argo, say so by {_BASE} or in the URL"
_PEER = Peer(
    name="argo-server",
    refusal=_refusal,
    remedy_of_page=_PAGE,
    remedy_of_tls=(
        f"name its certificate authority by SSL_CERT_FILE, or trust whoever answers by {_UNTRUSTED}=true; "
        f"where it speaks no TLS, set {_TLS}=false"
    ),
)
