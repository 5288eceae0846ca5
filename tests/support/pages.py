"""Asks the web application without a server, and reads its pages."""

import re
from html.parser import HTMLParser

import anyio
import httpx
from starlette.applications import Starlette


class Texts(HTMLParser):
    """Texts and elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))


class Pages:
    """Asks the application without a server."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    def get(self, path: str, host: str = "localhost:8321") -> httpx.Response:
        return self.request("GET", path, host)

    def request(self, method: str, path: str, host: str = "localhost:8321") -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, headers={"Host": host})

        return anyio.run(ask)
