"""Write docs/results.md and its pictures: ``make results``."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import blueconnect, gtopk, linear_pipeline, mgwfbp
from .page import Chapter, bullets, paragraph, table

CHAPTERS: Mapping[str, Callable[[], Chapter]] = {
    "MG-WFBP": mgwfbp.chapter,
    "BlueConnect": blueconnect.chapter,
    "gTop-k": gtopk.chapter,
    "Linear Pipeline": linear_pipeline.chapter,
}

OPENING = """
    The results of five papers, computed again with Gradweave and printed beside the papers' own
    numbers. **This page and its pictures are generated; do not edit them.** `make results` writes
    them anew from the shipped traces, networks and measurements, in a minute; the same inputs give
    the same bytes.
"""

KINDS = [
    """**Simulated or modelled**: every number of ours that is not called measured. An iteration is
    simulated from a trace (when each gradient is ready), a plan (which gradients travel together)
    and a network (what a message costs); costs of collectives are closed forms, which tests hold
    against the schedules that run.""",
    """**Measured in the lab**: iterations and collectives on
    emulated nodes with real processes and sockets, taken from
    [benchmarks/results](../benchmarks/results), whose pages name the commits. """,
    """**Measured** traces: only GoogLeNet's (`googlenet-k80`), from the MG-WFBP authors' log. All
    other traces are **estimated**: tensor sizes are exact, times follow from operation counts at
    the speed of the measured trace.""",
    """**Measured by the paper**: numbers that a paper reports from real hardware. We print them
    where they are comparable and say what a model leaves out.""",
    """The papers' figures are pictures without data. We compare with the numbers that their text,
    captions and tables print, and with nothing read off a curve.""",
    """Conclusions drawn from the numbers are checked against them when the page is made: if one
    were no longer true, `make results` would fail.""",
    """A *band* is what becomes of a ratio while latency or compute times differ from ours by up to
    a fifth.""",
    """MB is 10^6 bytes. A ratio such as `wfbp` / `mgwfbp` is of iteration times: above 1, the
    second is the faster.""",
]


def page(chapters: Sequence[Chapter]) -> str:
    blocks = [
        "# Results: the papers' figures, reproduced",
        paragraph(OPENING),
        bullets(KINDS),
        "## At a glance",
        summary(chapters),
        *(chapter.markdown for chapter in chapters),
    ]
    return "\n\n".join(blocks) + "\n"


def summary(chapters: Sequence[Chapter]) -> str:
    highlights = [
        highlight
        for chapter in chapters
        for section in chapter.sections
        for highlight in section.highlights
    ]
    return table(["what", "paper", "ours"], [[h.what, h.paper, h.ours] for h in highlights])


def save_pictures(chapters: Sequence[Chapter], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for stale in folder.glob("results-*.svg"):
        stale.unlink()
    for chapter in chapters:
        for section in chapter.sections:
            for name, picture in section.pictures.items():
                picture.save(folder / f"{name}.svg")


def main(docs: Path) -> None:
    chapters = []
    for name, make in CHAPTERS.items():
        print(f"results: {name}", file=sys.stderr)
        chapters.append(make())
    print("results: pictures", file=sys.stderr)
    save_pictures(chapters, docs / "images")
    (docs / "results.md").write_text(page(chapters), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
