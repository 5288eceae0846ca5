"""Templates that call other templates: steps and DAGs."""
