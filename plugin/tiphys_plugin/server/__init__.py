"""The HTTP service that answers plugin calls, and the identity and permissions of its callers."""
