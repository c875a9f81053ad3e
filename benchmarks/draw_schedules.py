"""Draw schedules as pictures for docs/collectives.md: ``python benchmarks/draw_schedules.py docs``.

Ranks from top to bottom, rounds from left to right; a line is a transfer, its colour the block.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import altair as alt

from gradweave._src.collectives import pipeline, ring, tree
from gradweave._src.collectives.blueconnect import all_reduce as blueconnect
from gradweave._src.collectives.schedule import Schedule

DRAWN = {
    "ring": ("ring, 4 ranks", ring.all_reduce(4)),
    "pipeline": ("linear pipeline, 3 ranks, 4 blocks", pipeline.all_reduce(3, 4)),
    "double-tree": ("double binary tree, 7 ranks, 2 chunks each", tree.double_all_reduce(7, 2)),
    "blueconnect": ("BlueConnect, 2 nodes of 4 ranks", blueconnect([4, 2])),
}


def ends(schedule: Schedule) -> Iterator[dict[str, object]]:
    """Yield two points for each transfer: where it leaves and where it arrives."""
    for number in range(schedule.rounds):
        columns = zip(*(column.tolist() for column in schedule.round(number)), strict=True)
        for place, (source, target, first, last, add) in enumerate(columns):
            blocks = str(first) if last == first + 1 else f"{first} to {last - 1}"
            for when, rank in ((number + 0.1, source), (number + 0.9, target)):
                yield {
                    "transfer": f"{number}.{place}",
                    "round": when,
                    "rank": rank,
                    "blocks": blocks,
                    "then": "added" if add else "put in place",
                }


def drawing(title: str, schedule: Schedule) -> alt.LayerChart | alt.FacetChart:
    data = alt.InlineData(values=list(ends(schedule)))
    rounds = alt.Scale(domain=[0, schedule.rounds], nice=False)
    base = alt.Chart(data, width=640, height=34 * schedule.ranks, title=f"all-reduce by {title}")
    position = {
        "x": alt.X("round:Q", scale=rounds, axis=alt.Axis(tickMinStep=1, title="round")),
        "y": alt.Y("rank:O", axis=alt.Axis(grid=True)),
        "color": alt.Color("blocks:N", title="blocks", sort=None),
    }
    lines = base.mark_line(strokeWidth=2).encode(
        **position,
        detail="transfer:N",
        strokeDash=alt.StrokeDash("then:N", title="on arrival", sort=["added", "put in place"]),
    )
    return alt.layer(lines, base.mark_point(filled=True, size=30).encode(**position))


def main() -> None:
    folder = Path(sys.argv[1]) / "images"
    for name, (title, schedule) in DRAWN.items():
        drawing(title, schedule).save(str(folder / f"schedule-{name}.svg"))


if __name__ == "__main__":
    main()
