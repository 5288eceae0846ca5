"""Failures of attempts: classification, retry budgets, escalation, and bad checkpoints."""
