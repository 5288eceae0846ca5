"""Decides who may act through the pages, and whether a form was sent by one of the pages.

A visitor is who holds the token, or who a reverse proxy says that it is: the
header with the identity counts only if a listed address sent it. A form is
accepted only from a page of this application: the browser says where it comes
from (``Origin``, ``Sec-Fetch-Site``), and it repeats a value that is bound to the
session of the visitor, which no other site can read. Source: OWASP, Cross-Site
Request Forgery Prevention Cheat Sheet.
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
    """ASGI middleware that refuses requests for other names, so that no page of another site reads these by a name of
    its own (DNS rebinding).

    Args:
        app: The application.
        hosts: The names, without a port; ``*`` allows all.
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
    """Who asks for a page."""

    identity: str = ""
    """Who may act, in words for records; empty for a reader."""
    session: str = ""
    form_token: str = ""
    """What a form of this visitor must repeat."""


class PageAccess:
    """Recognizes visitors who may act.

    Args:
        token: What a visitor types to sign in; empty: only the proxy identifies visitors.
        trusted_proxies: Addresses and networks whose header with an identity is believed.
        identity_header: Name of that header.
        monotonic: Monotonic clock in seconds.

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
        self._monotonic = monotonic
        self._secret = secrets.token_bytes(32)
        self._signed_in: dict[str, float] = {}
        # Cookies are shared by all ports of a host, so each process has a name of its own.
        self._cookie = f"tiphys-{secrets.token_hex(4)}"

    @property
    def takes_token(self) -> bool:
        """Whether visitors can sign in with a token."""
        return bool(self._token)

    def identify(self, request: HTTPConnection) -> Visitor:
        """The visitor who sends ``request``; without identity unless signed in or named by a trusted proxy."""
        session = request.cookies.get(self._cookie, "")
        address = request.client.host if request.client else ""
        if identity := self._read_proxy_identity(request):
            return self._build_visitor(f"{identity} (by proxy {address})", session or secrets.token_urlsafe(24))
        if self._signed_in.get(session, 0.0) > self._monotonic():
            return self._build_visitor(f"holder of the token, from {address}", session)
        return Visitor()

    def sign_in(self, token: str) -> str | None:
        """Session of a visitor who has typed ``token``; None if it is wrong."""
        if not self._token or not hmac.compare_digest(token.strip().encode(), self._token):
            return None
        now = self._monotonic()
        self._signed_in = {known: end for known, end in self._signed_in.items() if end > now}
        while len(self._signed_in) >= _MAX_SESSIONS:
            del self._signed_in[next(iter(self._signed_in))]
        session = secrets.token_urlsafe(24)
        self._signed_in[session] = now + SESSION_SECONDS
        return session

    def sign_out(self, session: str) -> None:
        """End a session, so that its cookie is worth nothing."""
        self._signed_in.pop(session, None)

    def is_signed_in(self, visitor: Visitor) -> bool:
        """Whether the visitor has typed the token, so that signing out means something."""
        return visitor.session in self._signed_in

    def keep_session(self, request: HTTPConnection, response: Response, session: str) -> None:
        """Have the browser send ``session`` with its requests to this site, and with none that another site begins."""
        if request.cookies.get(self._cookie) != session:
            schemes = [request.url.scheme]
            if self._is_trusted(request):
                schemes += request.headers.getlist("x-forwarded-proto")
            response.set_cookie(self._cookie, session, secure="https" in schemes, httponly=True, samesite="strict")

    def find_form_fault(self, request: HTTPConnection, visitor: Visitor, form: Mapping[str, str]) -> str:
        """Why the form of a visitor is refused; empty if it comes from a page that this visitor was shown."""
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
    """Why a form does not come from a page of this site, as the browser says; empty if it does."""
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
