"""torchrun on a cluster: an agent on each node, which is told of the others.

torchrun starts a node's ranks itself, so it must not be started once for each rank: each launcher
would silently train in a world of its own. What agents have to know is in the variables from which
torchrun reads its options; options in the command itself take precedence.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from gradweave._src.errors import RequestError
from gradweave._src.lab.spec import ClusterSpec, MeetingPoint, agent_environment

MODULES = {"torch.distributed.run", "torch.distributed.launch"}
# Options of torchrun without a value.
FLAGS = {"standalone", "m", "module", "no-python", "run-path", "virtual-local-rank"}


def is_torchrun(command: Sequence[str]) -> bool:
    return _launcher_words(command) > 0


def check_agents(command: Sequence[str], spec: ClusterSpec) -> None:
    """Raise RequestError where agents could not meet, or would start other ranks than asked for."""
    options = _options(command)
    if "standalone" in options:
        raise RequestError("--standalone makes each node a world of its own; leave it out")
    if "node-rank" in options:
        raise RequestError("each node has a rank of its own; leave out --node-rank")
    nodes = options.get("nnodes", str(spec.nodes)).rpartition(":")[2]
    if nodes != str(spec.nodes):
        raise RequestError(f"torchrun is to wait for {nodes} nodes, and there are {spec.nodes}")
    if spec.ranks_per_node > 1:
        raise RequestError("torchrun starts the ranks of a node; give it --nproc-per-node instead")


def node_environments(
    command: Sequence[str], spec: ClusterSpec, *, base: Mapping[str, str], meeting: MeetingPoint
) -> dict[int, dict[str, str]]:
    """Return each node's environment: ``base``, and torchrun's options that the command lacks."""
    told = {**agent_environment(base), "PET_NNODES": str(spec.nodes)}
    if not {"master-addr", "master-port"} & _options(command).keys():
        told["PET_RDZV_ENDPOINT"] = f"{meeting.address}:{meeting.port}"
    return {node: {**told, "PET_NODE_RANK": str(node)} for node in range(spec.nodes)}


def _launcher_words(command: Sequence[str]) -> int:
    """Return how many words of the command start torchrun; 0 where it is another program."""
    match [PurePath(command[0]).name if command else "", *command[1:3]]:
        case ["torchrun", *_]:
            return 1
        case [str(program), "-m", str(module)] if program.startswith("python"):
            return 3 if module in MODULES else 0
    return 0


def _options(command: Sequence[str]) -> dict[str, str]:
    """Return torchrun's own options by their names with hyphens; what follows is the script's."""
    found: dict[str, str] = {}
    words = iter(command[_launcher_words(command) :])
    for word in words:
        if not word.startswith("-"):
            break
        name, has_value, value = word.lstrip("-").replace("_", "-").partition("=")
        found[name] = value if has_value or name in FLAGS else next(words, "")
    return found
