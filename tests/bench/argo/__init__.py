"""Benchmark of complete Workflows on a real Argo, beside the same Workflows without Tiphys."""
