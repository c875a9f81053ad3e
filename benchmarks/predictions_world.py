"""Predictions beside what others measured: ``python benchmarks/predictions_world.py docs``.

Writes predictions-world.md and its picture into the folder. Published numbers are in
benchmarks/published; each is predicted from nominal link rates, one latency for each network, and
the speed of one worker. Nothing is fitted.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median

import altair as alt
import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gradweave import Network, Trace, load_trace
from gradweave._src.costs import Level, Link, Links
from gradweave._src.planning import make_plan
from gradweave._src.simulation import simulate
from papers import charts
from papers.page import claim, paragraph, table

PUBLISHED = Path(__file__).parent / "published"
PICTURE = "predictions-world.svg"
# What a GPU of a host of ddl-benchmarks' has, by its nominal rate and as its own rows of four GPUs
# tell; see `inside_a_host`.
DDL, FOUR_GPUS = "ddl-benchmarks", 4


class Tier(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    members: int | None
    bytes_per_s: float  # nominal


class PublishedNetwork(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a network without having measured it; it has one latency."""

    what: str
    latency_s: float
    tiers: tuple[Tier, ...]

    def network(self, name: str) -> Network:
        levels = tuple(
            Level(
                members=tier.members,
                link=Link(latency_s=self.latency_s, s_per_byte=1 / tier.bytes_per_s),
            )
            for tier in self.tiers
        )
        return Network(name=name, source=self.what, links=Links(levels=levels))


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published number: samples per second, or how many times as fast as ``over``.

    It is one of training or, where there is no trace, of one all-reduce of ``message_bytes``.
    ``over`` is another planner or, of one all-reduce, another collective.
    """

    label: str
    network: str
    workers: int
    measured: float
    trace: str | None = None
    batch_size: int = 1
    one_worker_per_s: float = 0.0
    gpus_per_worker: int = 1
    planner: str = "single"
    collective: str = "ring"
    compression: str | None = None
    bytes_per_element: int = 4
    message_bytes: int = 0
    over: str | None = None

    @property
    def gpus(self) -> int:
        return self.workers * self.gpus_per_worker


class Source(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    address: str
    measured: str
    assumed: tuple[str, ...]
    networks: dict[str, PublishedNetwork]
    rows: tuple[Row, ...]

    def predicted(self, row: Row) -> float:
        """Return the prediction in the unit of the row."""
        network = self.networks[row.network].network(row.network)
        if row.over is None:
            return _per_s(row, network)
        if row.trace is None:
            return _per_s(row, network) / _per_s(replace(row, collective=row.over), network)
        return _per_s(row, network) / _per_s(replace(row, planner=row.over), network)

    def error(self, row: Row) -> float:
        """Return the relative error of the iteration time, or of a ratio where the row has one.

        It is negative where the prediction is too fast.
        """
        predicted = self.predicted(row)
        return row.measured / predicted - 1 if row.over is None else predicted / row.measured - 1

    def errors(self) -> list[float]:
        return [self.error(row) for row in self.rows]


def _per_s(row: Row, network: Network) -> float:
    """Return samples per second, or all-reduces per second where nothing is trained."""
    if row.trace is None:
        return 1 / network.seconds(
            "all-reduce", row.collective, nbytes=row.message_bytes, workers=row.workers
        )
    trace = _as_fast_as(row)
    plan = make_plan(
        trace,
        network,
        workers=row.workers,
        planner=row.planner,
        collective=row.collective,
        compression=row.compression,
    )
    iteration_s = simulate(trace, plan, network, workers=row.workers).iteration_s
    return row.gpus * row.batch_size / iteration_s


def _as_fast_as(row: Row) -> Trace:
    """Return the shipped trace, with the iteration time of this row's single GPU."""
    assert row.trace is not None
    trace = load_trace(row.trace)
    ratio = row.batch_size / row.one_worker_per_s / trace.compute_s
    return trace.rescaled(
        forward_s=trace.forward_s * ratio, backward_s=trace.backward_s * ratio
    ).with_bytes_per_element(row.bytes_per_element)


def sources() -> dict[str, Source]:
    found = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Source)
        for path in PUBLISHED.glob("*.json")
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[1].rows)))


def page(found: Mapping[str, Source]) -> str:
    blocks = [
        "# Predictions beside what others measured",
        "Made by `python benchmarks/predictions_world.py docs`.",
        paragraph(f"""
            {sum(len(one.rows) for one in found.values())} numbers that others have published, of
            clusters that nobody here has touched, beside what `simulate` says of them. A prediction
            knows the shipped trace of the model (presets, most of them *estimated*: spread over
            layers by their arithmetic, forward half as long as backward), the published speed of
            one worker, to which the trace is scaled, the **nominal** rates of the links, and one
            latency for each network, chosen beforehand by its kind and stated below. Nothing is
            fitted to a row, and none is left out for its error."""),
        paragraph("""
            The error is that of the iteration time, predicted over measured less one, as everywhere
            in this project: negative where the prediction is too fast. Of published ratios it is
            that of the ratio."""),
        "## The errors",
        distribution(found),
        paragraph(too_fast(found)),
        f"![errors of all predictions, by source](images/{PICTURE})",
        *where_from(found),
        "## One by one",
    ]
    for source in found.values():
        blocks += [f"### {source.title}", *_section(source)]
    return "\n\n".join(blocks) + "\n"


def distribution(found: Mapping[str, Source]) -> str:
    rows = [_spread(source.title, source.errors()) for source in found.values()]
    everything = [error for source in found.values() for error in source.errors()]
    rows.append(_spread("**all**", everything))
    header = [
        "",
        "predictions",
        "mean",
        "mean of absolute errors",
        "median of absolute errors",
        "95th percentile of absolute errors",
        "within 10 %",
    ]
    return table(header, rows)


def too_fast(found: Mapping[str, Source]) -> str:
    absolute = [s.error(row) for s in found.values() for row in s.rows if row.over is None]
    fast = sum(error < 0 for error in absolute)
    return claim(
        f"""Of {len(absolute)} iteration times {fast} are predicted too short, and none more than
        1 % too long: nominal rates are what links cannot exceed. Read such a prediction as a bound
        on what a cluster can do, and its plan as one for a faster network; calibrate before you pay
        for one.""",
        holds=fast > len(absolute) / 2 and max(absolute) < 0.01,
    )


def _spread(title: str, errors: Sequence[float]) -> list[str]:
    sizes = [abs(error) for error in errors]
    return [
        title,
        str(len(errors)),
        f"{mean(errors):+.1%}",
        f"{mean(sizes):.1%}",
        f"{median(sizes):.1%}",
        f"{float(np.quantile(sizes, 0.95)):.1%}",
        f"{sum(size <= 0.10 for size in sizes)} of {len(sizes)}",
    ]


def _section(source: Source) -> Iterator[str]:
    yield f"{source.measured}. {source.address}"
    yield "\n".join(f"- {assumed}" for assumed in source.assumed)
    yield "One latency for each network, and nominal rates each way:"
    yield "\n".join(
        f"- {network.what}: {network.latency_s * 1e6:g} µs; "
        + ", then ".join(_tier_text(tier) for tier in network.tiers)
        for network in source.networks.values()
    )
    for name, network in source.networks.items():
        rows = [row for row in source.rows if row.network == name]
        if len(source.networks) > 1:
            yield f"**{network.what}**"
        yield table(
            ["", "batch", "GPUs", "one GPU", "published", "predicted", "error"],
            [_row(source, row) for row in rows],
        )


def _tier_text(tier: Tier) -> str:
    among = "among all" if tier.members is None else f"among {tier.members}"
    return f"{tier.bytes_per_s / 1e9:g} GB/s {among}"


def _row(source: Source, row: Row) -> list[str]:
    number = ".2f" if row.over is not None else ",.0f"
    return [
        row.label if row.trace is None else f"{row.trace}, {row.label}",
        str(row.batch_size) if row.trace is not None else "",
        str(row.gpus),
        f"{row.one_worker_per_s:g}/s" if row.trace is not None else "",
        f"{row.measured:{number}}",
        f"{source.predicted(row):{number}}",
        f"{source.error(row):+.1%}",
    ]


def where_from(found: Mapping[str, Source]) -> Iterator[str]:
    yield "## Where they come from"
    yield from inside_a_host(found[DDL])
    yield from _others(found)


def inside_a_host(source: Source) -> Iterator[str]:
    """Explain the largest errors of all: links inside hosts are not what their name says."""
    implied = {row: _implied_bytes_per_s(row) for row in source.rows if _is_one_message(row)}
    slow = median(implied.values())
    slower = replace(
        source, networks={name: _inside_at(one, slow) for name, one in source.networks.items()}
    )
    before = [source.error(row) for row in source.rows if row.workers > FOUR_GPUS]
    after = [slower.error(row) for row in source.rows if row.workers > FOUR_GPUS]
    yield paragraph(
        claim(
            f"""**Nominal rates inside a host.** The {len(implied)} rows of ddl-benchmarks with one
            message on {FOUR_GPUS} GPUs of one host say what those GPUs reach among each other:
            {min(implied.values()) / 1e9:.1f} to {max(implied.values()) / 1e9:.1f} GB/s, not the
            nominal 15.75 (probably because cards of this kind cannot reach each other's memory, so
            that all of it is copied through the host's). It is slower than 100 Gbit/s InfiniBand,
            so it is what counts there, too. With the median of these, {slow / 1e9:.1f} GB/s, in the
            place of the nominal rate and nothing else changed, the mean of absolute errors on more
            than one host falls from {mean(map(abs, before)):.1%} to {mean(map(abs, after)):.1%}.
            The table keeps the nominal rate.""",
            holds=mean(map(abs, after)) < mean(map(abs, before)),
        )
    )
    yield table(
        ["rows of more than one host", "nominal inside", f"{slow / 1e9:.1f} GB/s inside"],
        [
            [
                f"{network.what}, `{planner}`",
                _mean_size(source, name, planner),
                _mean_size(slower, name, planner),
            ]
            for name, network in source.networks.items()
            for planner in ("single", "wfbp", "mgwfbp")
        ],
    )


def _mean_size(source: Source, network: str, planner: str) -> str:
    errors = [
        source.error(row)
        for row in source.rows
        if (row.network, row.planner) == (network, planner) and row.workers > FOUR_GPUS
    ]
    return f"{mean(map(abs, errors)):.1%} (mean {mean(errors):+.1%})"


def _is_one_message(row: Row) -> bool:
    return row.workers == FOUR_GPUS and row.planner == "single"


def _implied_bytes_per_s(row: Row) -> float:
    """Return the rate of links if one ring after backward takes all that is not computing."""
    trace = _as_fast_as(row)
    exposed_s = row.workers * row.batch_size / row.measured - trace.compute_s
    return 2 * (row.workers - 1) / row.workers * float(trace.nbytes.sum()) / exposed_s


def _inside_at(network: PublishedNetwork, bytes_per_s: float) -> PublishedNetwork:
    inner, *outer = network.tiers
    return replace(network, tiers=(replace(inner, bytes_per_s=bytes_per_s), *outer))


def _others(found: Mapping[str, Source]) -> Iterator[str]:
    ddl = found[DDL]
    many = [ddl.error(r) for r in ddl.rows if r.planner == "wfbp" and r.workers > FOUR_GPUS]
    yield paragraph(f"""
        **Many small messages.** Predicted by a latency alone, one message for each gradient is
        {mean(many):+.1%} off in the mean on more than one host. Besides the links' latency each
        message probably takes its negotiation (Horovod's ranks agree on every tensor first) and a
        kernel's start, which no nominal number tells.""")
    tcp = [r for r in ddl.rows if r.network == "100gbib-tcp" and r.workers > FOUR_GPUS]
    reached = [8e-9 * _implied_bytes_per_s(row) for row in tcp if row.planner == "single"]
    yield paragraph(f"""
        **TCP does not reach 100 Gbit/s.** By TCP/IP instead of RDMA the same cards move
        {min(reached):.0f} to {max(reached):.0f} Gbit/s, as the rows with one message tell, and the
        predictions are {mean(map(ddl.error, tcp)):+.1%} off in the mean.""")
    dlperf = found["dlperf"]
    inside = [dlperf.error(row) for row in dlperf.rows if row.workers <= 8]
    between = [dlperf.error(row) for row in dlperf.rows if row.workers > 8]
    yield paragraph(f"""
        **What one worker does not do.** Inside a DLPerf host, where NVLink hides all messages, the
        error is {mean(inside):+.1%} in the mean, which no message explains: probably data loading,
        the optimizer and torch's hooks are slower on eight GPUs than on one. Between hosts it is
        {mean(between):+.1%}, probably because BERT's largest gradient, the embedding, is ready
        last, so that nearly all of what its messages take is exposed.""")
    gtopk = found["gtopk"]
    dense = [gtopk.error(row) for row in gtopk.rows if row.compression is None]
    sparse = [gtopk.error(row) for row in gtopk.rows if row.compression is not None]
    yield paragraph(f"""
        **What the cost model leaves out.** gTop-k's dense rows are {mean(dense):+.1%} off, its
        sparse ones {mean(sparse):+.1%}, probably because the hosts' single lane of PCI Express,
        over which gradients are copied twice, and selecting on the GPU have no number here
        ([results.md](results.md) has the missing seconds, model by model).""")
    blue = found["blueconnect"]
    tiers = [blue.error(row) for row in blue.rows if row.trace is not None]
    yield paragraph(f"""
        **Jitter.** BlueConnect's 192 GPUs wait for the slowest of them, 5 to 10 ms of each
        iteration by the paper's own estimate, which no prediction here has; its rows are
        {mean(tiers):+.1%} off in the mean.""")
    merged = found["mgwfbp"]
    yield paragraph(f"""
        **Ratios forgive in the mean, not one by one.** What all ways have in common cancels:
        MG-WFBP's published ratios are {mean(merged.errors()):+.1%} off in the mean, but the mean of
        their absolute errors is {mean(map(abs, merged.errors())):.1%}, probably because merging
        pays by what start-ups cost, and that is not nominal.""")
    servers = found["tensorflow-ec2"]
    yield paragraph(f"""
        **Where little is exposed, little can go wrong.** On EC2 computing hides most of the
        messages, and the error is {mean(servers.errors()):+.1%} in the mean, probably most of it
        from the eight GPUs of an instance, which reach 7.2 times the speed of one before anything
        travels.""")


def chart(found: Mapping[str, Source]) -> alt.TopLevelMixin:
    rows: list[charts.Row] = [
        {
            "source": source.title.split(",")[0],
            "error": source.error(row),
            "how": row.compression.partition(":")[0] if row.compression else row.planner,
            "what": f"{row.trace or 'all-reduce'}, {row.label}, {row.gpus} GPUs",
        }
        for source in found.values()
        for row in source.rows
    ]
    titles = [source.title.split(",")[0] for source in found.values()]
    drawn = (
        charts.data_chart(rows)
        .mark_circle(size=36, opacity=0.7)
        .encode(
            x=alt.X("error:Q", axis=alt.Axis(format="%", title="error of the predicted time")),
            y=alt.Y("how:N", title=None),
            row=alt.Row(
                "source:N",
                sort=titles,
                header=alt.Header(title=None, labelAngle=0, labelAlign="left", labelLimit=220),
                spacing=6,
            ),
            color=alt.Color("how:N", legend=None),
        )
        .properties(width=520)
        .resolve_scale(y="independent")
    )
    return charts.finished(drawn, "How far predictions from nominal rates are off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="such as docs")
    folder: Path = parser.parse_args().folder
    found = sources()
    (folder / "predictions-world.md").write_text(page(found))
    (folder / "images").mkdir(exist_ok=True)
    chart(found).save(str(folder / "images" / PICTURE))


if __name__ == "__main__":
    main()
