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
    """Raised where a file is not what its reader expects.

    ``read``, ``load_trace``, ``load_network`` and others that read files raise it. The line names
    the file and the place in it that is wrong: mend it there, or make the file again.
    """


class LabError(GradweaveError):
    """Raised where an emulated cluster cannot be built, or does not do what it was asked.

    Where namespaces are forbidden or the extra `lab` is missing, the line says so; with
    ``loopback=True`` a cluster runs without them, and nothing is shaped.
    """


class PlanMismatch(GradweaveError, ValueError):
    """Raised where a plan is not one for this trace or model.

    Make a plan for this one: by ``make_plan``, or by a wrapper that is given none.
    """


class RequestError(GradweaveError, ValueError):
    """Raised for a name, an argument or a combination that means nothing.

    It is raised before anything is done, and the line says what was found and what is expected
    instead.
    """


class UnknownCost(GradweaveError):
    """Raised where a network cannot price this operation, collective or number of workers.

    Ask for what it knows, which the line lists; measure the rest by ``calibrate``; or give the
    network links, from which formulas price any number of workers.
    """


class CollectiveError(GradweaveError):
    """Raised where a collective fails: a peer is gone or silent, or ranks disagree.

    The line names the rank, if it is known. The process group cannot be used after that: end all
    ranks, mend what the line says, and start again from a checkpoint.
    """


# As users import them, and as tracebacks show them; inspect.getsource cannot find them for that.
for _error in (
    GradweaveError,
    FormatError,
    LabError,
    PlanMismatch,
    RequestError,
    UnknownCost,
    CollectiveError,
):
    _error.__module__ = "gradweave"
del _error
