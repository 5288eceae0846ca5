"""Audit of a run (`tiphys verify`): compares its records and bytes with each other, and reports each damage."""
