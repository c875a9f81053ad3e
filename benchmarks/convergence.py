"""What sparsified training learns, on real data: ``python benchmarks/convergence.py OUTPUT``.

Four workers, three seeds, dense and gTop-k. Writes OUTPUT.json (every epoch of every training),
OUTPUT.md (tables) and OUTPUT.svg (curves). Six hours on two cores: a training of ResNet-20 takes
about eleven minutes, VGG-16 seven, the LSTM four, a small CNN one or two. A
training that OUTPUT.json has is not run again, so an interrupted command can be repeated.
``--full`` takes whole widths and the paper's epochs, on the same data: days on two cores.
``--again`` writes the page anew and trains nothing. ``--losses RUN`` puts the curves of the
experiment named by ``--only`` into a run's folder, for `gradweave report RUN`.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from pathlib import Path
from statistics import mean, stdev

import altair as alt
import msgspec
from made_with import made_with
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src import files
from gradweave._src.bench.convergence import Epoch, Momentum, Outcome, Training, train_to_the_end
from gradweave._src.compression import ExchangeName
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.results import Losses

WORKERS = 4
SEEDS = (0, 1, 2)
DENSE = "dense"
LOSSY: ExchangeName = "gtopk-tree-lossy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    title: str
    full_title: str = ""  # where it is another
    dense: Training
    densities: tuple[float, ...]
    momentum: Momentum = "masked"
    # With the paper's own tree, which forgets some of what it drops, and the first seed only.
    lossy_densities: tuple[float, ...] = ()
    # With momentum that does not restart where elements were applied, besides.
    unmasked_densities: tuple[float, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    full: Training  # of the whole width, with the papers' epochs, on the same data

    def trainings(self, seed: int, *, full: bool) -> list[Training]:
        if seed not in self.seeds:
            return []
        dense = replace(self.full if full else self.dense, seed=seed)
        return [
            dense,
            *(
                replace(dense, density=density, momentum=self.momentum)
                for density in self.densities
            ),
            *(
                replace(dense, density=density, momentum="corrected")
                for density in self.unmasked_densities
            ),
            *(
                replace(dense, density=density, momentum=self.momentum, exchange=LOSSY)
                for density in (self.lossy_densities if seed == SEEDS[0] else ())
            ),
        ]

    def title_of(self, *, full: bool) -> str:
        return (self.full_title if full else "") or self.title

    def of(self, everything: "Everything", *, full: bool) -> list[Outcome]:
        """Return the experiment's outcomes of one size, which alone may be compared."""
        wanted = self.full if full else self.dense
        return [
            one
            for one in everything.outcomes
            if replace(
                one.training,
                density=None,
                momentum=wanted.momentum,
                exchange=wanted.exchange,
                seed=wanted.seed,
            )
            == wanted
        ]


RESNET20 = Training(
    experiment="resnet20",
    model="resnet20",
    width=16,
    data="cifar10",
    epochs=20,
    batch_size=8,
    learning_rate=0.05,
    weight_decay=5e-4,
    crop=24,
    warmup_epochs=2,
)
VGG16 = Training(
    experiment="vgg16",
    model="vgg16",
    width=16,
    data="cifar10",
    epochs=20,
    batch_size=16,
    learning_rate=0.05,
    weight_decay=5e-4,
    warmup_epochs=2,
)
SMALL_CNN = Training(
    experiment="small-cnn",
    model="small-cnn",
    width=16,
    data="fashion-mnist",
    epochs=4,
    batch_size=32,
    learning_rate=0.1,
    warmup_epochs=1,
)
# Nothing that treats densities apart: no clipping, no weight decay, a warm-up of a sixth.
DENSITIES = replace(
    SMALL_CNN, experiment="densities", epochs=6, learning_rate=0.03, warmup_epochs=1
)
CHAR_LSTM = Training(
    experiment="char-lstm",
    model="char-lstm",
    width=128,
    data="shakespeare",
    epochs=6,
    batch_size=16,
    learning_rate=1.0,
    clip_norm=0.5,
    warmup_epochs=1,
)

EXPERIMENTS = {
    "small-cnn": Experiment(
        title="Small CNN on Fashion-MNIST, 60,000 images",
        dense=SMALL_CNN,
        densities=(0.005, 0.001),
        lossy_densities=(0.005, 0.001),
        full=replace(SMALL_CNN, epochs=20, warmup_epochs=4),
    ),
    "resnet20": Experiment(
        title="ResNet-20 on 10,000 images of CIFAR-10",
        dense=RESNET20,
        densities=(0.005, 0.001),
        lossy_densities=(0.001,),
        full=replace(
            RESNET20, crop=None, epochs=140, batch_size=32, learning_rate=0.1, warmup_epochs=4
        ),
    ),
    "char-lstm": Experiment(
        title="LSTM on tiny Shakespeare",
        dense=CHAR_LSTM,
        densities=(0.005,),
        momentum="corrected",
        lossy_densities=(0.005,),
        full=replace(CHAR_LSTM, epochs=40, warmup_epochs=4),
    ),
    "vgg16": Experiment(
        title="VGG-16 of a quarter of its width on 10,000 images of CIFAR-10",
        full_title="VGG-16 on 10,000 images of CIFAR-10",
        dense=VGG16,
        densities=(0.005, 0.001),
        lossy_densities=(0.001,),
        full=replace(
            VGG16, width=64, epochs=140, batch_size=32, learning_rate=0.1, warmup_epochs=4
        ),
    ),
    "densities": Experiment(
        title="Densities side by side (the paper's Fig. 12): small CNN, lower learning rate",
        dense=DENSITIES,
        densities=(0.05, 0.005, 0.0005),
        unmasked_densities=(0.05,),
        full=replace(DENSITIES, epochs=40, warmup_epochs=4),
    ),
}


def _without_decay(name: str, title: str) -> Experiment:
    """Return an experiment without weight decay, whose optimizer is then the same for all."""
    known = EXPERIMENTS[name]
    dense, full = (
        replace(training, experiment=f"{name}-equal", weight_decay=0.0)
        for training in (known.dense, known.full)
    )
    return dataclass_replace(
        known,
        title=title,
        full_title="",
        dense=dense,
        full=full,
        lossy_densities=(),
        seeds=SEEDS[:1],
    )


EXPERIMENTS |= {
    "resnet20-equal": _without_decay("resnet20", "ResNet-20 as above, without weight decay"),
    "vgg16-equal": _without_decay("vgg16", "VGG-16 as above, without weight decay"),
}


class Everything(Struct, frozen=True, kw_only=True):
    made_with: dict[str, str]  # by experiment
    outcomes: list[Outcome]


def wanted(names: Iterable[str], seeds: Iterable[int], *, full: bool) -> list[Training]:
    """Return the trainings to run, seed by seed.

    So an interrupted command leaves something of every experiment.
    """
    names = list(names)
    return [
        training
        for seed in seeds
        for name in names
        for training in EXPERIMENTS[name].trainings(seed, full=full)
    ]


def note_commit(made_with: dict[str, str], experiment: str, now: str) -> None:
    """Add this commit to those that the experiment's other trainings were made with."""
    before = made_with.get(experiment, "")
    if now not in before:
        made_with[experiment] = f"{before} {now}".strip()


def train(trainings: list[Training], data: Path, raw: Path) -> None:
    known = known_outcomes(raw)
    outcomes, now = list(known.outcomes), made_with()
    all_made_with = dict(known.made_with)
    done = [outcome.training for outcome in outcomes]
    ahead = [training for training in trainings if training not in done]

    def keep(outcome: Outcome) -> None:
        outcomes.append(outcome)
        note_commit(all_made_with, outcome.training.experiment, now)
        everything = Everything(made_with=all_made_with, outcomes=outcomes)
        text = msgspec.json.format(msgspec.json.encode(everything), indent=1).decode()
        files.write_text(raw, text)
        training = outcome.training
        ended = "diverged" if outcome.diverged else f"{outcome.epochs[-1].accuracy:.2%} right"
        print(f"{training.experiment}, {training.label}, seed {training.seed}: {ended}", flush=True)

    def show(epoch: Epoch) -> None:
        print(f"  {epoch.wall_s:6.0f} s  loss {epoch.train_loss:.4f}, tested", end=" ")
        print(f"{epoch.test_loss:.4f}, accuracy {epoch.accuracy:.2%}", flush=True)

    if ahead:
        with Cluster(ClusterSpec(nodes=WORKERS), loopback=True) as cluster:
            train_to_the_end(cluster, ahead, folder=data, on_epoch=show, on_outcome=keep)


def page(everything: Everything, stem: str, *, full: bool) -> str:
    experiments = [(one, one.of(everything, full=full)) for one in EXPERIMENTS.values()]
    shown = [outcome for _, found in experiments for outcome in found]
    lines = [
        "# Convergence with gTop-k",
        "",
        f"Made by `python benchmarks/convergence.py`. {WORKERS} workers on loopback. "
        "Dense runs use torch's own wrapper and SGD with momentum 0.9; gTop-k runs use "
        "`DistributedDataParallel(compression=GTopK(…))` by butterfly over the whole model with "
        "momentum 0.9 (corrected before selection; masked: it restarts where elements were "
        "applied), the paper's densities of warm-up (0.25, 0.0725, 0.015, 0.004; none "
        "below the final one), and otherwise the same settings, seeds and epochs. Two things "
        "cannot be the same where momentum is corrected before selection: weight decay is added "
        "after it, ten times as strong, which is what momentum makes of it in the long run; and "
        "gradient norms are clipped on each worker, before selection, where dense runs clip the "
        "mean. `gtopk-tree-lossy` is the paper's own tree, which "
        "forgets some of what it drops. All ranks of "
        f"{sum(outcome.same_weights for outcome in shown)} of {len(shown)} trainings ended with "
        "the same bits.",
    ]
    for experiment, found in experiments:
        dense = experiment.full if full else experiment.dense
        if found:
            lines += ["", f"## {experiment.title_of(full=full)}", "", _settings(found, dense), ""]
            lines += [*_table(found), "", everything.made_with.get(dense.experiment, "")]
    if shown:
        lines += [
            "",
            "## Curves",
            "",
            f"![loss and accuracy by epoch]({stem}.svg)",
        ]
    return "\n".join(lines) + "\n"


def _settings(found: list[Outcome], dense: Training) -> str:
    longest = max(found, key=lambda one: len(one.epochs))
    steps = f" of {longest.epochs[0].step} steps" if longest.epochs else ""
    clipped = "" if dense.clip_norm is None else f", gradient norm clipped at {dense.clip_norm:g}"
    seen = "" if dense.crop is None else f" (random squares of {dense.crop} pixels)"
    decay = f", weight decay {dense.weight_decay:g}" if dense.weight_decay else ""
    return (
        f"{longest.parameters:,} parameters; {dense.epochs} epochs{steps}, "
        f"{dense.batch_size} examples{seen} a worker, learning rate "
        f"{dense.learning_rate:g} (a rise over {dense.warmup_epochs:g} epochs, the warm-up, then a "
        f"cosine to zero){decay}{clipped}."
    )


def _table(found: list[Outcome]) -> list[str]:
    """Return ends of trainings: mean and deviation over seeds, and differences seed by seed."""
    lines = [
        "| | seeds | test accuracy | points from dense | test loss | from dense | train loss |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    dense = {
        one.training.seed: one.epochs[-1]
        for one in found
        if one.training.density is None and not one.diverged
    }
    for label in _labels(found):
        of_label = [one for one in found if one.training.label == label]
        ends = {one.training.seed: one.epochs[-1] for one in of_label if not one.diverged}
        if not ends:
            lines.append(f"| {label} | {len(of_label)} | diverged | | | | |")
            continue
        both = [seed for seed in ends if seed in dense and label != DENSE]
        points = [100 * (ends[seed].accuracy - dense[seed].accuracy) for seed in both]
        percent = [100 * (ends[seed].test_loss / dense[seed].test_loss - 1) for seed in both]
        lines.append(
            f"| {label} | {len(ends)} | {spread([100 * end.accuracy for end in ends.values()])} % "
            f"| {_difference(points)} "
            f"| {spread([end.test_loss for end in ends.values()], digits=3)} "
            f"| {_difference(percent, unit=' %')} "
            f"| {spread([end.train_loss for end in ends.values()], digits=3)} |"
        )
    return lines


def _labels(found: list[Outcome]) -> list[str]:
    """Return the labels, dense first, then from the highest density to the lowest."""
    densities = {one.training.label: one.training.density or 1.0 for one in found}
    return sorted(densities, key=lambda label: -densities[label])


def spread(numbers: list[float], digits: int = 2) -> str:
    deviation = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{digits}f}{deviation}"


def _difference(numbers: list[float], unit: str = "") -> str:
    return f"{mean(numbers):+.2f}{unit}" if numbers else ""


def draw(everything: Everything, output: Path, *, full: bool) -> None:
    charts = []
    for experiment in EXPERIMENTS.values():
        found = experiment.of(everything, full=full)
        if found:
            charts.append(
                alt.hconcat(
                    _curves(found, "train loss", experiment.title_of(full=full)),
                    _curves(found, "test accuracy, %", ""),
                ).resolve_scale(color="shared")
            )
    if charts:
        alt.vconcat(*charts).resolve_scale(color="independent").save(
            output.with_name(f"{output.name}.svg")
        )


def _curves(found: list[Outcome], measure: str, title: str) -> alt.LayerChart:
    """Draw a thin line for each seed, and a thick one for their mean."""
    ticks = range(1, 1 + max(len(one.epochs) for one in found))
    rows = [
        {
            "training": one.training.label,
            "seed": one.training.seed,
            "epoch": number + 1,
            "train loss": epoch.train_loss,
            "test accuracy, %": 100 * epoch.accuracy,
        }
        for one in found
        for number, epoch in enumerate(one.epochs)
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("epoch:Q", axis=alt.Axis(values=list(ticks))),
        color=alt.Color(
            "training:N", sort=_labels(found), title=None, legend=alt.Legend(labelLimit=0)
        ),
    )
    scale = alt.Scale(zero=False)
    seeds = base.mark_line(strokeWidth=0.7, opacity=0.5).encode(
        y=alt.Y(f"{measure}:Q", scale=scale, title=measure), detail="seed:N"
    )
    means = base.mark_line(strokeWidth=2, point=True).encode(
        y=alt.Y(f"{measure}:Q", aggregate="mean", scale=scale, title=measure)
    )
    layers = alt.LayerChart(layer=[seeds, means])
    return layers.properties(width=300, height=200, title=title)


def write_losses(found: list[Outcome], run: Path) -> None:
    """Write the losses of the first seed's trainings into a run's folder."""
    found = [one for one in found if one.training.seed == SEEDS[0]]
    files.write(run / "losses.json", Losses(series=tuple(one.losses() for one in found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="data sets")
    parser.add_argument("--only", choices=list(EXPERIMENTS), action="append")
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append")
    parser.add_argument("--full", action="store_true", help="whole widths, the papers' epochs")
    parser.add_argument("--again", action="store_true", help="train nothing")
    parser.add_argument("--losses", type=Path, metavar="RUN", help="with --only: a run's folder")
    options = parser.parse_args()
    raw = options.output.with_suffix(".json")
    if not options.again:
        train(
            wanted(options.only or EXPERIMENTS, options.seed or SEEDS, full=options.full),
            options.data.resolve(),
            raw,
        )
    for name in (options.only or []) if options.losses else []:
        write_losses(EXPERIMENTS[name].of(known_outcomes(raw), full=options.full), options.losses)
    draw(known_outcomes(raw), options.output, full=options.full)
    files.write_text(
        options.output.with_suffix(".md"),
        page(known_outcomes(raw), options.output.name, full=options.full),
    )


def known_outcomes(raw: Path) -> Everything:
    if not raw.exists():
        return Everything(made_with={}, outcomes=[])
    return msgspec.json.decode(raw.read_bytes(), type=Everything)


if __name__ == "__main__":
    main()
