"""Is a cluster fit for Tiphys, and if not, what is to be done? One pure function per check over what was observed."""

from tiphys_controller.doctor.examine import examine
from tiphys_controller.doctor.finding import Finding, State, usable
from tiphys_controller.doctor.observe import observe

__all__ = ["Finding", "State", "examine", "observe", "usable"]
