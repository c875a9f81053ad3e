"""docs/cluster.md as it stands: real torchrun agents, one on each node of an emulated cluster."""

import os
import re
import subprocess
from contextlib import chdir

import pytest
import torch
from pages import ROOT, blocks, make_checkout, section
from ranks import on_processes
from torch import nn

from gradweave._src import files
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.recipe import Recipe
from gradweave._src.report.folders import read_folders
from gradweave._src.training_record import Steps

PAGE = (ROOT / "docs" / "cluster.md").read_text()
SHELL = [block for block in blocks(PAGE) if block.language == "sh"]
INSTALL, SETTINGS, EVERYWHERE, FIRST, SLURM = (
    "install",
    "settings on every machine",
    "on every machine",
    "on the first machine",
    "slurm",
)
STEPS = [block for block in SHELL if block.title in {EVERYWHERE, FIRST}]
(BATCH,) = (block.text for block in SHELL if block.title == SLURM)
KEPT = ("kept", "again")
NODES = 2
LIMIT_S = 300.0  # for half a minute's work, on a busy machine

# What Slurm would do: start a task on each machine of the job, and list the machines' names. Each
# node runs the script, so here a task is just started.
STAND_INS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
    "scontrol": f"printf 'node%d\\n' {' '.join(map(str, range(NODES)))}",
}
SLURM_TELLS = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": f"node[0-{NODES - 1}]",
    "SLURM_JOB_NUM_NODES": str(NODES),
    "SLURM_CPUS_PER_TASK": "1",
}


def in_the_lab(test):
    """Minutes in all; by one process, because blocks follow each other."""
    return pytest.mark.long(pytest.mark.xdist_group("cluster page")(test))


def test_every_block_says_who_runs_it():
    titles = [block.title for block in SHELL]
    assert set(titles) == {INSTALL, SETTINGS, EVERYWHERE, FIRST, SLURM}
    assert titles[:2] == [INSTALL, SETTINGS]  # all others rely on these
    assert [titles.count(title) for title in (INSTALL, SETTINGS)] == [1, 1]


def test_installing_is_as_in_the_readme():
    """Not run: it takes minutes, and `make test` has done the same."""
    (readme,) = blocks(section((ROOT / "README.md").read_text(), "Install"))
    (pinned,) = [line for line in readme.text.splitlines() if "--constraint" in line]
    assert pinned in SHELL[0].text
    assert "--constraint constraints.txt --editable" in pinned
    assert "--constraint constraints.txt\n" in (ROOT / "Makefile").read_text()  # PIP_OPTIONS
    assert "$(PIP_OPTIONS) --editable '.[dev]'" in (ROOT / "Makefile").read_text()


def test_what_is_typed_uses_what_was_set():
    set_before = set(re.findall(r"export (\w+)=", SHELL[1].text))
    for block in STEPS:
        assert set(re.findall(r"\$(\w+)", block.text)) <= set_before, block.text


def test_slurm_reads_its_options_before_the_first_command():
    first, *lines = BATCH.splitlines()
    assert first == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH --")]
    assert lines[: len(options)] == options
    subprocess.run(["bash", "-n"], input=BATCH, text=True, check=True)


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def losses_of(model, *, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_as_written(group, sources, folder):
    """The page's Python, with a training where it has none; what is carried out in the end."""
    os.chdir(folder)
    names = {"model": small_network(), "module": small_network(), "losses_of": losses_of}
    for source in sources:
        training = source.replace("...  # train as ever", "losses = losses_of(model, steps=120)")
        exec(training, names)  # noqa: S102 our own page
    return names["model"].plan


def test_the_python_runs(tmp_path):
    """Seconds: until planning has ended."""
    sources = [block.text for block in blocks(PAGE) if block.language == "python"]
    assert "...  # train as ever" in sources[0]
    plans = on_processes(2, run_as_written, sources, tmp_path, scratch=tmp_path)
    recipe = files.read(tmp_path / "recipe.json", Recipe)
    assert plans == [recipe.plan] * 2
    assert (tmp_path / "runs" / "mine" / "results.json").is_file()


class Nodes:
    """A cluster whose machines share a checkout, and what they were told and said."""

    def __init__(self, cluster, checkout):
        self.cluster, self.checkout = cluster, checkout
        self._answers = []

    def answer_to(self, command):
        """What each said to the block with this command, which comes after those before it."""
        (place,) = [place for place, block in enumerate(STEPS) if command in block.text]
        while len(self._answers) <= place:
            block = STEPS[len(self._answers)]
            asked = range(NODES) if block.title == EVERYWHERE else range(1)
            self._answers.append(
                self.run(
                    {n: own_settings(n) + (block.text if n in asked else "") for n in range(NODES)}
                )
            )
        return self._answers[place]

    def run(self, scripts, **env):
        """One shell for each node; the first command that fails ends all."""
        printed, everything = {node: [] for node in scripts}, []
        for node, script in scripts.items():
            (self.checkout / f"node{node}.sh").write_text(script)

        def take(line):
            everything.append(line.text)
            if not line.is_error:
                printed[line.rank].append(line.text)

        job = self.cluster.start(
            ["sh", "-c", 'exec bash -e "$(hostname).sh"'],
            env=env,
            on_line=take,
            once_per_node=True,
        )
        result = job.wait(LIMIT_S)
        assert result.exit_code == 0, "\n".join([*scripts.values(), *everything[-200:]])
        return {node: "\n".join(lines) for node, lines in printed.items()}


def own_settings(node):
    """As the page says: only the machine's number is another."""
    settings = SHELL[1].text
    assert settings.count("NODE_RANK=0 ") == 1
    return settings.replace("NODE_RANK=0 ", f"NODE_RANK={node} ")


@pytest.fixture(scope="module")
def nodes(namespaces, tmp_path_factory):
    checkout = make_checkout(tmp_path_factory.mktemp("checkout"))
    with chdir(checkout), Cluster(ClusterSpec(nodes=NODES, rate="200mbit")) as cluster:
        yield Nodes(cluster, checkout)


@in_the_lab
def test_the_doctor_looks_at_both_machines(nodes):
    answer = nodes.answer_to("gradweave doctor")
    assert "10.77.0.1" in answer[0]
    assert "10.77.1.1" in answer[0]


@in_the_lab
@pytest.mark.parametrize("run", ["mine", "static"])
def test_both_ways_train_one_world(nodes, run):
    answer = nodes.answer_to(f"--output runs/{run}\n")
    assert f"{NODES} ranks, loss 2." in answer[0]
    assert "\nMeasured: " in answer[0]
    assert "ranks, loss" not in answer[1]
    for name in ("trace.json", "network.json", "results.json", "losses.json"):
        assert (nodes.checkout / "runs" / run / name).is_file()


@in_the_lab
def test_the_second_run_begins_with_the_plan_of_the_first(nodes):
    """On a busy machine its steps may take longer than remembered, and it plans again."""
    answer = nodes.answer_to("GRADWEAVE_CACHE=plans")
    assert answer[0].count(" ranks, loss 2.") == 2
    runs = [files.read(nodes.checkout / "runs" / run / "steps.json", Steps) for run in KEPT]
    assert [run.stages[0].stage for run in runs] == ["not begun", "settled"]
    assert len(list((nodes.checkout / "plans").iterdir())) == 1


@in_the_lab
def test_torchs_own_wrapper_is_watched(nodes):
    assert "'messages': " in nodes.answer_to("--wrapper torch")[0]


@in_the_lab
def test_the_page_has_both_wrappers(nodes):
    nodes.answer_to("gradweave report")
    folders = read_folders([nodes.checkout / "runs" / run for run in ("mine", "torch")])
    assert [folder.run.results.rows[0].runtime for folder in folders] == ["gradweave", "torch-ddp"]
    assert all(len(ranks) == NODES for f in folders for ranks in f.run.measured.values())
    assert "Trainings side by side" in (nodes.checkout / "report.html").read_text()
    assert (nodes.checkout / "trace.json").stat().st_size > 0


@in_the_lab
def test_gradients_took_the_interface_that_was_set(nodes):
    """Each of the trainings sends nearly a megabyte in each of its steps."""
    nodes.answer_to("gradweave report")
    trainings = sum(block.text.count("examples/train_cluster.py") for block in STEPS)
    assert min(nodes.cluster.sent_bytes().by_node) > trainings * 5 * 10**7


@in_the_lab
def test_the_slurm_script(nodes, tmp_path):
    """Slurm itself is not here; what it would start and tell is."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    answer = nodes.run(dict.fromkeys(range(NODES), BATCH), **SLURM_TELLS, PATH=path)
    assert f"{NODES} ranks, loss 2." in answer[0]
    assert (nodes.checkout / "runs" / "17" / "report.html").is_file()
