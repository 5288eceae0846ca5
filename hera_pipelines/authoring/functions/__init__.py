"""Steps from functions: the decorators, the scripts that they make, and what a parameter means there."""
