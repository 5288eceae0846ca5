import os

FUZZ_SEED = "TIPHYS_FUZZ_SEED"

SEED = int(os.environ.get(FUZZ_SEED, "20261121"))
"""Of tests that draw their trials themselves: the same always, another in each round of `make fuzz`."""
