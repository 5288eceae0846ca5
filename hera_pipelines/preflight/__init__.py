"""Preflight: finds what would go wrong with a pipeline before it is submitted.

A check is a pure function of the compiled Workflow and of an observation of cluster and store, in the frame of
`tiphys_controller.doctor.check`. What the checks of `tiphys doctor`, the compiler and the quota scheduler decide
already is asked of them.
"""

from hera_pipelines.preflight.examine import run_preflight_checks
from hera_pipelines.preflight.observation import PreflightObservation
from hera_pipelines.preflight.subject import PreflightSubject, build_subject

__all__ = ["PreflightObservation", "PreflightSubject", "build_subject", "run_preflight_checks"]
