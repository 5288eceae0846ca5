"""Pods of the local engine: processes, files, volumes, gangs."""
