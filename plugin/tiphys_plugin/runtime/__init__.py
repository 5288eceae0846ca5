"""What one plugin process keeps: context, settings, locks, background tasks, metrics."""
