"""Formats of the status of a `GPULedger`: its field ``version``."""

WHOLE_STATUS_FORMAT = 5
"""The status holds all leases and requests, as before the log."""
LOG_FORMAT = 6
"""The status is the head of a log."""
