"""What rounded gradients learn: ``python benchmarks/rounded_convergence.py OUTPUT``.

A small transformer on tiny Shakespeare and ResNet-20 on images of CIFAR-10, three seeds, equal
steps, on four emulated nodes at 100 Mbit/s: exact, rounded, 8 bits with and without error feedback,
PowerSGD and gTop-k. Writes OUTPUT.json after each training, OUTPUT.md and OUTPUT.svg. About an hour
on two cores; a training that OUTPUT.json has is not run again, ``--again`` trains nothing.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev

import altair as alt
import msgspec
from convergence import Everything, known_outcomes, note_commit, spread
from made_with import made_with
from msgspec.structs import replace

from gradweave._src import files
from gradweave._src.bench.convergence import Outcome, Training, train_to_the_end
from gradweave._src.bench.wires import FORGETFUL
from gradweave._src.lab import Cluster, ClusterSpec

NODES, RATE = 4, "100mbit"
SEEDS = (0, 1, 2)
WIRES = ("rounded", "bf16", "int8", FORGETFUL, "powersgd:2")

TRANSFORMER = Training(
    experiment="char-transformer",
    model="char-transformer",
    width=72,
    data="shakespeare",
    epochs=2,
    batch_size=64,
    learning_rate=0.3,
    clip_norm=1.0,
    warmup_epochs=0.5,
)
RESNET20 = Training(
    experiment="resnet20",
    model="resnet20",
    width=16,
    data="cifar10",
    epochs=4,
    batch_size=32,
    learning_rate=0.1,
    weight_decay=5e-4,
    crop=24,
    warmup_epochs=0.5,
)
SPARSE = {
    "char-transformer": {"density": 0.01, "momentum": "corrected"},
    "resnet20": {"density": 0.01, "momentum": "masked"},
}
EXPERIMENTS = {
    "char-transformer": ("A small GPT-2 on tiny Shakespeare", TRANSFORMER),
    "resnet20": ("ResNet-20 on 10,000 images of CIFAR-10", RESNET20),
}


def trainings(exact: Training, seed: int) -> list[Training]:
    exact = replace(exact, seed=seed)
    rounded = [replace(exact, wire=wire) for wire in WIRES]
    return [exact, *rounded, replace(exact, **SPARSE[exact.experiment])]


def train(names: list[str], seeds: list[int], data: Path, raw: Path) -> None:
    known = known_outcomes(raw)
    outcomes = known.outcomes
    made, now = dict(known.made_with), made_with()
    done = [outcome.training for outcome in outcomes]
    wanted = [
        training
        for seed in seeds
        for name in names
        for training in trainings(EXPERIMENTS[name][1], seed)
        if training not in done
    ]

    def keep(outcome: Outcome) -> None:
        outcomes.append(outcome)
        note_commit(made, outcome.training.experiment, now)
        everything = Everything(made_with=made, outcomes=outcomes)
        encoded = msgspec.json.format(msgspec.json.encode(everything), indent=1)
        files.write_text(raw, encoded.decode())
        training = outcome.training
        ended = "diverged" if outcome.diverged else f"loss {outcome.epochs[-1].test_loss:.4f}"
        print(f"{training.experiment}, {training.label}, {training.seed}: {ended}", flush=True)

    with Cluster(ClusterSpec(nodes=NODES, rate=RATE)) as cluster:
        train_to_the_end(cluster, wanted, folder=data, on_epoch=lambda _: None, on_outcome=keep)


def page(everything: Everything, stem: str) -> str:
    lines = [
        "# Convergence with rounded gradients",
        "",
        "Made by `python benchmarks/rounded_convergence.py`.",
        "",
        f"{NODES} emulated nodes at {RATE[:-4]} Mbit/s; equal steps, SGD with momentum 0.9, the "
        "same settings and seeds for all. *dense* is torch's own wrapper. `rounded`, `bf16` and "
        f"`int8` are `precision=` of ours; `{FORGETFUL}` is 8 bits without error feedback; "
        "`powersgd:2` torch's hook of rank 2 after 20 exact steps; gTop-k after its warm-up. Mean "
        "and standard deviation over seeds; differences from dense seed by seed, in standard "
        "deviations of dense. Seconds are of the whole training with everything in it, planning "
        "as well, on two cores that four workers share.",
    ]
    for name, (title, exact) in EXPERIMENTS.items():
        found = [one for one in everything.outcomes if one.training.experiment == name]
        if found:
            steps = max(one.epochs[-1].step for one in found if one.epochs)
            parameters = found[0].parameters
            lines += [
                "",
                f"## {title}",
                "",
                f"{parameters:,} parameters, {steps} steps, {exact.batch_size} examples a worker, "
                f"learning rate {exact.learning_rate:g}.",
                "",
                *_table(found),
                "",
                everything.made_with.get(name, ""),
            ]
    lines += ["", f"![loss over wall time]({stem}.svg)"]
    return "\n".join(lines) + "\n"


def _table(found: list[Outcome]) -> list[str]:
    lines = [
        "| | seeds | test loss | from dense | accuracy | train loss | seconds | same bits |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    ends = {(o.training.label, o.training.seed): o.epochs[-1] for o in found if not o.diverged}
    dense = {seed: end for (label, seed), end in ends.items() if label == "dense"}
    deviation = stdev(end.test_loss for end in dense.values()) if len(dense) > 1 else None
    for label in dict.fromkeys(one.training.label for one in found):
        of_label = {seed: end for (name, seed), end in ends.items() if name == label}
        if not of_label:
            lines.append(f"| {label} | 0 | diverged | | | | | |")
            continue
        apart = [
            end.test_loss - dense[seed].test_loss for seed, end in of_label.items() if seed in dense
        ]
        in_deviations = ""
        if deviation and apart and label != "dense":
            in_deviations = f" ({mean(apart) / deviation:+.1f} s.d.)"
        test_losses = [end.test_loss for end in of_label.values()]
        same = all(one.same_weights for one in found if one.training.label == label)
        lines.append(
            f"| {label} | {len(of_label)} | {spread(test_losses, digits=3)} "
            f"| {mean(apart or [0.0]):+.4f}{in_deviations} "
            f"| {spread([100 * e.accuracy for e in of_label.values()], digits=1)} % "
            f"| {spread([e.train_loss for e in of_label.values()], digits=3)} "
            f"| {mean(e.wall_s for e in of_label.values()):.0f} | {'yes' if same else 'no'} |"
        )
    return lines


def draw(everything: Everything, output: Path) -> None:
    charts = []
    for name, (title, _) in EXPERIMENTS.items():
        rows = [
            {"training": one.training.label, "seed": one.training.seed, "seconds": epoch.wall_s}
            | {"test loss": epoch.test_loss}
            for one in everything.outcomes
            if one.training.experiment == name
            for epoch in one.epochs
        ]
        if rows:
            charts.append(
                alt.Chart(alt.InlineData(values=rows))
                .mark_line(point=True)
                .encode(
                    x=alt.X("seconds:Q", title=f"seconds at {RATE[:-4]} Mbit/s"),
                    y=alt.Y("test loss:Q", scale=alt.Scale(zero=False)),
                    color=alt.Color("training:N", title=None),
                    detail="seed:N",
                )
                .properties(width=420, height=280, title=title)
            )
    if charts:
        alt.hconcat(*charts).save(output.with_name(f"{output.name}.svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="data sets")
    parser.add_argument("--only", choices=list(EXPERIMENTS), action="append")
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append")
    parser.add_argument("--again", action="store_true", help="train nothing")
    options = parser.parse_args()
    raw = options.output.with_suffix(".json")
    if not options.again:
        names, seeds = options.only or list(EXPERIMENTS), options.seed or list(SEEDS)
        train(names, seeds, options.data.resolve(), raw)
    everything = known_outcomes(raw)
    draw(everything, options.output)
    files.write_text(options.output.with_suffix(".md"), page(everything, options.output.name))


if __name__ == "__main__":
    main()
