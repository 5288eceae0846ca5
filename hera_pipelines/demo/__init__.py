"""``tiphys demo``: a real training run, small enough for a laptop, and the faults that the demo injects into it.

The programs (`validate`, `preprocess`, `train`, `register`) are ordinary
container commands that know nothing of the demo. `digits` is the pipeline file,
and `story` injects the faults while it runs.
"""
