"""What a wrapper measures with while a session plans."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from gradweave._src.clocks import clock_for
from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.comm.small_messages import first_to_say
from gradweave._src.costs.sparse import BYTES_PER_ELEMENT
from gradweave._src.device_order import own_stream
from gradweave._src.errors import RequestError
from gradweave._src.runtime.driving.activity import Activity
from gradweave._src.runtime.driving.announcements import Announcements
from gradweave._src.runtime.driving.noticeboard import Noticeboard
from gradweave._src.runtime.driving.probing import Probing
from gradweave._src.runtime.driving.queued_probing import QueuedProbing, refuse_first_round
from gradweave._src.runtime.driving.survey import Survey
from gradweave._src.session.commands import (
    Command,
    CompressionPrice,
    Failed,
    PriceCompression,
    Probe,
)
from gradweave._src.sparse.timing import exchange_cost, selection_s_per_element
from gradweave._src.sparse.training import SparseTraining
from gradweave._src.torch_internals import HOST


class Instruments:
    """Records, probes and prices compression; made on every rank, where all come alike.

    ``own_groups`` are for messages beside the training, and go with planning unless they are to be
    kept; ``sending`` is where sparse messages travel. ``on_recording`` is told when recording
    begins and ends.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        board: Noticeboard,
        own_groups: Sequence[OwnGroup],
        *,
        keeps_declared_order: bool = False,
        sparse: SparseTraining | None = None,
        sending: OwnGroup | None = None,
        keeps_own_groups: Callable[[], bool] = lambda: False,
        on_recording: Callable[[bool], None] = lambda _: None,
    ) -> None:
        # Weakly: a module may know its wrapper, whose end this waits for.
        self._module, self._parameters = weakref.ref(module), parameters
        self._keeps_own_groups = keeps_own_groups
        self._device = next(iter(parameters.values())).device
        self.clock = clock_for(self._device)
        self.announcements = Announcements(board, self.clock, self._device)
        self._own_groups = own_groups
        self._keeps_declared_order = keeps_declared_order
        self._sparse, self._sending = sparse, sending
        self._on_recording = on_recording

    def survey(self, steps: int) -> Survey:
        widths = {parameter.element_size() for parameter in self._parameters.values()}
        if self._sparse is not None and widths != {BYTES_PER_ELEMENT}:
            raise RequestError("sparse messages have a price for gradients of 4 bytes only")
        module = self._module()
        assert module is not None, "it is being trained"
        self._on_recording(True)  # noqa: FBT003
        return Survey(
            module,
            self._parameters,
            steps=steps,
            keeps_declared_order=self._keeps_declared_order,
            close=lambda: self._on_recording(False),  # noqa: FBT003
        )

    def probing(self, command: Probe, name: str) -> Activity:
        """Begin a probe by a name that all ranks give it, and that no other has."""
        if self._device.type == "cpu":
            return Probing(command, self._own_groups, self.announcements.board.turns(name))
        return QueuedProbing(
            command,
            self._own_groups[0],
            self.announcements,
            clock=self.clock,
            device=self._device,
            name=name,
        )

    def refuse(self, command: Command, name: str, why: str) -> None:
        """Carry out nothing of a command, and let nobody wait for this rank.

        ``name`` is that of the command, as ``probing`` is given it.
        """
        match command:
            case PriceCompression():
                self.pricing(command, why_not=why)
            case Probe() if self._device.type == "cpu":
                self.announcements.board.refuse_turns(name)
            case Probe():
                refuse_first_round(self.announcements, name)

    def pricing(self, command: PriceCompression, *, why_not: str = "") -> "Pricing":
        """Begin to price compression, or tell all ranks why this one cannot."""
        assert self._sparse is not None
        assert self._sending is not None
        return Pricing(command, self._parameters, self._sparse, self._sending, why_not=why_not)

    def training_step(self) -> int:
        """Return the number of the step that comes next, as warm-ups count them."""
        return 0 if self._sparse is None else self._sparse.step

    def close(self) -> None:
        """Close everything, groups included unless messages have come to travel there."""
        if not self._keeps_own_groups():
            for own_group in self._own_groups:
                own_group.close()


class Pricing(Activity):
    """Measures what compression costs here, where messages travel, between two of them.

    All ranks take part: one that cannot says ``why_not``, and then none of them measures.
    """

    def __init__(
        self,
        command: PriceCompression,
        parameters: dict[str, nn.Parameter],
        sparse: SparseTraining,
        sending: OwnGroup,
        *,
        why_not: str,
    ) -> None:
        self._compression, self._parameters, self._sparse = command.compression, parameters, sparse
        self._why_not = why_not
        self._found: CompressionPrice | Failed | None = None
        sending.thread().submit_task(self._run, torch.empty(0, device=HOST))

    def _run(self) -> None:
        like = next(iter(self._parameters.values()))
        try:
            with own_stream(like.device):  # not where the training's kernels are queued
                self._found = self._price()
        except Exception as error:  # noqa: BLE001 messages go on, and the session is told
            self._found = Failed(f"pricing compression failed: {error}")

    def _price(self) -> CompressionPrice:
        density, settings = self._compression.density, self._sparse.settings
        numel = sum(parameter.numel() for parameter in self._parameters.values())
        like = next(iter(self._parameters.values()))
        why, selection_s = self._why_not, 0.0
        try:
            if not why:
                selection_s = selection_s_per_element(
                    numel, like=like, density=density, settings=settings
                )
        except Exception as error:  # noqa: BLE001 others are told first, who would wait for it
            why = str(error) or type(error).__name__
        exchanger = self._sparse.sparsifier.exchanger
        group = exchanger.group
        said = first_to_say(group, why)
        if said is not None:
            raise RequestError(said)
        exchange = exchange_cost(
            exchanger, exchange=settings.exchange, density=density, numel=numel
        )
        return CompressionPrice(selection_s, exchange)

    def part(self) -> CompressionPrice | Failed | None:
        return self._found

    def agreed(self, parts: Sequence[CompressionPrice]) -> CompressionPrice:
        slowest_s = max(part.selection_s_per_element for part in parts)
        return CompressionPrice(slowest_s, parts[0].exchange)
