"""A lakeFS for tests: repositories with branches, tags and commits, behind the one call that Tiphys makes.

Paths, status codes, error messages and the fields of a commit are those of lakeFS's
API (``GET /repositories/{repository}/commits/{commitId}``, which takes any ref). The
official client reads the answers in the tests, and refuses others.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


class FakeLakefs:
    """The state of the server, and what was asked of it."""

    def __init__(self) -> None:
        self.refs: dict[str, dict[str, str]] = {}
        """Commit of each branch and tag, by repository."""
        self.requests: list[str] = []
        self.answer: tuple[int, bytes] | None = None
        """Answered in the place of everything else, if set."""
        self.url = ""

    def commit(self, repository: str, branch: str) -> str:
        """Add a commit to a branch, which is created if need be; its id."""
        refs = self.refs.setdefault(repository, {})
        refs[branch] = hashlib.sha256(f"{repository}/{branch}/{refs.get(branch)}".encode()).hexdigest()
        return refs[branch]

    def tag(self, repository: str, name: str, branch: str) -> None:
        self.refs[repository][name] = self.refs[repository][branch]

    def respond(self, path: str, authorization: str) -> tuple[int, bytes]:
        self.requests.append(path)
        if self.answer is not None:
            return self.answer
        if authorization != "Basic " + base64.b64encode(f"{KEY}:{SECRET}".encode()).decode():
            return _error(401, "error authenticating request")
        match unquote(path).removeprefix("/api/v1/").split("/"):
            case ["repositories", repository, "commits", ref]:
                if repository not in self.refs:
                    return _error(404, "repository not found")
                refs = self.refs[repository]
                commit = refs.get(ref, ref if ref in refs.values() else "")
                return _commit(commit) if commit else _error(404, "commit not found")
        return _error(404, "invalid API endpoint")


def _error(status: int, message: str) -> tuple[int, bytes]:
    return status, json.dumps({"message": message}).encode()


def _commit(commit: str) -> tuple[int, bytes]:
    fields = {"parents": [], "committer": "ada", "message": "new data", "creation_date": 1_760_000_000, "metadata": {}}
    return 200, json.dumps({"id": commit, "meta_range_id": "", "generation": 1, "version": 1, **fields}).encode()


@contextmanager
def serving() -> Iterator[FakeLakefs]:
    """A server on a free port of this machine, until the end of the block."""
    fake = FakeLakefs()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = fake.respond(self.path, self.headers.get("Authorization", ""))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
