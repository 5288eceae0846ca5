"""Logs of the services: one JSON object per line on stderr, which log collectors parse without extra rules."""

import logging
import sys

import structlog
from structlog.typing import Processor


def configure_json_logging() -> None:
    """Configure logging for a service. Only entry points call this; an import leaves logging unchanged.

    Warnings and errors of libraries, such as those of uvicorn, take the same form.
    """
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", key="ts"),
        structlog.processors.dict_tracebacks,
    ]
    render = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *shared, render],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    # The handler of the standard library for warnings of loggers without one, as all are here.
    assert logging.lastResort is not None
    logging.lastResort.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
