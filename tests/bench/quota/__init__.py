"""What GPU quotas cost and keep."""
