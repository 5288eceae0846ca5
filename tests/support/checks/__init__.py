"""Judges what Tiphys does, and what its files say, by rules that share no code with it."""
