"""Pods of the local engine: their processes, files, volumes and gangs."""
