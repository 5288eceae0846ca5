"""Lineages: the checkpoints of a training step across attempts, their selection, validity, retention and audit.

Decisions, such as `order_candidates` and `evaluate_retention`, are pure. Separate
functions read the records that they need.
"""
