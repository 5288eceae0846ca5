"""HTTP calls that wait as long as a slow machine needs, and use no proxy that the shell may name."""

from functools import partial
from typing import Any

import httpx

SECONDS = 60.0
# These servers speak plain HTTP, and to read all trusted certificates takes 20 ms of CPU time for each call.
_PLAIN: dict[str, Any] = {"timeout": SECONDS, "trust_env": False, "verify": False}
get = partial(httpx.get, **_PLAIN)
post = partial(httpx.post, **_PLAIN)
put = partial(httpx.put, **_PLAIN)
delete = partial(httpx.delete, **_PLAIN)
