"""Commands that show what a run does: its progress, and the output of its programs."""
