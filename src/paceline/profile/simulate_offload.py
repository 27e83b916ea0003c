"""Tell a GPU's memory from its host's in a recording of both.

With offload=on a rank keeps its shards on the host, with checkpointing=offload its activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from paceline.comm.fully_shard import is_part, local
from paceline.nouns.profile import GRADIENTS, Recording
from paceline.profile.allocation_trace import Allocations


@dataclass(slots=True)
class HostMemory:
    """The blocks of a recording that are the host's.

    Args:
        recorder: writes the recording.
        has_shards: shards of parameters, their gradients and the optimizer's state are the host's.

    Attributes:
        copied_bytes: activations that were copied there and back, since it was set to 0.
    """

    recorder: Allocations
    has_shards: bool
    copied_bytes: int = 0
    blocks: set[int] = field(default_factory=set)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Enter that the shards among these tensors are in the host's memory, where shards are."""
        if not self.has_shards:
            return
        for tensor in tensors:
            if is_part(tensor):
                block = self.recorder.alive.get(local(tensor).untyped_storage()._cdata)
                if block is not None:
                    self.blocks.add(block)

    def note_pinned(self, memory: Tensor) -> None:
        """Enter that this tensor is in the host's memory."""
        self.recorder.note(memory)
        self.blocks.add(self.recorder.alive[memory.untyped_storage()._cdata])

    def apart(self) -> tuple[Recording, int]:
        """Return the GPU's recording, and the most bytes that the host holds for it in the last step.

        A gradient's shard is made on the GPU and copied at once. The update works where the shards are.
        """
        # Events are renumbered: the GPU's recording has no gaps where the host's were.
        both = self.recorder.recording
        on_host = set(self.blocks)
        for number, block in enumerate(both.blocks):
            if self.has_shards and block.phase == "update":
                on_host.add(number)
        device = Recording(both.blocks)
        new_numbers: list[int] = []  # by event of `both`, the number of the GPU's next event
        live = 0
        most = 0
        for number, event in enumerate(both.events):
            new_numbers.append(len(device.events))
            if number == both.last_step:  # pinned memory stays from step to step: its only event may be in the first
                most = live
            index = abs(event) - 1  # an event is a block's index + 1, negative where it is freed
            if index not in on_host:
                device.events.append(event)
                continue
            block = both.blocks[index]
            live += block.nbytes if event > 0 else -block.nbytes
            if number >= both.last_step:
                most = max(most, live)
            if event > 0 and block.kind == GRADIENTS and self.has_shards:  # for the moment until it is copied
                device.events += [event, -event]
        new_numbers.append(len(device.events))
        device.phases = [(new_numbers[number], phase) for number, phase in both.phases]
        device.last_step = new_numbers[both.last_step]
        return device, most
