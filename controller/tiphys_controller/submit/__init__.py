"""Creates Workflows: start, resume and fork, each submission claimed before it is sent."""
