"""Runs as traces of OpenTelemetry."""
