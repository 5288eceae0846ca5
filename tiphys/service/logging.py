"""One JSON object per line on stderr, so that a cluster's log collector needs no rules for us."""

import sys

import structlog


def log_json() -> None:
    """Configure structlog for a service. A library that is only imported leaves logging as it is."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", key="ts"),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
