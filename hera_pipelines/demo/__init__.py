"""A real training, small enough for a laptop, and what is done to it.

The programs (`validate`, `preprocess`, `train`, `register`) are ordinary
container commands that know nothing of the demo; `pipeline` puts them together,
`story` breaks things while they run.
"""
