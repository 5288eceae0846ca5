"""Carries out preemption: asks trainings to save and exit, and resizes elastic gangs."""
