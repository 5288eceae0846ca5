"""Which checkpoints stay and which are deleted: policy, pins, two-phase deletion, offline collection."""
