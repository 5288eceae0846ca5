"""One JSON object per line on stderr, in the words that the service uses; never a token or a body."""

import json
import sys
from datetime import UTC, datetime


def log(level: str, event: str, **fields: object) -> None:
    """Write one line."""
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    sys.stderr.write(json.dumps({**fields, "event": event, "log_level": level, "ts": moment}) + "\n")
    sys.stderr.flush()
