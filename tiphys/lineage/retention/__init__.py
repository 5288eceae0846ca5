"""Retention of checkpoints: policy, pins, two-phase deletion, and collection outside of training programs."""
