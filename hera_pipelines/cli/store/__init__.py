"""The commands about checkpoints and shared results in a store, and what may be deleted of it."""
