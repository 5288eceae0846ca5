"""The `tiphys` commands that remove what is not needed, or finish what is left over: gc, janitor, cache, register."""
