"""The current nodes of a cluster: their GPUs, the GPUs that foreign pods use, and their health.

The verdicts and the inventory are pure functions of the objects of the API
server. Only `node_watch`, `evacuate` and `straggler_watch` do I/O in the
background, and `stragglers` reads step times from storage.
"""
