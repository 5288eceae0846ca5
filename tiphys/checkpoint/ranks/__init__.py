"""What the ranks of one training agree on: barriers, the step to save at, step times."""
