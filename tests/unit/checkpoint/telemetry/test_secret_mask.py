"""Which values are secrets, and in which forms they are masked.

| text | stored |
|---|---|
| value of a variable whose name suggests a secret | masked, in every form |
| password within a URL, a connection string or JSON of any variable | masked |
| line of a key of several lines, however its ends are written | masked |
| value in two parts of the output | masked |
| one secret that is the begin, or overlaps the end, of another | both masked as a whole |
| short or plain values, paths to secrets, public keys | stay |
"""

import base64
import json
import random
import re
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiphys.checkpoint.lifecycle.crash_report import error_fingerprint, format_error
from tiphys.checkpoint.telemetry.events import EventLog
from tiphys.checkpoint.telemetry.secret_mask import StreamMask, find_secrets, is_secret, mask_secrets

VALUE = 'pä55"w/ö\\rd+&=%x'
LINES = ["".join(random.Random(number).choices("ABCDEFGHIJKLMNOPqrstuvwxyz0123456789+/", k=64)) for number in range(5)]
PEM = "\n".join(["-----BEGIN PRIVATE KEY-----", *LINES, "c2hvcnQ=", "-----END PRIVATE KEY-----", ""])


@pytest.mark.parametrize(
    "name",
    [
        "DATABASE_URL", "ANALYTICS_DB_URI", "REDIS_URL", "AZURE_STORAGE_CONNECTION_STRING", "CONNECTIONSTRING",
        "MY.CONN_STR", "DB_PASSWORD", "PGPASSWORD", "MYSQL_PWD", "DB_PASS", "SSH_KEY", "DEPLOY_KEY_2", "SMTP_AUTH",
        "REGISTRY_AUTH_CONFIG", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "HF_TOKEN", "GITHUB_PAT", "API_KEY", "apiKey",
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "SESSION_COOKIE", "GOOGLE_CREDENTIALS", "sshKey",
        "JWT", "PASS", "DSN",
    ],
)  # fmt: skip
def test_name_suggests_a_secret(name: str) -> None:
    assert is_secret(name, VALUE)
    assert find_secrets({name: VALUE}) == (VALUE,)


@pytest.mark.parametrize(
    "name",
    [
        "PWD", "OLDPWD", "PATH", "AUTHOR", "GIT_AUTHOR_NAME", "MONKEY", "KEYBOARD", "TOKENIZERS_PARALLELISM",
        "TOKENIZER_NAME", "SSH_PUBLIC_KEY", "TOKEN_FILE", "AWS_SHARED_CREDENTIALS_FILE", "TIPHYS_INPUT_KEYS",
        "MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "COMPASS", "BYPASS", "HOSTNAME", "",
    ],
)  # fmt: skip
def test_name_suggests_no_secret(name: str) -> None:
    assert find_secrets({name: "/some/long-value"}) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("SORT_KEY", "timestamp"), ("CACHE_KEY", "checkpoint"), ("AUTH_MODE", "Kubernetes"), ("KEY_ID", "Production"),
     ("PARTITION_KEY", "user_region"), ("GIT_URL", "https://ana@git.example/models.git")],
)  # fmt: skip
def test_name_of_something_is_no_secret(name: str, value: str) -> None:
    assert mask_secrets(f"saved {value}", {name: value}) == f"saved {value}"


@pytest.mark.parametrize("value", ["", "short", "1234567", "aaaaaaaaaaaa", "false", "--------"])
def test_plain_value_is_no_secret(value: str) -> None:
    assert find_secrets({"MY_TOKEN": value}) == ()
    assert mask_secrets(f"a {value} b", {"MY_TOKEN": value}) == f"a {value} b"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("PIP_INDEX_URL", "https://ana:hunter2-hunter2@pypi.example/simple", "hunter2-hunter2"),
        ("AIRFLOW_CONN_X", "postgres://u:p%40ss%2Fword@db/x", "p@ss/word"),
        ("STORAGE", "AccountName=x;AccountKey=Zm9vYmFyYmF6==;Suffix=y", "Zm9vYmFyYmF6=="),
        ("ODBC", "Server=db;Uid=ana;Pwd=hunter2-hunter2", "hunter2-hunter2"),
        ("LIBPQ", "host=db password=hunter2-hunter2", "hunter2-hunter2"),
        ("PIP_INDEX_URL", "https://ghp_0a1B2c3D4e@git.example/simple", "ghp_0a1B2c3D4e"),
        ("PIP_EXTRA_INDEX_URL", "https://a.example/ https://u:hunter2-hunter2@b.example/", "hunter2-hunter2"),
        ("DOCKER_CONFIG_JSON", '{"auths":{"registry":{"auth":"dTpodW50ZXIy"}}}', "dTpodW50ZXIy"),
        ("SERVICES", '[{"name": "größe", "api_key": "hunter2-hunter2"}]', "hunter2-hunter2"),
        ("HTTPS_PROXY", "http://ana:Sh0rtpw@proxy.example:3128", "ana:Sh0rtpw@"),
        ("GCP", json.dumps({"client": "ana", "private_key": PEM}), LINES[2]),
    ],
)
def test_secret_within_a_value_is_masked(name: str, value: str, secret: str) -> None:
    assert mask_secrets(f"login of {secret} failed", {name: value}) == "login of *** failed"


FORMS = {
    "itself": VALUE,
    "repr": repr(VALUE),
    "repr of bytes": repr(VALUE.encode()),
    "repr of repr": repr([repr(VALUE)]),
    "JSON": json.dumps({"a": VALUE}),
    "JSON with its characters": json.dumps({"a": VALUE}, ensure_ascii=False),
    "JSON in JSON": json.dumps({"a": json.dumps({"b": VALUE})}),
    "URL": quote(VALUE),
    "part of a URL": quote(VALUE, safe=""),
    "query": quote_plus(VALUE),
    "lower-case query": re.sub("%..", lambda code: code[0].lower(), quote_plus(VALUE)),
    "base64": base64.b64encode(VALUE.encode()).decode(),
    "base64 for URLs": base64.urlsafe_b64encode(VALUE.encode()).decode().rstrip("="),
    "header": base64.b64encode(f"ana:{VALUE}".encode()).decode(),
    "header of another user": base64.b64encode(f"bob-1:{VALUE}\n".encode()).decode(),
    "header of a third user": base64.b64encode(f"zoë:{VALUE}??".encode()).decode(),
    "hex": VALUE.encode().hex(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_form_of_a_secret_is_masked(form: str) -> None:
    masked = mask_secrets(f"begin {form} end", {"MYSQL_PWD": VALUE})
    assert "***" in masked
    assert len(masked) < len("begin *** end") + 24, "no more than the neighbours of the secret are left"
    assert VALUE not in masked


@pytest.mark.parametrize(
    "shown",
    [PEM, repr(PEM), json.dumps(PEM), PEM.replace("\n", "\r\n"), PEM.replace("\n", "\n  "), " ".join(PEM.split()),
     PEM.replace("\n", "\\\\n")],
    ids=["lines", "repr", "JSON", "CRLF", "indented", "one line", "escaped twice"],
)  # fmt: skip
@pytest.mark.parametrize("value", [PEM, PEM.replace("\n", "\\n"), PEM.replace("\n", "\r\n")])
def test_key_of_several_lines_is_masked_however_its_ends_are_written(value: str, shown: str) -> None:
    masked = mask_secrets(f"key: {shown}", {"SSH_KEY": value})
    assert not any(line in masked for line in LINES)


@pytest.mark.parametrize("size", range(1, len(VALUE) + 3))
def test_secret_in_parts_is_masked(size: int) -> None:
    text = f"a {VALUE}b {VALUE}{VALUE}, and {VALUE[:-1]}"
    mask = StreamMask([VALUE])
    shown = "".join([*(mask.add(text[at : at + size]) for at in range(0, len(text), size)), mask.end()])
    assert shown == "a ***b ******, and ***"


@given(st.lists(st.text("ab", min_size=8, max_size=12), min_size=1, max_size=4), st.text("abc", max_size=60), st.data())
@settings(max_examples=100, deadline=None)
def test_parts_are_masked_like_the_whole(secrets: list[str], text: str, data: st.DataObject) -> None:
    whole = StreamMask(secrets)
    expected = whole.add(text) + whole.end()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    mask = StreamMask(secrets)
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown = "".join([*map(mask.add, parts), mask.end()])
    assert shown.replace("***", "") == expected.replace("***", "")
    assert not any(secret in shown for secret in secrets)


def test_secrets_that_begin_or_overlap_each_other_are_masked_as_a_whole() -> None:
    secrets = ["abcdefgh", "abcdefgh-long", "long-tail-ü"]
    for order in (secrets, secrets[::-1]):
        mask = StreamMask(order)
        assert mask.add("x abcdefgh-long-tail-ü y abcdefgh z ") + mask.end() == "x *** y *** z "


def test_text_without_secrets_is_shown_at_once() -> None:
    mask = StreamMask([VALUE])
    assert mask.add("step 7\n") == "step 7\n"
    assert not mask.is_holding


def test_crash_report_masks_before_it_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", f"postgres://ana:{quote(VALUE, safe='')}@db/x")
    error = RuntimeError(f"{'x' * 470} {VALUE * 3} cannot log in with {quote(VALUE, safe='')}")
    for text in (format_error(error), error_fingerprint(error)):
        assert not any(VALUE[start : start + 6] in text for start in range(len(VALUE) - 6))
        assert "***" in text


def test_event_masks_its_message_and_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACK_WEBHOOK_URL", "https://hooks.example/T00/B00/xyzzy-plugh")
    log = EventLog(None, "digits-1", "fit", 1)  # type: ignore[arg-type]
    url = "https://hooks.example/T00/B00/xyzzy-plugh"
    event = log.make_event("x", f"posted to {url}", url=f"'{url}'", n=7, tried=[{"to": url}, 8])
    assert event.message == "posted to ***"
    assert event.data == {"url": "'***'", "n": 7, "tried": [{"to": "***"}, 8]}
