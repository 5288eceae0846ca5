"""Decides which pending requests start: a pure function of queues, leases, requests and time."""
