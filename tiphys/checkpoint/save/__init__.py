"""From a state in memory to a committed checkpoint: when to save, the background saver, the commit."""
