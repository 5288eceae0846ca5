"""Which commit a ref of lakeFS stands for, asked by the official client of a server that holds branches and tags.

| situation                               | result                                        |
|-----------------------------------------|-----------------------------------------------|
| branch, tag                             | the commit that it stands for now             |
| commit id                               | taken as it is, without a server              |
| no repository, branch or credentials    | says which, and what to type                  |
| no server, a failing one, another page  | says so, without a secret                     |
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.lakefs import KEY, SECRET, FakeLakefs, serving

from hera_pipelines import Lakefs
from hera_pipelines.authoring.data_versions import read_data_version
from tiphys.errors import NotFoundError, SettingsError, StoreError, TiphysError, UsageError
from tiphys.records import DataVersion

MAIN = Lakefs("lakefs://datasets/main/images/train")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLakefs]:
    with serving() as fake:
        fake.commit("datasets", "main")
        monkeypatch.setenv("LAKECTL_CONFIG_FILE", str(tmp_path / "lakectl.yaml"))
        monkeypatch.setenv("LAKECTL_SERVER_ENDPOINT_URL", fake.url)
        monkeypatch.setenv("LAKECTL_CREDENTIALS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("LAKECTL_CREDENTIALS_SECRET_ACCESS_KEY", SECRET)
        yield fake


def refusal(kind: type[TiphysError], source: Lakefs = MAIN) -> str:
    with pytest.raises(TiphysError) as caught:
        read_data_version(source)
    assert type(caught.value) is kind
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_branch_stands_for_its_newest_commit(server: FakeLakefs) -> None:
    first = server.refs["datasets"]["main"]
    assert read_data_version(MAIN) == DataVersion(
        name=MAIN.uri, algorithm="commit", digest=first, uri=f"lakefs://datasets/{first}/images/train"
    )

    second = server.commit("datasets", "main")

    assert second != first
    assert read_data_version(MAIN).digest == second


def test_a_tag_stays_where_it_is(server: FakeLakefs) -> None:
    server.tag("datasets", "v1.0", "main")
    tagged = server.refs["datasets"]["main"]
    server.commit("datasets", "main")
    version = read_data_version(Lakefs("lakefs://datasets/v1.0"))
    assert (version.digest, version.uri) == (tagged, f"lakefs://datasets/{tagged}")


def test_a_commit_id_needs_no_server(server: FakeLakefs) -> None:
    commit = server.refs["datasets"]["main"]
    version = read_data_version(Lakefs(f"lakefs://datasets/{commit}/images/"))
    assert (version.digest, version.uri) == (commit, f"lakefs://datasets/{commit}/images/")
    assert server.requests == []


def test_without_the_client_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lakefs", None)
    assert "needs the client of lakeFS: `pip install 'tiphys-VERSION-py3-none-any.whl[lakefs]'`" in refusal(UsageError)


def test_credentials_of_lakectl_are_used(server: FakeLakefs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVER_ENDPOINT_URL", "CREDENTIALS_ACCESS_KEY_ID", "CREDENTIALS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"LAKECTL_{name}")
    settings = {
        "credentials": {"access_key_id": KEY, "secret_access_key": SECRET},
        "server": {"endpoint_url": f"{server.url}/api/v1"},
    }
    (tmp_path / "lakectl.yaml").write_text(json.dumps(settings))
    assert read_data_version(MAIN).digest == server.refs["datasets"]["main"]


def test_without_credentials_their_variables_are_named(
    server: FakeLakefs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAKECTL_CREDENTIALS_SECRET_ACCESS_KEY")
    message = refusal(SettingsError)
    assert "there are no credentials for lakeFS; set LAKECTL_SERVER_ENDPOINT_URL" in message
    (tmp_path / "lakectl.yaml").write_text("credentials: [\n")
    assert "the settings of lakectl cannot be read (ParserError)" in refusal(SettingsError)


def test_without_an_address_its_variable_is_named(server: FakeLakefs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAKECTL_SERVER_ENDPOINT_URL")
    assert "the address of lakeFS is missing, or no URL; set LAKECTL_SERVER_ENDPOINT_URL" in refusal(SettingsError)
    monkeypatch.setenv("LAKECTL_SERVER_ENDPOINT_URL", "http://[::1")
    assert "cannot be read (ValueError); set LAKECTL_SERVER_ENDPOINT_URL" in refusal(SettingsError)


def test_refused_credentials_are_a_matter_of_settings(server: FakeLakefs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKECTL_CREDENTIALS_ACCESS_KEY_ID", "other")
    assert "refuses to show commits of 'datasets' (401 Unauthorized: error authenticating request)" in refusal(
        SettingsError
    )
    server.answer = 403, b'{"message": "insufficient permissions"}'
    assert "(403 Forbidden: insufficient permissions)" in refusal(SettingsError)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("lakefs://datasets/maim/x", "no branch, tag or commit 'maim' in it (404 Not Found: commit not found)"),
        ("lakefs://other/main/x", "no repository 'other', or no branch, tag or commit 'main' in it (404 Not Found"),
    ],
)
def test_a_missing_repository_or_ref_is_named(server: FakeLakefs, uri: str, words: str) -> None:
    assert words in refusal(NotFoundError, Lakefs(uri))


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (500, b"<html>", StoreError, "failed (500 Internal Server Error); try again"),
        (400, b'{"message": "invalid ref"}', UsageError, "does not accept the address (400 Bad Request: invalid ref)"),
        (200, b"<html>hello</html>", StoreError, "answered something else than a commit of lakeFS"),
        (200, b"{}", StoreError, "answered something else than a commit of lakeFS"),
        (200, b"[]", StoreError, "answered something else than a commit of lakeFS"),
        # Servers before 1.0 repeat the ref in the place of the commit.
        (
            200,
            b'{"id": "main", "parents": [], "committer": "a", "message": "m", "creation_date": 1, "meta_range_id": ""}',
            StoreError,
            "answered something else than a commit of lakeFS",
        ),
    ],
)
def test_an_unexpected_answer_is_no_commit(
    server: FakeLakefs, status: int, body: bytes, kind: type[TiphysError], words: str
) -> None:
    server.answer = status, body
    assert words in refusal(kind)


def test_a_server_that_is_not_there_is_named_without_a_password(
    server: FakeLakefs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKECTL_SERVER_ENDPOINT_URL", "http://ada:hidden@127.0.0.1:1")
    message = refusal(StoreError)
    assert "lakeFS at http://127.0.0.1:1 does not answer (MaxRetryError)" in message
    assert "hidden" not in message


@pytest.mark.parametrize(
    "uri",
    ["", "datasets/main", "lakefs://", "lakefs://datasets", "lakefs://Datasets/main", "s3://datasets/main", "a\0"],
)
def test_an_invalid_address_is_refused_before_any_request(uri: str) -> None:
    with pytest.raises(UsageError, match="Lakefs"):
        Lakefs(uri)


def test_an_address_has_a_repository_a_ref_and_a_path() -> None:
    assert Lakefs("lakefs://datasets/main").parts == ("datasets", "main", "")
    assert Lakefs("lakefs://datasets/main/").parts == ("datasets", "main", "")
    assert Lakefs("lakefs://datasets/main~2/a/b").parts == ("datasets", "main~2", "a/b")
