class HarnessError(Exception):
    """What failed, and what to do; shown without a trace."""
