"""The process-wide state of a plugin: context, settings, locks, background tasks, metrics."""
