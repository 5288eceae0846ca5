"""Kueue as the authority over GPUs: one `Workload` of Kueue per admission."""
