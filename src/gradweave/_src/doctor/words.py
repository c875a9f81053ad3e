"""How rates, times and lists of ranks are written, in the terminal and on the page alike."""

from collections.abc import Sequence

FAST_BITS_PER_S = 1e10


def rate(bytes_per_s: float) -> str:
    bits_per_s = 8 * bytes_per_s
    if bits_per_s >= FAST_BITS_PER_S:
        return f"{bits_per_s / 1e9:,.1f} Gbit/s"
    return f"{megabits(bytes_per_s)} Mbit/s"


def megabits(bytes_per_s: float) -> str:
    """Return megabits per second as text, with digits enough for slow links."""
    found = 8 * bytes_per_s / 1e6
    return f"{found:,.0f}" if found >= 10 else f"{found:.2g}"  # noqa: PLR2004


def speed(bits_per_s: int) -> str:
    """Return a card's rate as text, in Gbit/s or Mbit/s."""
    return f"{bits_per_s / 1e9:g} Gbit/s" if bits_per_s >= 10**9 else f"{bits_per_s / 1e6:g} Mbit/s"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e6:,.0f} us"  # noqa: PLR2004


def ranks(numbers: Sequence[int]) -> str:
    """Return such texts as ``rank 3``, ``ranks 0 and 1``, ``ranks 0, 1 and 5``."""
    return f"rank{'s' if len(numbers) > 1 else ''} {listed([str(one) for one in numbers])}"


def listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
