"""The `tiphys` commands about GPUs: queues, nodes, why, simulate."""
