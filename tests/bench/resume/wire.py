"""Counts the requests that this process sends to S3, and delays each of them.

The delay is added in the client, before a request is sent, so that no proxy is measured.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from botocore.httpsession import URLLib3Session

DELAY_SECONDS = 0.02
"""What a request to object storage takes beside the server's own work, in the same region."""


class Wire:
    def __init__(self) -> None:
        self.requests = 0
        self.delay = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def tapped(self) -> Iterator[None]:
        send = URLLib3Session.send

        def counted(session: URLLib3Session, request: Any) -> Any:
            with self._lock:
                self.requests += 1
            time.sleep(self.delay)
            return send(session, request)

        with mock.patch.object(URLLib3Session, "send", counted):
            yield
