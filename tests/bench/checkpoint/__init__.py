"""What checkpoints cost, measured against what the machine can do and against what other libraries do."""
