class GradweaveError(Exception):
    """The root of this package's errors; each is one line that says what to do.

    Catch it where a mistake of any kind is to be told to a user.

        GradweaveError
        ├── FormatError       a file is not what its reader expects
        ├── LabError          the emulated cluster cannot be built, or does not do what it was asked
        ├── PlanMismatch      the plan is not one for this trace or model
        ├── RequestError      a name, an argument or a combination that means nothing
        ├── UnknownCost       the network cannot price what it was asked for
        └── CollectiveError   a collective could not be carried out

    Examples:
        >>> try:
        ...     gradweave.load_trace("resnet51")
        ... except gradweave.GradweaveError as error:
        ...     print(type(error).__name__)
        RequestError
    """


class FormatError(GradweaveError):
    """Raised where a file is not what its reader expects."""


class LabError(GradweaveError):
    """Raised where an emulated cluster cannot be built, or does not do what it was asked."""


class PlanMismatch(GradweaveError, ValueError):
    """Raised where a plan is not one for this trace or model."""


class RequestError(GradweaveError, ValueError):
    """Raised for a name, an argument or a combination that means nothing."""


class UnknownCost(GradweaveError):
    """Raised where a network cannot price this operation, collective or number of workers."""


class CollectiveError(GradweaveError):
    """Raised where a collective fails: a peer is gone or silent, or ranks disagree."""
