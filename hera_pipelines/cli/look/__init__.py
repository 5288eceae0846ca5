"""The commands that show runs: what they did, do and wait for, and what it cost."""
