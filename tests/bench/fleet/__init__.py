"""Hundreds of trainings at once on real Argo, real services and a real bucket: ``make bench-fleet``.

Nodes are of paper (kwok): a pod is said to run and executes nothing. Its program runs here instead, in one process for
all pods, with the product's session: it restores, saves and commits as a pod would, is killed with its pod, and reports
its end as kubelet and executor do. All else is real.
"""
