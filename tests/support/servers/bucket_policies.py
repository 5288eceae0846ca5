"""Policies of S3 as a server evaluates them, as far as ours use them: allow, wildcards, and the prefix of a listing."""

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.servers.s3_proxy import Behaviour, Forward, Reply, Request, refuses

Policy = Mapping[str, Any]

_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/")


def allows(policy: Policy, action: str, bucket: str, key: str = "", prefix: str = "", user: str = "") -> bool:
    """Whether any statement allows ``action`` on a key, or on the bucket; ``prefix`` is that of a listing."""
    resource = f"arn:aws:s3:::{bucket}/{key}" if key else f"arn:aws:s3:::{bucket}"
    return any(_matches(statement, action, resource, prefix, user) for statement in policy["Statement"])


def enforces(policies: Mapping[str, Policy]) -> Behaviour:
    """A server that allows each user, by access key, what the policy of that user allows."""

    def answer(request: Request, forward: Forward) -> Reply | None:
        found = _CREDENTIAL.search(request.headers.get("authorization", ""))
        policy = policies.get(found[1] if found else "")
        if policy is None:
            return refuses(403, "InvalidAccessKeyId")(request, forward)
        return forward(request) if _allows_request(policy, request) else refuses(403, "AccessDenied")(request, forward)

    return answer


def _allows_request(policy: Policy, request: Request) -> bool:
    parts = urlsplit(request.path)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    query = parse_qs(parts.query, keep_blank_values=True)
    if key:
        abort = request.method == "DELETE" and "uploadId" in query
        by_method = {"GET": "GetObject", "HEAD": "GetObject", "DELETE": "DeleteObject"}
        name = "AbortMultipartUpload" if abort else by_method.get(request.method, "PutObject")
    else:
        name = "ListBucketMultipartUploads" if "uploads" in query else "ListBucket"
    return allows(policy, f"s3:{name}", bucket, key, query.get("prefix", [""])[0])


def _matches(statement: Mapping[str, Any], action: str, resource: str, prefix: str, user: str) -> bool:
    assert set(statement) <= {"Effect", "Principal", "Action", "Resource", "Condition"}, json.dumps(statement)
    assert statement["Effect"] == "Allow"
    named = statement.get("Principal", {"AWS": [user]})["AWS"]
    condition = statement.get("Condition", {"StringLike": {"s3:prefix": ["*"]}})
    assert [*condition] == ["StringLike"] and [*condition["StringLike"]] == ["s3:prefix"]
    return (
        user in named
        and action in statement["Action"]
        and any(fnmatchcase(resource, pattern) for pattern in statement["Resource"])
        and any(fnmatchcase(prefix, pattern) for pattern in condition["StringLike"]["s3:prefix"])
    )
