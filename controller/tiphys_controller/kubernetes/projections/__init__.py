"""`GPUQueue`, `GPUFlavor` and `GPULease`: the ledger in objects that a person can read and a tool can watch.

Nobody decides by them. The one object that all services decide on is the
`GPULedger`; these follow it, and what somebody else writes into them is undone.
"""

from tiphys_controller.kubernetes.projections.projector import Projector

__all__ = ["Projector"]
