"""oomc: a graph compiler for training mixture-of-experts models that do not fit one machine."""

from oomc.compile import compile  # noqa: A004  the name is the API's, as in torch.compile
from oomc.errors import BudgetError, CaptureError, CheckpointError, OomcError, UnsupportedError, VerifyError
from oomc.estimate import Estimate, plan
from oomc.load import load
from oomc.plan import Budget, Plan
from oomc.report import Report
from oomc.step import Step

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "Estimate",
    "OomcError",
    "Plan",
    "Report",
    "Step",
    "UnsupportedError",
    "VerifyError",
    "compile",
    "load",
    "plan",
]
