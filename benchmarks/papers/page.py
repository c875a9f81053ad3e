"""What the results page is made of: sections of Markdown, with tables and pictures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import altair as alt


@dataclass(frozen=True, slots=True, kw_only=True)
class Highlight:
    """One line of the summary: a number a paper prints, and ours."""

    what: str
    paper: str
    ours: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One question a paper answers, and what we find."""

    title: str
    parts: Sequence[str]  # Markdown blocks
    pictures: Mapping[str, alt.TopLevelMixin]  # by file name, without folder and ending
    highlights: Sequence[Highlight] = ()

    @property
    def markdown(self) -> str:
        return "\n\n".join([f"### {self.title}", *self.parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One paper."""

    title: str
    introduction: str
    sections: Sequence[Section]

    @property
    def markdown(self) -> str:
        blocks = [f"## {self.title}", paragraph(self.introduction)]
        return "\n\n".join([*blocks, *(section.markdown for section in self.sections)])


def claim(text: str, *, holds: bool) -> str:
    """Return a conclusion, or raise ValueError where the numbers no longer bear it out."""
    if not holds:
        raise ValueError(f"no longer true: {text!r}; look at the numbers and reword it")
    return text


def paragraph(text: str) -> str:
    """Return one line of Markdown from text laid out for the source file."""
    return " ".join(text.split())


def bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {paragraph(item)}" for item in items)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with names to the left and numbers to the right."""
    rule = [":---", *["---:"] * (len(header) - 1)]
    lines = [header, rule, *rows]
    assert all(len(line) == len(header) for line in lines), f"ragged table under {header}"
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(name: str, description: str) -> str:
    return f"![{description}](images/{name}.svg)"


def differences(items: Iterable[str]) -> str:
    return f"**Where ours and the paper's differ**\n\n{bullets(items)}"


def ms(seconds: float) -> str:
    """Return milliseconds with about three digits, at least to the tenth."""
    milliseconds = seconds * 1e3
    if milliseconds >= 1000:
        return f"{milliseconds:,.0f}"
    return f"{milliseconds:.{1 if milliseconds >= 1 else 2}f}"


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def whole_percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def change(share: float) -> str:
    """Return a change as text, such as ``+11 %``."""
    return f"{share:+.0%}".replace("%", " %")


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as text, such as ``8, 16 and 32``."""
    *before, last = [f"{number:d}" for number in numbers]
    return f"{', '.join(before)} and {last}" if before else last
