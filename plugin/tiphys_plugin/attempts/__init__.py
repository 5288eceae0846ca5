"""What runs for an attempt: its run and step, its pods, its gang, and whether they are alive."""
