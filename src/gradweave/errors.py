class GradweaveError(Exception):
    """Root of this package's errors; each is one line that says what to do.

    GradweaveError
    ├── FormatError       a file is not what its reader expects
    ├── UnknownName       no planner, collective, trace or network of that name
    └── UnknownCost       the network cannot price what it was asked for
    """


class FormatError(GradweaveError):
    """A file is not what its reader expects."""


class UnknownName(GradweaveError):
    """No planner, collective, trace or network of that name, or a wrong argument behind it."""


class UnknownCost(GradweaveError):
    """The network cannot price this operation, collective or number of workers."""
