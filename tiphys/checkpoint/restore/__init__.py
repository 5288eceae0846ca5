"""From a committed checkpoint to a state in memory: choosing, reading, verifying and inspecting it."""
