"""Pages as pages: their links lead somewhere, their names exist, and nothing is left out."""

import ast
import re
import unicodedata
from importlib import import_module
from pathlib import Path
from typing import get_args

import prose
import pytest
from pages import ROOT, pages

import gradweave
from gradweave._src.advice.ways import WAYS
from gradweave._src.collectives import SUMMARIES
from gradweave._src.compression import COMPRESSION_SUMMARIES, PRECISIONS
from gradweave._src.doctor.verdicts.finding import Kind
from gradweave._src.glossary import RUNTIMES
from gradweave._src.phases import PHASES
from gradweave._src.planning import PLANNERS
from gradweave._src.session.findings import Stage
from gradweave._src.vocabulary import Operation, Passes

SRC = ROOT / "src" / "gradweave" / "_src"
PAGES = pages()
HANDWRITTEN = {path: page for path, page in PAGES.items() if path not in prose.GENERATED}
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCES = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", prose.prose_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(path):
    page = path.read_text()
    assert prose.wrapped(page) == page, "run: python tests/prose.py"


def test_wrapping_changes_nothing_but_lines():
    text = "word " * 40 + "- 1. `a b`\n"
    page = f"# {text}\n{text}\n- {text}  more\n\n| {text} |\n\n```\n{text}```\n"
    lines = prose.wrapped(page).split("\n")
    assert " ".join(lines).split() == page.split()
    assert prose.wrapped("\n".join(lines)) == "\n".join(lines)
    assert [line for line in lines if len(line) > prose.WIDTH] == [
        f"# {text}".rstrip("\n"),
        f"| {text} |".split("\n")[0],
        text.rstrip("\n"),
    ]
    assert not [line for line in lines[2:] if re.match(r" *1\. ", line)]


def anchors(page):
    """As the site makes them of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", FENCES.sub("", page), re.MULTILINE):
        plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore")
        kept = re.sub(r"[^\w\s-]", "", plain.decode()).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", kept))
    return found


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path):
    for target, anchor in LINK.findall(FENCES.sub("", PAGES[path])):
        file = (ROOT / path).parent / target if target else ROOT / path
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), f"{target}#{anchor}"


@pytest.mark.parametrize("path", PAGES)
def test_tables_have_headers(path):
    """Rows that a blank line cuts off from their table would be drawn as text."""
    page = FENCES.sub("", PAGES[path])
    for table in re.findall(r"(?:^ *\|.*\n)+", page, re.MULTILINE):
        _, *rest = table.splitlines()
        assert rest, table
        assert re.fullmatch(r" *\|(?: *:?-+:? *\|)+", rest[0]), table


def test_the_site_has_every_page():
    """A new one is a line in mkdocs.yml."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    present = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == present


def test_the_reference_has_every_module():
    text = "".join(page for path, page in PAGES.items() if path.startswith("docs/reference/"))
    package = Path(gradweave.__file__).parent
    for file in [*package.glob("*.py"), *package.glob("integrations/*.py")]:
        module = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        if not module.endswith(("__init__", "__main__")):
            assert f"\n::: {module}\n" in text
    assert "\n::: gradweave\n" in text


TREE = PAGES["docs/architecture.md"].partition("\n## The tree\n")[2].partition("\n```\n")[2]
TREE = TREE.partition("\n```")[0]
# Folders whose tree names a family of files, and what its members are then known by.
FAMILIES = {
    "bench": lambda stem: stem.removesuffix("_job"),
    "cli": lambda stem: "one file per verb",
    "collectives": lambda stem: "one file per family of algorithms",
    "costs": lambda stem: "one file per family",
}


def entry_of(folder):
    """What the tree says of a folder of src, in one line; folders inside may have their own."""
    *parents, name = folder.relative_to(SRC).parts
    indent = 2 * (1 + len(parents))
    found = re.findall(rf"^ {{{indent}}}{name}/ (.*(?:\n {{20,}}.*)*)", TREE, re.MULTILINE)
    return " ".join(" ".join(found).split())


def names(text, name):
    """Not as a part of a longer name, as of ``marked_shards.py``."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)


def is_in_the_tree(file):
    """By its name, by that of a folder inside of a part, or as one of a family."""
    folder, *_ = file.relative_to(SRC).parts
    if folder == file.name:
        return names(TREE, file.name)
    if own_entry := entry_of(file.parent) if file.parent != SRC / folder else "":
        return names(own_entry, file.name)
    entry, inner = entry_of(SRC / folder), f"{file.parent.name}/"
    is_inside = file.parent != SRC / folder and inner in entry
    family = FAMILIES.get(folder, lambda stem: f"{stem}.py")(file.stem)
    return is_inside or names(entry, file.name) or names(entry, family)


def test_the_tree_names_every_file():
    files = {file for file in SRC.rglob("*.py") if file.name != "__init__.py"}
    missing = sorted(str(file) for file in files if not is_in_the_tree(file))
    assert not missing, "docs/architecture.md, the tree"


def test_files_that_pages_name_are_there():
    """What stands in code with a folder in front of it."""
    folders = (ROOT, SRC, SRC.parent, ROOT / "tests", ROOT / "benchmarks")
    named = {
        (path, name)
        for path, page in HANDWRITTEN.items()
        for name in re.findall(r"`((?:\w+/)+[\w-]+\.(?:py|md|js))(?:::\w+)?`", page)
    }
    assert len(named) > 50
    for path, name in sorted(named):
        assert any((folder / name).exists() for folder in folders), (path, name)


def columns():
    """Of all tables: keys of literal dictionaries of lists in the terminal, headers on pages."""
    for file in [*(SRC / "cli").glob("*.py"), SRC / "doctor" / "tables.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Dict):
                cells = zip(node.keys, node.values, strict=True)
                yield from (
                    key.value
                    for key, value in cells
                    if isinstance(key, ast.Constant) and isinstance(value, ast.ListComp)
                )
    for file in (SRC / "report" / "assets").glob("*.html"):
        yield from re.findall(r'<th scope="col"[^>]*>([^<{]+)</th>', file.read_text())


# Fields of what --json prints, which are lists there.
OF_JSON = {"buckets", "links", "runtimes"}
PRINTED = {
    "runtimes": RUNTIMES,
    "planners": PLANNERS,
    "collectives": SUMMARIES,
    "operations": get_args(Operation),
    "compressions": COMPRESSION_SUMMARIES,
    "precisions": PRECISIONS,
    "selections": import_module("gradweave._src.sparse.select").SELECTIONS,
    "stages": [str(stage) for stage in Stage],
    "phases": PHASES,
    "passes": get_args(Passes),
    "ways": WAYS,
    "findings": get_args(Kind),
    "columns": sorted(set(columns()) - OF_JSON),
}


@pytest.mark.parametrize("group", PRINTED)
def test_the_glossary_has_every_name_that_is_printed(group):
    names = list(PRINTED[group])
    assert len(names) > 1
    missing = [name for name in names if f"`{name}`" not in PAGES["docs/glossary.md"]]
    assert not missing, f"say in docs/glossary.md what these mean: {missing}"


def test_the_glossary_has_no_other_names():
    """Of those groups whose tables list them one by one; names that are gone go from here, too."""
    for heading, group in {"Runtimes": "runtimes", "Planners": "planners"}.items():
        table = PAGES["docs/glossary.md"].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        listed = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
        assert set(listed) <= set(PRINTED[group])
        assert listed


def as_numbers(version):
    return [int(number) for number in version.split(".")]


def test_the_changelog_has_versions_and_dates():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    versions = [
        re.fullmatch(r"(\d+\.\d+\.\d+), (\d{4}-\d{2}-\d{2})", text) for text in headings[1:]
    ]
    assert all(versions)
    # Between releases the code is called by the next one, so that an issue can tell which it is.
    released, _, is_dev = gradweave.__version__.partition(".dev")
    assert (released == versions[0][1]) != bool(is_dev)
    assert not is_dev or as_numbers(released) > as_numbers(versions[0][1])
    dates = [version[2] for version in versions]
    assert dates == sorted(dates, reverse=True)


def test_hooks_before_a_commit_are_what_make_lint_runs():
    """From the same environment, so that versions cannot differ from those of constraints.txt."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    lint = makefile.partition("\nlint: ")[2].partition("\n\n")[0]
    commands = re.findall(r"\$\(BIN\)/(.*)", lint)
    assert commands == ["ruff check", "ruff format --check", "mypy"]
    for command in commands:
        assert f"entry: .venv/bin/{command}\n" in hooks
    assert "rev:" not in hooks  # nothing that is pinned elsewhere
    pinned = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^ruff==", pinned, re.MULTILINE)
    assert re.search(r"^mypy==", pinned, re.MULTILINE)
