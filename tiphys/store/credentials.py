"""Credentials of a store in a bucket of S3: the policy that each holder gets.

What Tiphys acts on and what programs write lie below two prefixes, so one ordinary
policy keeps a program from both the records of its tenant and the stores of other
tenants.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tiphys.errors import UsageError
from tiphys.store.layout import CONTROL, DATA
from tiphys.store.open import PLACEHOLDER

# Actions of S3.
READ, LIST, CREATE, DELETE = "s3:GetObject", "s3:ListBucket", "s3:PutObject", "s3:DeleteObject"
ABORT, _LIST_UPLOADS = "s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads"
# They have a meaning in the resources and conditions of a policy.
_POLICY_CHARACTERS = frozenset("*?$")


class CredentialsHolder(StrEnum):
    PROGRAM = "program"
    """The pods of one workflow namespace: Secret ``tiphys-store``."""
    SERVICES = "services"
    """Plugin service, agent and controller, and people at a desk."""


class BucketPlace(NamedTuple):
    """Where a store is in S3."""

    bucket: str
    prefix: str
    """Empty, or with a final slash."""


def bucket_policy(url: str, holder: CredentialsHolder, principals: Sequence[str] = ()) -> dict[str, Any]:
    """The smallest policy with which these credentials suffice.

    In the URL of the services ``{namespace}`` stands for every tenant. ``principals`` are the users to name in each
    statement of a policy of the bucket; None for a policy of a user or role.

    Raises:
        UsageError: the URL names no bucket, or a program would get the stores of all tenants.
    """
    is_program = holder is CredentialsHolder.PROGRAM
    if is_program and PLACEHOLDER in url:
        raise UsageError(f"{url} stands for every tenant, and a program gets the store of one: name it by --namespace")
    place = parse_bucket_url(url)
    bucket, prefix = (part.replace(PLACEHOLDER, "*") for part in place)
    objects = f"arn:aws:s3:::{bucket}/{prefix}"
    halves = [f"{objects}{CONTROL}*", f"{objects}{DATA}*"]
    named = {"Principal": {"AWS": [*principals]}} if principals else {}

    def allow(actions: list[str], resources: list[str], **condition: Any) -> dict[str, Any]:
        return {"Effect": "Allow", **named, "Action": actions, "Resource": resources, **condition}

    statements = [
        allow([READ], halves),
        allow([CREATE, DELETE, ABORT], halves[1:] if is_program else halves),
        allow([LIST], [f"arn:aws:s3:::{bucket}"], Condition={"StringLike": {"s3:prefix": [f"{prefix}*"]}}),
    ]
    if not is_program:  # the janitor looks for unfinished uploads
        statements.append(allow([_LIST_UPLOADS], [f"arn:aws:s3:::{bucket}"]))
    return {"Version": "2012-10-17", "Statement": statements}


def parse_bucket_url(url: str) -> BucketPlace:
    """Parse the URL of a store.

    Raises:
        UsageError: it names no bucket of S3, or has a character with a meaning in policies.
    """
    parts = urlsplit(url)
    if parts.scheme in ("gs", "az"):
        raise UsageError(
            f"{url}: policies and trials of the credentials of programs are for S3 only; give the identity of the "
            "programs the roles of 'Google Cloud Storage and Azure' in docs/install.md"
        )
    if parts.scheme != "s3" or not parts.netloc or _POLICY_CHARACTERS.intersection(url):
        raise UsageError(
            f"{url or 'the URL'} names no bucket of S3, and a folder knows no users: use s3://bucket/prefix, "
            "without * and $"
        )
    prefix = parts.path.strip("/")
    return BucketPlace(parts.netloc, f"{prefix}/" if prefix else "")
