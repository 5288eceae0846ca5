"""The launcher of training programs: what compile puts before the command of every training."""
