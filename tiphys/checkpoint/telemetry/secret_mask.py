"""Masks secrets of the environment in everything of a program that is stored: output, crash reports, events, messages.

A program prints its secrets in many forms: in a traceback, as ``repr``, in JSON, in the
header of a request. So the values of variables whose names suggest secrets are looked for
in all of these forms, and a key of several lines also line by line. Output comes in parts,
so `StreamMask` holds back an end that may be the begin of a secret.
"""

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

_BLANK = "***"
_MIN_CHARACTERS = 8
"""Shorter values would blank ordinary words."""
_MIN_LINE_CHARACTERS = 16
_MAX_MESSAGE_CHARACTERS = 64 << 10
_FRAGMENTS = ("secret", "passw", "passphrase", "credential", "private", "apikey", "accesskey", "webhook", "connstr")
"""Parts of names. A token is none in ``TOKENIZERS_PARALLELISM``."""
_WORDS = frozenset(("authorization", "cookie", "dsn", "jwt", "pass", "pat", "pwd", "sas"))
_VAGUE_WORDS = frozenset(("auth", "key"))
"""A secret, or the name of something: ``SORT_KEY``. A value of small letters alone is a name."""
_NAME = re.compile(r"[a-z]+([-_./ ][a-z]+)*")
_SETTINGS = frozenset(("enabled", "id", "limit", "method", "mode", "name", "size", "type"))
_SINGLE_WORDS = frozenset(("dsn", "jwt", "pass"))
"""Names of one word. ``PWD`` is the working directory."""
_SERVERS = frozenset(
    ("amqp", "broker", "celery", "database", "db", "elasticsearch", "mongo", "mongodb", "mysql", "postgres")
) | {"postgresql", "rabbitmq", "redis", "sqlalchemy"}
_PLACES = frozenset(("dir", "file", "path"))


def is_secret(name: str, value: str) -> bool:
    """Whether a variable, or a field, of this name holds a secret: ``DATABASE_URL``, ``MYSQL_PWD``, ``sshKey``."""
    words = _words(name)
    joined = "".join(words)
    if words[0] == "tiphys" or words[-1] in _PLACES or "public" in words:
        return False
    is_vague = len(words) > 1 and not _VAGUE_WORDS.isdisjoint(words) and _SETTINGS.isdisjoint(words)
    return (
        any(fragment in joined for fragment in _FRAGMENTS)
        or "token" in joined.replace("tokeniz", "")
        or "connectionstring" in joined
        or (not _SERVERS.isdisjoint(words) and not {"url", "uri"}.isdisjoint(words))
        or (len(words) > 1 and not _WORDS.isdisjoint(words))
        or (len(words) == 1 and words[0] in _SINGLE_WORDS)
        or (is_vague and not _NAME.fullmatch(value))
    )


def _words(name: str) -> list[str]:
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().replace("-", "_").split("_")


def find_secrets(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The secrets of ``environ``: values by their names, and passwords within URLs, JSON and connection strings.

    Values that are too short, or too plain, not to be ordinary words are left out.
    """
    found: dict[str, None] = {}
    for name, value in environ.items():
        candidates = [value.strip(), value] if is_secret(name, value) else []
        for candidate in (*candidates, *_inner_secrets(value)):
            if len(candidate) >= _MIN_CHARACTERS and len(set(candidate)) > 2:
                found[candidate] = None
    return tuple(found)


def _inner_secrets(value: str) -> Iterator[str]:
    for url in re.split(r"[\s,]+", value) if "://" in value else ():
        yield from _secrets_of_url(url)
    fields = _parse_json(value)
    if fields is None:
        parts = (part.partition("=")[::2] for part in re.split("[;& ]", value))
        yield from (text for name, text in parts if text and is_secret(f"x_{name}", text))
    waiting = [("", fields)]
    while waiting:
        name, field = waiting.pop()
        if isinstance(field, dict):
            waiting += field.items()
        elif isinstance(field, list):
            waiting += ((name, entry) for entry in field)
        elif isinstance(field, str) and is_secret(f"x_{name}", field):
            yield field


def _secrets_of_url(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        user, password = parts.username or "", parts.password
    except ValueError:
        return
    if password:
        # A short password may be an ordinary word, but not before the host.
        yield from (password, unquote(password), f"{user}:{password}@")
    elif re.search(r"\d", user):  # a token in the place of a user, as of a package index
        yield from (user, unquote(user))


def _parse_json(value: str) -> Any:
    try:
        return json.loads(value) if value.lstrip().startswith(("{", "[")) else None
    except (ValueError, RecursionError):
        return None


@lru_cache(maxsize=8)
def _forms(secrets: tuple[str, ...]) -> tuple[str, ...]:
    """All texts that show one of ``secrets``."""
    found: dict[str, None] = {}
    for secret in secrets:
        lines = [line.strip() for line in secret.replace("\\n", "\n").replace("\\r", "").splitlines()]
        parts = [line for line in lines if len(line) >= _MIN_LINE_CHARACTERS and not line.startswith("-----")]
        for text in (secret, *(parts if len(lines) > 1 else ())):
            found |= dict.fromkeys(_forms_of(text))
    return tuple(form for form in found if len(form) >= _MIN_CHARACTERS)


def _forms_of(text: str) -> Iterator[str]:
    raw = text.encode(errors="surrogateescape")
    escaped = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1], repr(raw)[2:-1]}
    yield from (text, *escaped, *(dump(form)[1:-1] for form in escaped for dump in (json.dumps, repr)))
    for url in (quote(raw), quote(raw, safe=""), quote_plus(raw)):
        yield from (url, re.sub("%..", lambda code: code[0].lower(), url))
    yield from (raw.hex(), raw.hex().upper())
    # Within other bytes, a secret begins at one of three places of a group of three.
    for offset, first in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(b"\0" * offset + raw).decode()[first : (offset + len(raw)) * 8 // 6]
        yield from (encoded, encoded.replace("+", "-").replace("/", "_"))


def mask_secrets(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return ``text``, cut to 64 Ki characters, without the secrets of ``environ``; None: of this process."""
    return _mask(text, find_secrets(os.environ if environ is None else environ))


def mask_texts(value: Any) -> Any:
    """Return ``value`` with all texts in its lists and dicts masked as by `mask_secrets`, but not the keys."""
    secrets = find_secrets(os.environ)

    def mask(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: mask(field) for key, field in part.items()}
        if isinstance(part, list | tuple):
            return [mask(entry) for entry in part]
        return _mask(part, secrets) if isinstance(part, str) else part

    return mask(value)


def _mask(text: str, secrets: Iterable[str]) -> str:
    mask = StreamMask(secrets)
    return mask.add(text[:_MAX_MESSAGE_CHARACTERS]) + mask.end()


class StreamMask:
    """Masks ``secrets`` in a text that comes in parts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._forms = _forms(tuple(secrets))
        self._held = ""

    def add(self, text: str) -> str:
        """Add a part; return what can be shown of the text so far, and was not returned before."""
        text = self._held + text
        found = self._find(text)
        cut = self._begin_of_open_form(text)
        # A secret that may be the begin of a longer one waits for it.
        cut = next((start for start, end in found if start < cut < end), cut)
        self._held = text[cut:]
        return _blank(text[:cut], [span for span in found if span[0] < cut])

    @property
    def is_holding(self) -> bool:
        """Whether a part was added and not returned yet."""
        return bool(self._held)

    def end(self) -> str:
        """What is left at the end; the begin of a secret is masked if it is long enough to tell it."""
        text, self._held = self._held, ""
        found, open_at = self._find(text), self._begin_of_open_form(text)
        if len(text) - open_at >= _MIN_CHARACTERS:
            found = _join([*found, (open_at, len(text))])
        return _blank(text, found)

    def _find(self, text: str) -> list[tuple[int, int]]:
        """Places of all forms, joined where they overlap."""
        spans = []
        for form in self._forms:
            start = text.find(form)
            while start >= 0:
                spans.append((start, start + len(form)))
                start = text.find(form, start + 1)
        return _join(spans)

    def _begin_of_open_form(self, text: str) -> int:
        """Where the longest end of ``text`` begins that is the begin of a form; its length if there is none."""
        begin = len(text)
        for form in self._forms:
            start = text.find(form[0], max(0, len(text) - len(form) + 1))
            while 0 <= start < begin:
                if form.startswith(text[start:]):
                    begin = start
                start = text.find(form[0], start + 1)
        return begin


def _join(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _blank(text: str, spans: Iterable[tuple[int, int]]) -> str:
    parts, done = [], 0
    for start, end in spans:
        parts += [text[done:start], _BLANK]
        done = end
    return "".join([*parts, text[done:]])
