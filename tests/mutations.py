"""Files as no program of ours has written them: every field, and every byte, as something else."""

import json
import random
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any

NESTED = 100_000
LONG = 10_000

# Names that do something to whoever shows them.
NAMES = {
    "clears the screen": "a\x1b[2Jb",
    "sets the title": "a\x1b]0;owned\x07b",
    "begins a line": "a\nb\r\nc",
    "is of right-to-left marks": "a\u202eb\u2066c\u200fd",
    "separates lines": "a\u2028b\u2029c\x85d",
    "is no character": "a\uffffb\ufdd0c\U0010ffffd",
    "is of controls": "a\x00b\x08c\x7fd\x9be",
    "is markup": "<script>alert('1')</script>&quot;\"`${x}{{7*7}}[bold]--",
    "is long": "n" * LONG,
    "is a path": "../../etc/passwd",
    "is an absolute path": "/owned/by",
    "is a pattern": "%s %n {0} {name} $HOME `id`",
    "is in many letters": "weights\u05d0\u4e2d\U0001f600e\u0301",
}
SURROGATE = "a\ud800b"

# What may stand where something else is expected.
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**63,
    10**400,
    -0.5,
    1e-320,
    1e14,
    1e15,
    1e16,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "7",
    SURROGATE,
    *NAMES.values(),
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a\x1b[2Jb": {SURROGATE: "x"}},
)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and index of a document, outer ones first."""
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy in which one place has another value."""
    copy = json.loads(json.dumps(document))
    *parents, last = path
    reduce(getitem, parents, copy)[last] = value
    return copy


def without(document: Any, path: tuple[Any, ...]) -> Any:
    """A copy that lacks a place."""
    copy = json.loads(json.dumps(document))
    *parents, last = path
    del reduce(getitem, parents, copy)[last]
    return copy


def mutated_documents(text: str, *, count: int, seed: int) -> Iterator[str]:
    """So many texts of documents in which a place or two have another value, or are gone."""
    chance = random.Random(seed)
    document = json.loads(text)
    for _ in range(count):
        changed = document
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            path = chance.choice(list(places(changed)) or [("schema",)])
            if changed != {} and chance.random() < 0.1:
                changed = without(changed, path)
            else:
                changed = with_value(changed, path, chance.choice(VALUES))
        yield json.dumps(changed, ensure_ascii=chance.random() < 0.5)


def mutated_bytes(content: bytes, *, count: int, seed: int) -> Iterator[bytes]:
    """So many contents with a bit, a byte or a run of bytes changed, cut out, doubled or added."""
    chance = random.Random(seed)
    for _ in range(count):
        changed = bytearray(content)
        at = chance.randrange(len(content))
        length = chance.choice((1, 1, 4, 64, 1000))
        match chance.randrange(6):
            case 0 | 1:
                changed[at] ^= 1 << chance.randrange(8)
            case 2:
                changed[at : at + length] = chance.randbytes(length)
            case 3:
                del changed[at : at + length]
            case 4:
                changed[at:at] = changed[at : at + length]
            case 5:
                del changed[at:]
        yield bytes(changed)
