"""Kubernetes Events and annotations about a Workflow's run."""
