"""The user's own configuration: defaults and profiles for store, context and namespace, and ``tiphys config``."""
