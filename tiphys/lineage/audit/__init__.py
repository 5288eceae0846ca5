"""`tiphys verify`: compares records and bytes of a run with each other and names each damage."""
