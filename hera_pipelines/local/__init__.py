"""The local engine: runs a compiled Workflow with real processes and no cluster."""
