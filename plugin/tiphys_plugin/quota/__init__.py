"""GPU quotas: queues, flavors, leases, and the ledger that admits requests before any pod exists."""
