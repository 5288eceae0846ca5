"""Argo's expression languages, as the local engine evaluates them."""
