"""Web pages over a store: its runs, and one run with its steps, attempts and checkpoints; `tiphys ui` serves them."""
