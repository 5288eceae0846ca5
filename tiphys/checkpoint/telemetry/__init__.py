"""What a session reports: metrics, events, and the provenance of a checkpoint."""
