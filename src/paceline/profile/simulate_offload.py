"""Tell a GPU's memory from its host's in a recording of both.

With offload=on a rank keeps its shards on the host, with checkpointing=offload its activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from paceline.comm.dtensor_parts import is_part, local
from paceline.nouns.profile import GRADIENTS, Recording
from paceline.profile.allocation_trace import Allocations
from paceline.torch_private.tensors import storage_key


@dataclass(slots=True)
class HostMemory:
    """The blocks of a recording that are the host's.

    Args:
        recorder: the recorder of the step's allocations.
        has_shards: True if the host holds the shards of parameters, gradients and optimizer states.

    Attributes:
        copied_bytes: the bytes of activations that were copied there and back since it was set to 0.
    """

    recorder: Allocations
    has_shards: bool
    copied_bytes: int = 0
    blocks: set[int] = field(default_factory=set)

    def record(self, tensors: Iterable[Tensor]) -> None:
        """Enter that the shards among these tensors are in the host's memory, where shards are."""
        if not self.has_shards:
            return
        for tensor in tensors:
            if is_part(tensor):
                block = self.recorder.alive.get(storage_key(local(tensor)))
                if block is not None:
                    self.blocks.add(block)

    def record_pinned(self, memory: Tensor) -> None:
        """Enter that this tensor is in the host's memory."""
        self.recorder.record(memory)
        self.blocks.add(self.recorder.alive[storage_key(memory)])

    def apart(self) -> tuple[Recording, int]:
        """Return the GPU's recording, and the most bytes that the host holds for it in the last step.

        A gradient's shard is made on the GPU and copied at once. The update works where the shards are.
        """
        # Events are renumbered: the GPU's recording has no gaps where the host's were.
        recording = self.recorder.recording
        on_host = set(self.blocks)
        for number, block in enumerate(recording.blocks):
            if self.has_shards and block.phase == "update":
                on_host.add(number)
        device = Recording(recording.blocks)
        new_numbers: list[int] = []  # by event of `recording`, the number of the GPU's next event
        live = 0
        most = 0
        for number, event in enumerate(recording.events):
            new_numbers.append(len(device.events))
            # Pinned memory stays from step to step: its only event may be in the first.
            if number == recording.last_step:
                most = live
            index = abs(event) - 1  # an event is a block's index + 1, negative where it is freed
            if index not in on_host:
                device.events.append(event)
                continue
            block = recording.blocks[index]
            live += block.nbytes if event > 0 else -block.nbytes
            if number >= recording.last_step:
                most = max(most, live)
            # A gradient is on the GPU for a moment, until it is copied.
            if event > 0 and block.kind == GRADIENTS and self.has_shards:
                device.events += [event, -event]
        new_numbers.append(len(device.events))
        device.phases = [(new_numbers[number], phase) for number, phase in recording.phases]
        device.last_step = new_numbers[recording.last_step]
        return device, most
