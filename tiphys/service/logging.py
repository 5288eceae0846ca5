"""Logs of the services: one JSON object per line on stderr, which log collectors parse without extra rules."""

import sys

import structlog


def configure_json_logging() -> None:
    """Configure structlog for a service. Only entry points call this; an import leaves logging unchanged."""
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
