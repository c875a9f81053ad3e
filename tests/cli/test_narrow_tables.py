"""Tables in narrow terminals: nothing wider than there is space for, and no number cut."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave import CollectiveCost, Curve, Level, Link, Links, Network
from gradweave._src.cli import bench_collectives, bench_training, calibrate, main, tables
from gradweave._src.cli.narrow_tables import Column, drawn_width, fit, shortened
from gradweave._src.measure.timings import Timing
from gradweave._src.results import Result

NARROW = 80


def column(name, *cells, kind="number"):
    return Column(name, cells, kind)


def names_of(fitted):
    return [[placed.column.name for placed in table] for table in fitted.tables]


def test_what_fits_stays_as_it_is():
    columns = [column("runtime", "a", "b", kind="name"), column("nodes", "4", "4")]
    fitted = fit(columns, 80)
    assert fitted.same == {}
    assert names_of(fitted) == [["runtime", "nodes"]]
    assert [placed.width for placed in fitted.tables[0]] == [7, 5]


def test_columns_that_say_the_same_are_said_once():
    columns = [column("runtime", "a", "b", kind="name"), column("nodes", "4", "4")]
    fitted = fit(columns, 15)
    assert fitted.same == {"nodes": "4"}
    assert names_of(fitted) == [["runtime"]]


def test_one_row_keeps_its_columns():
    fitted = fit([column("runtime", "a", kind="name"), column("nodes", "4")], 15)
    assert fitted.same == {}
    assert names_of(fitted) == [["runtime", "nodes"]]


def test_headers_are_folded_before_names_are_shortened():
    long = "gradients-of-everything"
    columns = [column("way", long, "x", kind="name"), column("measured ms", "12.3", "45.6")]
    (table,) = fit(columns, drawn_width([len(long), len("measured")])).tables
    assert [placed.width for placed in table] == [len(long), len("measured")]
    assert table[0].cells[0] == long


def test_names_lose_their_middle():
    assert shortened("encoder.layer.11.output.dense.weight", 20) == "encoder.la…se.weight"
    assert shortened("short", 20) == "short"
    assert len(shortened("x" * 100, 12)) == 12


def test_the_rest_follows_in_another_table():
    """Both begin with what tells the rows apart: here two columns, for one is not enough."""
    columns = [
        column("planner", "ddp", "ddp", "optimal", kind="name"),
        column("workers", "4", "16", "4"),
        *(column(f"number-{n}", "1,000.0", "2,000.0", "3,000.0") for n in range(4)),
    ]
    fitted = fit(columns, 50)
    assert names_of(fitted) == [
        ["planner", "workers", "number-0", "number-1"],
        ["planner", "workers", "number-2", "number-3"],
    ]


WORDS = st.text("abcdefgh -.", min_size=1, max_size=40)
KINDS = st.sampled_from(["number", "name", "text"])


@st.composite
def tables_of(draw):
    rows = draw(st.integers(0, 4))
    names = draw(st.lists(WORDS, min_size=1, max_size=8, unique=True))
    cells = st.lists(WORDS, min_size=rows, max_size=rows)
    return [Column(name, tuple(draw(cells)), draw(KINDS)) for name in names]


@given(tables_of(), st.integers(20, 200))
def test_nothing_is_lost_and_numbers_are_whole(columns, width):
    fitted = fit(columns, width)
    shown = {placed.column.name for table in fitted.tables for placed in table}
    assert shown | set(fitted.same) == {column.name for column in columns}
    for table in fitted.tables:
        for placed in table:
            if placed.column.kind == "number":
                assert placed.cells == list(placed.column.cells)
                assert placed.width >= max(map(len, placed.cells), default=0)
        could_fit = drawn_width(placed.column.least for placed in table) <= width
        assert (drawn_width(placed.width for placed in table) <= width) == could_fit


def timing(algorithm, nbytes):
    return Timing(
        op="all-reduce",
        algorithm=algorithm,
        ranks=4,
        bytes=nbytes,
        median_s=nbytes * 1.23456e-8,
        p10_s=nbytes * 1.2e-8,
        p90_s=nbytes * 1.3e-8,
        repeats=7,
        algbw_bytes_per_s=81_000_000.0,
        busbw_bytes_per_s=121_500_000.0,
        correct=True,
    )


def print_timings():
    rows = [
        bench_collectives.Row(nodes=4, ranks_per_node=1, rate="1gbit", timing=timing(name, nbytes))
        for name in ("native", "recursive-doubling")
        for nbytes in (1_000_000, 64_000_000)
    ]
    bench_collectives._print(rows, as_json=False)


def print_results():
    bench_training._print(
        [
            Result(
                trace=trace,
                runtime=runtime,
                workers=nodes,
                nodes=nodes,
                ranks_per_node=1,
                rate="1gbit",
                iteration_s=1.98765 + number,
                predicted_s=1.87654 + number,
                prediction_error=-0.0559 * (number + 1),
                compute_s=0.4567,
                exposed_s=1.53095 + number,
                messages=161,
                speedup=1.0234 - number / 10,
                repeats_s=(1.98765 + number,),
                correct=True,
                bucket_cap_mb=0.25 if runtime.endswith("tuned") else None,
            )
            for trace in ("resnet50", "densenet201")
            for nodes in (2, 4)
            for number, runtime in enumerate(
                ("torch-ddp", "torch-fp16-tuned", "bsp-reduce-broadcast:linear-pipeline")
            )
        ]
    )


def print_calibration():
    sizes = tuple(1024 * 8**power for power in range(6))
    calibrate._print(
        Network(
            name="lab-4x1-1gbit",
            source="made up",
            costs=tuple(
                CollectiveCost(
                    operation="all-reduce",
                    collective=collective,
                    workers=4,
                    beside=beside,
                    cost=Curve(
                        nbytes=sizes, measured_s=tuple(1e-3 + size * s_per_byte for size in sizes)
                    ),
                    latency_s=0.00123,
                )
                for collective, s_per_byte in (("native", 1.1e-8), ("recursive-doubling", 2.2e-8))
                for beside in ("nothing", "compute")
            ),
            links=Links(levels=(Level(members=None, link=Link(latency_s=1e-4, s_per_byte=8e-9)),)),
        )
    )


def printing(*argv):
    def run():
        assert main(argv) == 0

    return run


BERT = ["--trace", "bert-base", "--network", "k80-10gbe"]
TABLES = {
    "simulate": printing(
        *["simulate", *BERT, "--workers", "4,1024", "--passes", "backward,both"],
        *["--planner", "naive,ddp,optimal:0.05"],
    ),
    "plan": printing("plan", *BERT, "--workers", "16"),
    "advise": printing("advise", *BERT, "--workers", "16"),
    "calibrate": print_calibration,
    "bench training": print_results,
    "bench collectives": print_timings,
    "list": printing("list"),
}


def texts(out):
    """Without what lies between columns and between lines."""
    return re.sub(r"[\s│]", "", "".join(line for line in out.splitlines() if "│" in line))


def drawn(out):
    return [line for line in out.splitlines() if line[:1] in "│┃┏┡└"]


def numbers(out):
    lines = [line for line in out.splitlines() if "│" in line or line.startswith("in all rows")]
    return {text for line in lines for text in re.findall(r"(?<![\w.])-?[\d,]+\.\d+", line)}


@pytest.mark.parametrize("verb", TABLES)
def test_tables_of_every_verb_in_a_narrow_terminal(capsys, monkeypatch, verb):
    TABLES[verb]()
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(NARROW))
    TABLES[verb]()
    narrow = capsys.readouterr().out
    if verb != "list":
        assert max(map(len, drawn(wide))) > NARROW, "this case shows nothing"
    assert max(map(len, drawn(narrow))) <= NARROW
    assert numbers(narrow) >= numbers(wide)


def test_long_texts_are_folded_and_whole(capsys, monkeypatch):
    """Code is to be copied: of a word that is too long nothing may be left out."""
    monkeypatch.setenv("COLUMNS", str(NARROW))
    code = "optimizer = torch.optim.Adam(model.parameters(), lr=0.001, betas=(0.9, 0.999))"
    tables.print_table("ways", {"way": ["sharded"], "switched on by": [code]})
    assert "".join(code.split()) in texts(capsys.readouterr().out)


def test_columns_that_are_constant_stand_below_the_title(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(NARROW))
    print_results()
    out = capsys.readouterr().out
    assert "\nin all rows: messages 161, compute ms 456.7, correct yes\n" in out


def test_a_terminal_has_its_width(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert tables._space() == 100
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert tables._space() == tables.UNLIMITED_WIDTH
