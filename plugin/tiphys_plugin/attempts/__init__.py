"""What runs for an attempt: the run and step it belongs to, its pods or gang, and whether they are alive."""
