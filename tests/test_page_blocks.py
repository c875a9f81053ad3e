"""Code and commands of README and docs: each is run, here or elsewhere, or has a reason why not."""

import os
import re
import shlex
from pathlib import Path

import commands
import pytest
from pages import ROOT, Block, blocks, make_checkout, pages
from ranks import on_processes

from gradweave._src.cli import _parser, main

BLOCKS = {path: blocks(page) for path, page in pages().items()}
# Pages whose blocks are run as a whole by a test of their own.
OWN_TESTS = {
    "docs/cluster.md": "tests/lab/test_cluster_page.py",
    "docs/elastic.md": "tests/lab/test_elastic.py",
    "docs/integrations.md": "tests/integrations/test_scripts.py",
    "docs/tutorial.md": "tests/test_tutorial.py",
}
# By page and how the block begins.
REASONS = {
    ("README.md", "git clone"): "tests/cli/test_demo.py runs it, and `make test` runs this",
    ("README.md", "source .venv"): "tests/cli/test_readme_commands.py runs it",
    ("README.md", "# Into an environment"): "tests/test_package.py builds and installs the package",
    ("docs/accelerators.md", "gradweave selftest"): "GPUs; tests/cli/test_selftest.py has the CPU",
    ("docs/doctor.md", "torchrun --nnodes 4 …"): "tests/lab/test_lab_doctor.py does the same",
    ("docs/lab.md", "gradweave calibrate"): "minutes; tests/cli/test_bench.py runs these verbs",
    ("docs/report.md", "gradweave bench"): "minutes; tests/report/test_report_cli.py runs both",
    ("docs/runtime.md", "gradweave report"): "docs/tutorial.md has it, which is run",
    ("docs/sparsification-explained.md", "exchanger ="): "of the inside: tests/sparse/test_step.py",
    ("docs/torch-versions.md", "make test-torch"): "gigabytes; the page says what came of it",
}
# Titles with which a block says on its page why it is not run, or where.
TOLD = ("not run: ", "as in ", "run in ")
# Commands that need nothing but what is shipped, and no time.
PURE = {"plan", "simulate", "advise", "list"}
OF_THE_LAB = {"docs/lab.md", "docs/debug-a-hang.md"}  # tests/lab/test_lab_page.py has their Python


def is_excused(path, block):
    begins = any(path == page and block.text.startswith(begin) for page, begin in REASONS)
    return path in OWN_TESTS or begins or block.title.startswith(TOLD)


def of_language(language):
    return [
        (path, block)
        for path, found in BLOCKS.items()
        for block in found
        if block.language == language
    ]


def logical_lines(text):
    """Commands of a shell block, without comments and joined where they go on."""
    for line in text.replace("\\\n", " ").split("\n"):
        if words := shlex.split(line, comments=True):
            yield words


def asked_of_us(words):
    """What `gradweave` is given in a command, if it is in there."""
    for place, word in enumerate(words):
        if word == "gradweave" and (place == 0 or words[place - 1] == "-m" or "=" in words[0]):
            return words[place + 1 :]
    return None


def is_pure(block):
    asked = [asked_of_us(words) for words in logical_lines(block.text)]
    return all(
        given is not None and given[0] in PURE and not any(".json" in word for word in given)
        for given in asked
    )


SHELL = of_language("sh")
TO_RUN = [(path, block) for path, block in SHELL if not is_excused(path, block) and is_pure(block)]
IN_THE_LAB = [
    words
    for path, block in SHELL
    if path in OF_THE_LAB and not is_excused(path, block)
    for words in logical_lines(block.text)
]


def test_no_fence_is_misread():
    """Every one is of a language, or shows what is printed."""
    for path, page in pages().items():
        assert len(re.findall(r"^ *```", page, re.MULTILINE)) == 2 * len(BLOCKS[path]), path
        for block in BLOCKS[path]:
            assert not block.text.startswith(("gradweave ", "torchrun ")) or block.language == "sh"


def test_every_command_is_run_or_says_why_not():
    for path, block in SHELL:
        is_run = (path, block) in TO_RUN or path in OF_THE_LAB
        assert is_run != is_excused(path, block) or path in OF_THE_LAB, (path, block.text)


def test_reasons_are_for_blocks_that_exist():
    for page, begin in REASONS:
        assert any(block.text.startswith(begin) for block in BLOCKS[page]), begin
    for test in OWN_TESTS.values():
        assert (ROOT / test).is_file()
    for found in BLOCKS.values():
        for block in found:
            elsewhere = re.match(r"(?:run|as) in ([\w/.-]+)", block.title)
            assert elsewhere is None or (ROOT / elsewhere[1]).is_file(), block.title


@pytest.mark.parametrize(("path", "block"), TO_RUN, ids=[path for path, _ in TO_RUN])
def test_commands_run(path, block, capsys):
    for words in logical_lines(block.text):
        assert main(asked_of_us(words)) == 0
    assert capsys.readouterr().out


THREADS = {"gradweave communication", "gradweave probing", "gradweave planning"}


def inline_commands():
    for path, page in pages().items():
        for text in re.findall(r"`(gradweave [a-z][^`]*)`", page):
            if text not in THREADS:
                yield path, shlex.split(text.replace("\n", " "))


def test_every_command_has_options_that_exist():
    """Also those that are not run, and those in sentences."""
    in_blocks = [(path, words) for path, block in SHELL for words in logical_lines(block.text)]
    checked = 0
    for path, words in [*in_blocks, *inline_commands()]:
        given = asked_of_us(words)
        if given and not any("…" in word for word in given):
            try:
                _parser().refuse_unknown(given)
            except SystemExit:
                pytest.fail(f"{path}: {shlex.join(words)}")
            checked += 1
    assert checked > 60


@pytest.mark.long
def test_commands_of_the_lab_run(tmp_path):
    """Minutes on a busy machine: each starts a cluster of its own."""
    checkout = make_checkout(tmp_path)
    (checkout / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        'dist.init_process_group("gloo")\n'
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
    )
    assert len(IN_THE_LAB) >= 4
    for words in IN_THE_LAB:
        entered = f"source .venv/bin/activate\n{shlex.join(words)}"
        done = commands.run("bash", "-ec", entered, cwd=checkout)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"


# The names that a page's Python may use without having made them; each block begins with its own
# model, unless the block before has wrapped one for it.
PRELUDE = """
from itertools import islice
import gradweave, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from gradweave import DistributedDataParallel as DDP, GTopK
from torch import nn
def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
def train(given, steps=8):  # a model for some steps, or a batch once
    wrapped, steps = (given, steps) if isinstance(given, nn.Module) else (model, 1)
    for _ in range(steps):
        wrapped(torch.ones(4, 6)).square().mean().backward()
        losses.append(1.0)
losses, loss_function, folder, epoch = [], nn.MSELoss(), "of-dcp", 3
inputs, targets = torch.ones(4, 6), torch.zeros(4, 2)
loader = [(inputs, targets)] * 3
model, module = small(), small()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
ddp = nn.parallel.DistributedDataParallel(small())
"""
ANEW = """
losses.clear()
model = small()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
WRAPS = re.compile(r"(?:DDP|Parallel|Overlap)\(model")
ASKS_OF_A_TRAINING = re.compile(r"model\.(?:recipe|slow_ranks)\(")
STEPS_OF_PLANNING = 120  # which takes 100 at most


def run_pages(group, found, scratch):
    """The blocks of each page in their order, on this rank; in folders that all ranks share."""
    for path, sources in found.items():
        where = Path(scratch, path.replace("/", "-"))
        where.mkdir(exist_ok=True)
        os.chdir(where)
        names = {}
        exec(PRELUDE, names)  # noqa: S102 our own
        for source in sources:
            if WRAPS.search(source):
                exec(ANEW, names)  # noqa: S102
            if ASKS_OF_A_TRAINING.search(source):
                names["train"](names["model"], steps=STEPS_OF_PLANNING)
            text = source.replace("...\n", "train(model)\n")
            exec(compile(text, f"{path}: {text}", "exec"), names)  # noqa: S102 our own page
        del names
        group.barrier().wait()
    return sorted(found)


def python_sources():
    found = {}
    for path, block in of_language("python"):
        if not is_excused(path, block) and path not in OF_THE_LAB:
            found.setdefault(path, []).append(block.text)
    return found


def test_the_python_of_pages_runs(tmp_path):
    """Seconds: two ranks run all pages, one after the other, and one plan is found on the way."""
    sources = python_sources()
    assert len(sources) > 6
    done = on_processes(2, run_pages, sources, tmp_path, scratch=tmp_path)
    assert done == [sorted(sources)] * 2


def test_a_block_that_fails_is_noticed(tmp_path):
    with pytest.raises(Exception, match="no_such_name"):
        on_processes(1, run_pages, {"page.md": ["no_such_name\n"]}, tmp_path, scratch=tmp_path)


def test_blocks_are_read_with_their_titles():
    page = '# a\n\n```sh title="x y"\none\n```\n\n  ```\n  two\n  ```\n'
    assert blocks(page) == [Block("sh", "x y", "one\n"), Block("", "", "  two\n")]
