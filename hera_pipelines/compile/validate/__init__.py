"""Checks what an author wrote, before anything is compiled from it."""
