"""What loggers are told of planning, as numbers."""

from gradweave._src.session.findings import Findings, Stage


def planning_metrics(found: Findings) -> dict[str, float]:
    """Return how far planning has come and what it has found; what is unknown is left out.

    ``gradweave/settled`` is 1 when planning is over; ``gradweave/messages`` is how many there are
    in a step, ``gradweave/gain`` how many times as fast as at first a step is.
    """
    known: dict[str, float | None] = {
        "settled": float(found.stage is Stage.SETTLED),
        "messages": None if found.plan is None else float(len(found.plan.buckets)),
        "gain": found.gain,
        "step_s": found.step_s,
        "planning_steps": found.planning_steps,
        "planning_s": found.planning_s,
    }
    return {f"gradweave/{name}": value for name, value in known.items() if value is not None}
