"""The `tiphys` commands that remove what is no longer needed: gc, janitor, cache."""
