"""The commands that start, follow and stop a run."""
