"""The commands that go on with a run, verify it, and finish what is left over."""
