"""The log of the services' code, which some commands run: on stderr, since stdout is for data.

Apart from the application, because importing structlog takes as long as all else
that the help of ``tiphys`` needs.
"""

import sys

import structlog


def log_to_stderr(verbose: bool) -> None:
    """Send the log to stderr. Without ``verbose`` only critical lines appear."""
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[*structlog.get_config()["processors"][:-1], plain],
        wrapper_class=structlog.make_filtering_bound_logger("info" if verbose else "critical"),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
