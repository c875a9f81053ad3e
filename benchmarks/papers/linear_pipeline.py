"""Linear Pipeline: broadcast, reduce and all-reduce along a chain, against tree and exchange."""

from . import (
    linear_pipeline_loops,
    linear_pipeline_measured,
    linear_pipeline_sizes,
    linear_pipeline_workers,
)
from .linear_pipeline_costs import LINK, PAPER_BLOCK
from .page import Chapter


def chapter() -> Chapter:
    return Chapter(
        title="Linear Pipeline: collectives whose cost does not grow with the workers",
        introduction=f"""
            A long message passes along a chain in small blocks, so that every link is busy all the
            time. Modelled numbers are the paper's Table 1 with the steps that its Fig. 2 takes (one
            less for each pipeline, and an all-reduce that fills the pipe once), which is what our
            schedules cost exactly, on the link that its section 3.2 states: a latency of
            {LINK.latency_s * 1e6:g} microseconds, {1e-9 / LINK.s_per_byte:g} GB/s, adding free.
            `linear-pipeline` takes the block that its formula makes best;
        `linear-pipeline:{PAPER_BLOCK}` takes the paper's. """,
        sections=[
            linear_pipeline_sizes.section(),
            linear_pipeline_workers.section(),
            linear_pipeline_measured.section(),
            linear_pipeline_loops.section(),
        ],
    )
