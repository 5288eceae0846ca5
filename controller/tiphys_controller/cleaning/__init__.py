"""What nobody needs and what nobody carries on: found here, acted on by the controller's janitor or by hand."""

from tiphys_controller.cleaning.found import Found, What
from tiphys_controller.cleaning.leases import HeldLease, held_leases, orphaned
from tiphys_controller.cleaning.storage import litter
from tiphys_controller.cleaning.unfinished import Sight, unfinished

__all__ = ["Found", "HeldLease", "Sight", "What", "held_leases", "litter", "orphaned", "unfinished"]
