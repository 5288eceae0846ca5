"""Selects the leases that must end for a request: which queues may preempt, and which victims cost least."""
