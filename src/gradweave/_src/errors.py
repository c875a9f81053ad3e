class GradweaveError(Exception):
    """Root of this package's errors; each is one line that says what to do.

    GradweaveError
    ├── FormatError       a file is not what its reader expects
    ├── LabError          the emulated cluster cannot be built, or does not do what it was asked
    ├── PlanMismatch      the plan is not one for this trace or model
    ├── RequestError      a name, an argument or a combination that means nothing
    ├── UnknownCost       the network cannot price what it was asked for
    └── CollectiveError   a collective could not be carried out
    """


class FormatError(GradweaveError):
    """A file is not what its reader expects."""


class LabError(GradweaveError):
    """The emulated cluster cannot be built, or does not do what it was asked."""


class PlanMismatch(GradweaveError, ValueError):
    """The plan is not one for this trace or model."""


class RequestError(GradweaveError, ValueError):
    """A name, an argument or a combination that means nothing."""


class UnknownCost(GradweaveError):
    """The network cannot price this operation, collective or number of workers."""


class CollectiveError(GradweaveError):
    """A collective could not be carried out: a peer is gone or silent, or ranks disagree."""
