"""Runs as events of OpenLineage."""
