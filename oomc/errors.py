"""The errors a user of oomc can meet.

Each says what is wrong, where in the user's model, and what to do. Faults of oomc's own are `AssertionError`s.
"""


class OomcError(Exception):
    """Base class of all errors that oomc raises on purpose."""


class CaptureError(OomcError):
    """The model's training step could not be traced into a graph."""


class UnsupportedError(OomcError):
    """The model, optimizer or option is understood but cannot be honoured; the message lists what can."""


class CheckpointError(OomcError):
    """Saved weights or state are damaged, are not those of the model, or cannot be saved; the message says which."""


class VerifyError(OomcError):
    """A graph breaks an invariant of its stage; the message shows the offending lines."""


class BudgetError(OomcError):
    """The budget cannot work.

    Attributes:
        smallest_device: smallest device budget in bytes that would work, or None where device memory is not the cause.
        smallest_host: smallest host budget in bytes that would work, or None where host memory is not the cause.
    """

    def __init__(self, message: str, smallest_device: int | None = None, smallest_host: int | None = None) -> None:
        super().__init__(message)
        self.smallest_device = smallest_device
        self.smallest_host = smallest_host
