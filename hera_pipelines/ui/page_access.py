"""Identifies the visitors who may act through the pages, and accepts the forms of these pages alone.

A visitor signs in with a token, or a reverse proxy names the visitor in a header. The
header counts only from a listed address. A form counts only if the browser says that it
comes from this site (``Origin``, ``Sec-Fetch-Site``), and if it repeats the form token,
which is bound to session and visitor and which no other site can read.
Source: OWASP, Cross-Site Request Forgery Prevention Cheat Sheet.

Sessions are kept in this process. A signed cookie, as that of starlette's
`SessionMiddleware`, would need no memory, but a copy of it would stay valid after its
visitor has signed out.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from cachetools import TTLCache
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tiphys.errors import UsageError

FORM_TOKEN = "form_token"  # noqa: S105  the name of a field
MIN_TOKEN_CHARACTERS = 16
SESSION_SECONDS = 12 * 3600.0
_MAX_SESSIONS = 1000
_MAX_IDENTITY_CHARACTERS = 200

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class AllowedHosts:
    """ASGI middleware that refuses requests for other host names (DNS rebinding).

    Starlette's `TrustedHostMiddleware` cuts an IPv6 address at its first colon, and its answer names no remedy.

    The names have no port; ``*`` allows all.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = {name.lower() for name in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and "*" not in self._hosts:
            name = HTTPConnection(scope).headers.get("host", "")
            if re.sub(r":[0-9]*$", "", name).lower() not in self._hosts:
                app = PlainTextResponse(
                    f"these pages do not answer to the name {name[:200]!r}; `tiphys ui --allow-host NAME` allows it\n",
                    400,
                    {"X-Content-Type-Options": "nosniff"},
                )
        await app(scope, receive, send)


class Visitor(NamedTuple):
    """The sender of a request."""

    identity: str = ""
    """Name for records; empty for a visitor who may only read."""
    session: str = ""
    form_token: str = ""
    """Value that each form of this visitor must repeat."""


class PageAccess:
    """Identifies visitors and keeps their sessions.

    Args:
        token: Token with which visitors sign in; empty: only a proxy identifies visitors.
        trusted_proxies: Addresses and networks of proxies that may name visitors.

    Raises:
        UsageError: the token is too short, an address is not valid, or nobody could ever act.
    """

    def __init__(
        self,
        token: str = "",
        trusted_proxies: Sequence[str] = (),
        identity_header: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if token and len(token) < MIN_TOKEN_CHARACTERS:
            raise UsageError(f"the token of the pages has {len(token)} characters; give {MIN_TOKEN_CHARACTERS} or more")
        if not token and not trusted_proxies:
            raise UsageError("actions need a token or the address of a trusted proxy")
        self._token = token.encode()
        self._proxies = [_parse_network(text) for text in trusted_proxies]
        self._header = identity_header
        self._secret = secrets.token_bytes(32)
        self._signed_in: TTLCache[str, bool] = TTLCache(_MAX_SESSIONS, SESSION_SECONDS, timer=monotonic)
        # Cookies are shared by all ports of a host, so each process has a name of its own.
        self._cookie = f"tiphys-{secrets.token_hex(4)}"

    @property
    def takes_token(self) -> bool:
        """Whether visitors can sign in with a token."""
        return bool(self._token)

    def identify(self, request: HTTPConnection) -> Visitor:
        """The visitor that a trusted proxy names, or who has signed in; else one without an identity."""
        session = request.cookies.get(self._cookie, "")
        address = request.client.host if request.client else ""
        if identity := self._read_proxy_identity(request):
            return self._build_visitor(f"{identity} (by proxy {address})", session or secrets.token_urlsafe(24))
        if session in self._signed_in:
            return self._build_visitor(f"holder of the token, from {address}", session)
        return Visitor()

    def sign_in(self, token: str) -> str | None:
        """Begin a session of `SESSION_SECONDS`, or until sign-out; None if ``token`` is wrong."""
        if not self._token or not hmac.compare_digest(token.strip().encode(), self._token):
            return None
        session = secrets.token_urlsafe(24)
        self._signed_in[session] = True
        return session

    def sign_out(self, session: str) -> None:
        """End a session; its cookie is not valid any more."""
        self._signed_in.pop(session, None)

    def is_signed_in(self, visitor: Visitor) -> bool:
        """Whether the visitor has a session that can be ended, and not only the identity of a proxy."""
        return visitor.session in self._signed_in

    def keep_session(self, request: HTTPConnection, response: Response, session: str) -> None:
        """Set the cookie of a session. The browser sends it only with requests that begin on this site."""
        if request.cookies.get(self._cookie) != session:
            schemes = [request.url.scheme]
            if self._is_trusted(request):
                schemes += request.headers.getlist("x-forwarded-proto")
            response.set_cookie(self._cookie, session, secure="https" in schemes, httponly=True, samesite="strict")

    def find_form_fault(self, request: HTTPConnection, visitor: Visitor, form: Mapping[str, str]) -> str:
        """The reason to refuse a form; empty if it comes from a page that this visitor was shown."""
        if fault := find_origin_fault(request):
            return fault
        if not visitor.identity:
            return "nobody is signed in"
        if not hmac.compare_digest(form.get(FORM_TOKEN, "").encode(), visitor.form_token.encode()):
            return "the form is not one of this session; load its page again"
        return ""

    def _read_proxy_identity(self, request: HTTPConnection) -> str:
        values = request.headers.getlist(self._header)
        if len(values) != 1 or not self._is_trusted(request):
            return ""
        identity = values[0].strip()
        return identity if identity.isprintable() and len(identity) <= _MAX_IDENTITY_CHARACTERS else ""

    def _is_trusted(self, request: HTTPConnection) -> bool:
        return request.client is not None and _is_within(request.client.host, self._proxies)

    def _build_visitor(self, identity: str, session: str) -> Visitor:
        proof = hmac.new(self._secret, f"{session}\n{identity}".encode(), hashlib.sha256).hexdigest()
        return Visitor(identity, session, proof)


def find_origin_fault(request: HTTPConnection) -> str:
    """The reason to refuse a form by what the browser says of its origin; empty if it comes from this site."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is None and origin is None:
        return "the browser does not say which site the form comes from"
    if site not in (None, "same-origin"):
        return "the form comes from another site"
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        return (
            f"the form comes from {origin[:100]!r}, and this site is {request.headers.get('host', '')!r}; a proxy must "
            "pass the header Host on"
        )
    return ""


def _parse_network(text: str) -> IpNetwork:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is no address or network of a proxy: {error}; write 10.0.0.7 or 10.0.0.0/24"
        ) from error


def _is_within(address: str, networks: Sequence[IpNetwork]) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None) or parsed
    return any(mapped in network for network in networks)
