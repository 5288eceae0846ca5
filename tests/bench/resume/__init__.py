"""What failures cost with Tiphys, and without it."""
