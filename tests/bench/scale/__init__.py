"""What the cost of a process grows with: runs, steps, checkpoints, live Workflows, namespaces."""
