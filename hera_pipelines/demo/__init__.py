"""``tiphys demo``: a real training run, small enough for a laptop, and the faults that the demo injects into it.

`digits` is the pipeline file; it knows nothing of the demo. `story` runs it and
injects the faults, and `processes` is how.
"""
