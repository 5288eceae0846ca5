"""What people write: pipelines, steps, decorators, policies."""
