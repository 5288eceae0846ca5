"""``tiphys conformance``: proves on a bucket and on a cluster what runs rest on, and reports what held.

`store_promises` and `cluster_promises` try the promises out; `promises` says what they are and how a trial ends.
Everything that they make is in a folder, or has a name, that no run has, and is removed at the end.
"""
