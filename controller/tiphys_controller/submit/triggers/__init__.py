"""Starts or resumes a run once for each object that arrives in a bucket."""
