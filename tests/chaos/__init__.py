"""A deterministic simulation of Tiphys under faults, and an independent checker of what it leaves."""
