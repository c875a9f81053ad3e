class GradweaveError(Exception):
    """Root of this package's errors; each is one line that says what to do.

    GradweaveError
    ├── FormatError       a file is not what its reader expects
    ├── RequestError      a name, an argument or a combination that means nothing
    └── UnknownCost       the network cannot price what it was asked for
    """


class FormatError(GradweaveError):
    """A file is not what its reader expects."""


class RequestError(GradweaveError, ValueError):
    """A name, an argument or a combination that means nothing."""


class UnknownCost(GradweaveError):
    """The network cannot price this operation, collective or number of workers."""
