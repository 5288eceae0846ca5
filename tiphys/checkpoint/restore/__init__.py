"""From a committed checkpoint to a state in memory: which one, reading and verifying it, looking into it."""
