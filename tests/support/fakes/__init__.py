"""Stands in, inside the test's own process, for a cluster, a store or a service of others."""
