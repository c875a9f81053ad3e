"""How a file of an older version becomes one of the next, step by step.

An upgrade takes what was written; whatever is wrong with it is found when it is read.
"""

from collections.abc import Callable
from typing import Any

Document = dict[str, Any]
Upgrade = Callable[[Document], Document]

# Exchanges, while the name of the one that trains stood for the paper's tree.
RENAMED_EXCHANGES = {"gtopk": "gtopk-tree", "gtopk-butterfly": "gtopk"}


def network_2(document: Document) -> Document:
    """Upgrade a network of version 1, which knew one cost for a collective, and no latency."""
    added = {"beside": "nothing", "latency_s": 0.0}
    return _with_each(document, "costs", lambda cost: {**added, **cost})


def network_3(document: Document) -> Document:
    """Upgrade a network of version 2, which did not know what selecting gradients costs."""
    return {"selection_s_per_element": 0.0, **document}


def network_4(document: Document) -> Document:
    """Upgrade a network of version 3, which had other names for exchanges."""

    def renamed(cost: Document) -> Document:
        name, colon, density = str(cost.get("collective")).partition(":")
        if name not in RENAMED_EXCHANGES:
            return cost
        return {**cost, "collective": RENAMED_EXCHANGES[name] + colon + density}

    return _with_each(document, "costs", renamed)


def plan_2(document: Document) -> Document:
    """Upgrade a plan of version 1, which knew all-reduces beside backward only."""
    return {"passes": "backward", **document}


def plan_3(document: Document) -> Document:
    """Upgrade a plan of version 2, which had other names for exchanges."""

    def renamed(bucket: Document) -> Document:
        match bucket:
            case {"compression": {"method": str(name), **rest}} if name in RENAMED_EXCHANGES:
                return {**bucket, "compression": {"method": RENAMED_EXCHANGES[name], **rest}}
        return bucket

    return _with_each(document, "buckets", renamed)


def trace_2(document: Document) -> Document:
    """Upgrade a trace of version 1, which did not know shapes."""
    return _with_each(document, "tensors", lambda tensor: {"shape": None, **tensor})


def losses_2(document: Document) -> Document:
    """Upgrade losses of version 1, which did not know stages of planning."""
    return _with_each(document, "series", lambda series: {"stages": [], **series})


def results_2(document: Document) -> Document:
    """Upgrade results of version 1, which knew nodes and ranks of each, but not their product."""

    def counted(row: Document) -> Document:
        match row:
            case {"nodes": int(nodes), "ranks_per_node": int(ranks)}:
                return {"workers": nodes * ranks, **row}
        return row

    return _with_each(document, "rows", counted)


def recipe_2(document: Document) -> Document:
    """Upgrade a recipe of version 1, which did not say what a step took, and held older values."""
    return _with_held({"step_s": None, **document}, plan=plan_2, network=network_3)


def recipe_3(document: Document) -> Document:
    """Upgrade a recipe of version 2, which held older plans and networks."""
    return _with_held(document, plan=plan_3, network=network_4)


def recipe_4(document: Document) -> Document:
    """Upgrade a recipe of version 3, which held older traces."""
    return _with_held(document, trace=trace_2)


UPGRADES: dict[str, tuple[str, Upgrade]] = {
    "gradweave.losses/1": ("gradweave.losses/2", losses_2),
    "gradweave.network/1": ("gradweave.network/2", network_2),
    "gradweave.network/2": ("gradweave.network/3", network_3),
    "gradweave.network/3": ("gradweave.network/4", network_4),
    "gradweave.plan/1": ("gradweave.plan/2", plan_2),
    "gradweave.plan/2": ("gradweave.plan/3", plan_3),
    "gradweave.recipe/1": ("gradweave.recipe/2", recipe_2),
    "gradweave.recipe/2": ("gradweave.recipe/3", recipe_3),
    "gradweave.recipe/3": ("gradweave.recipe/4", recipe_4),
    "gradweave.results/1": ("gradweave.results/2", results_2),
    "gradweave.trace/1": ("gradweave.trace/2", trace_2),
}


def _with_each(document: Document, key: str, upgrade: Upgrade) -> Document:
    """Upgrade every object of a list; what is not an object stays as it is."""
    items = document.get(key)
    if not isinstance(items, list):
        return document
    return {**document, key: [upgrade(one) if isinstance(one, dict) else one for one in items]}


def _with_held(document: Document, **upgrades: Upgrade) -> Document:
    """Upgrade the values that a document holds, by their names in it."""
    held = {name: document.get(name) for name in upgrades}
    newer = {name: upgrades[name](one) for name, one in held.items() if isinstance(one, dict)}
    return {**document, **newer}
