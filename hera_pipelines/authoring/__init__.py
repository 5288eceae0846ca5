"""The public classes and decorators: pipelines, steps, policies."""
