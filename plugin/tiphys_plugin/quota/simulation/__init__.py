"""Replays a trace of jobs through the scheduler, to try a queue file before it is applied."""
