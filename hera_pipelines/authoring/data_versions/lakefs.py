"""Asks lakeFS for the commit of a branch or tag, by its own client.

The client finds address and credentials as ``lakectl`` does, and they stay in this
process: the compiled Workflow holds the id of the commit alone.
"""

import json
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hera_pipelines.compile.settings import Lakefs
from tiphys.errors import NotFoundError, SettingsError, StoreError, TiphysError, UsageError, install_command
from tiphys.records import DataVersion

if TYPE_CHECKING:
    from lakefs.client import Client
    from lakefs_sdk.exceptions import ApiException

_COMMIT = re.compile(r"[0-9a-f]{64}")
_TIMEOUT_SECONDS = 15.0
"""Of each of the four tries that the client makes."""
_SETTINGS = (
    "set LAKECTL_SERVER_ENDPOINT_URL, LAKECTL_CREDENTIALS_ACCESS_KEY_ID and LAKECTL_CREDENTIALS_SECRET_ACCESS_KEY, or "
    "run `lakectl config`"
)


def read_version(source: Lakefs) -> DataVersion:
    """Find the commit of ``source``.

    Raises:
        UsageError: the client is not installed, or lakeFS does not accept the address.
        NotFoundError: there is no such repository, branch or tag.
        SettingsError: there are no credentials, or lakeFS refuses them.
        StoreError: lakeFS does not answer, or answers something else than a commit.
    """
    repository, ref, path = source.parts
    commit = ref if _COMMIT.fullmatch(ref) else _ask_commit(source, repository, ref)
    pinned = f"lakefs://{repository}/{commit}" + (f"/{path}" if path else "")
    return DataVersion(name=source.uri, algorithm="commit", digest=commit, uri=pinned)


def _ask_commit(source: Lakefs, repository: str, ref: str) -> str:
    client, server = _open_client(source)
    # The packages are an extra, and take half a second to import.
    from lakefs_sdk.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        # A branch and a tag stand for their commit here, as in the client's own `Reference.get_commit`.
        answer = client.sdk_client.commits_api.get_commit(repository, ref, _request_timeout=_TIMEOUT_SECONDS)
    except ApiException as error:
        raise _describe_refusal(source, server, repository, ref, error) from error
    except HTTPError as error:
        raise StoreError(
            f"{source}: lakeFS at {server} does not answer ({type(error).__name__}); try again, or give a commit id in "
            f"the place of {ref!r}"
        ) from error
    except ValueError as error:
        raise StoreError(_describe_strange_answer(source, server)) from error
    if not isinstance(answer.id, str) or not _COMMIT.fullmatch(answer.id):
        raise StoreError(_describe_strange_answer(source, server))
    return answer.id


def _open_client(source: Lakefs) -> "tuple[Client, str]":
    """The client, and scheme and host of its server, without the rest of the address, which may hold a password."""
    try:
        import lakefs
        from lakefs.exceptions import LakeFSException, NoAuthenticationFound
        from yaml import YAMLError
    except ImportError as error:
        raise UsageError(
            f"{source} needs the client of lakeFS: `{install_command('lakefs')}`, or give a commit id as its ref"
        ) from error
    try:
        client = lakefs.Client()  # type: ignore[no-untyped-call]
        address = urlsplit(client.config.host)
    except NoAuthenticationFound as error:
        raise SettingsError(f"{source}: there are no credentials for lakeFS; {_SETTINGS}") from error
    except (LakeFSException, YAMLError, OSError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"{source}: the settings of lakectl cannot be read ({type(error).__name__}); {_SETTINGS}"
        ) from error
    if not address.hostname:
        raise SettingsError(f"{source}: the address of lakeFS is missing, or no URL; {_SETTINGS}")
    return client, f"{address.scheme}://{address.netloc.rpartition('@')[2]}"


def _describe_refusal(source: Lakefs, server: str, repository: str, ref: str, error: "ApiException") -> TiphysError:
    answer = f"{error.status} {error.reason or ''}".rstrip() + _answer_message(error)
    if error.status == 404:
        return NotFoundError(
            f"{source}: lakeFS at {server} has no repository {repository!r}, or no branch, tag or commit {ref!r} in it "
            f"({answer}); `lakectl branch list lakefs://{repository}` lists the branches"
        )
    if error.status in (401, 403):
        return SettingsError(
            f"{source}: lakeFS at {server} refuses to show commits of {repository!r} ({answer}); check the credentials "
            "of lakectl, and that they allow fs:ReadCommit"
        )
    if error.status == 400:
        return UsageError(f"{source}: lakeFS at {server} does not accept the address ({answer}); correct it")
    return StoreError(f"{source}: lakeFS at {server} failed ({answer}); try again, or give a commit id as its ref")


def _answer_message(error: "ApiException") -> str:
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, TypeError, KeyError):
        return ""
    return f": {str(message)[:200]}"


def _describe_strange_answer(source: Lakefs, server: str) -> str:
    return f"{source}: {server} answered something else than a commit of lakeFS; check the address in the settings"
