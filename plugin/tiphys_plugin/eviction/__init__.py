"""Carries out preemption: asks trainings to save and exit, and shrinks elastic gangs."""
