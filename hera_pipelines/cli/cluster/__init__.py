"""The commands that look at an installation: whether it is fit for runs, and what starts them."""
