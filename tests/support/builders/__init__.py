"""Builds objects, records and runs with everything filled in that a test does not care about."""
