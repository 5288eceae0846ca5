"""The commands that compile pipelines, and find out what can be compiled."""
