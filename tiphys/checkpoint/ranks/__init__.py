"""Agreement between the ranks of one training: barriers, the step to save at, and step times."""
