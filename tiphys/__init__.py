"""The contract that training containers, the plugin and the controller share.

This package imports neither Hera nor Kubernetes, because it is installed into
every training image. A training program needs three names from it:
``from tiphys import checkpoint, inputs, outputs``.
"""

__version__ = "0.1.0"
