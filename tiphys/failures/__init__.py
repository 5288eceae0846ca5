"""Why an attempt failed and what may be tried next: classification, retry budgets, escalation, bad checkpoints."""
