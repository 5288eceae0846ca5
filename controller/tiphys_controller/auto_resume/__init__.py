"""Decides whether an interrupted run is resumed automatically: observation, decision, circuit breaker."""
