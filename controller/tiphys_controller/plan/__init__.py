"""Works out which steps of a run are missing: observe storage, decide, prune the Workflow."""
