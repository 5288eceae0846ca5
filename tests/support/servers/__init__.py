"""Serves the interfaces of others on the loopback device, and calls servers in ways that libraries do not."""
