"""Keeps leases and pending requests: in memory, in SQLite, or in one Kubernetes object."""
