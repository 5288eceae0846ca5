"""From a committed checkpoint to a state in memory: choosing, reading and verifying it."""
