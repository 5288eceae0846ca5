"""The commands about GPUs: queues, nodes and simulations."""
