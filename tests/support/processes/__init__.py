"""Starts, watches and kills processes of Tiphys and of training programs."""
