"""Adapters to training frameworks, one module each; nothing is imported here, since each needs its framework."""
