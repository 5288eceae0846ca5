"""The nodes of a cluster as they are now: what they have, who else uses it, and whether they are sound.

Everything but `watching` is a pure function of what the API server says.
"""
