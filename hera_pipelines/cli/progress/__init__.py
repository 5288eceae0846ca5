"""Live progress of a run: on this machine, or on a cluster."""
