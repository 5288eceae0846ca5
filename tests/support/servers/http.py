"""HTTP calls that wait as long as a slow machine needs, and use no proxy that the shell may name."""

from functools import partial

import httpx

SECONDS = 60.0
get = partial(httpx.get, timeout=SECONDS, trust_env=False)
post = partial(httpx.post, timeout=SECONDS, trust_env=False)
