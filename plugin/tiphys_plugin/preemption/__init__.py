"""Preemption with a handshake: who has to go for whom, asking them to save first, and what it has cost.

A training that is asked may use its grace period to commit a checkpoint. Its
GPUs are given to nobody before its pods are gone.
"""
