"""With offload=on a GPU's rank keeps its parts in the host's memory: what is where, of a recording that has both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from paceline.comm.fully_shard import is_part, local
from paceline.nouns.profile import GRADIENTS, Recording
from paceline.profile.allocation_trace import Allocations


@dataclass(slots=True)
class HostMemory:
    """The blocks of a recording that are the host's: parts of parameters, their gradients and the optimizer's state.

    Args:
        recorder: that writes them.
    """

    recorder: Allocations
    blocks: set[int] = field(default_factory=set)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Those of these that are parts are in the host's memory."""
        for tensor in tensors:
            if is_part(tensor):
                block = self.recorder.alive.get(local(tensor).untyped_storage()._cdata)
                if block is not None:
                    self.blocks.add(block)

    def apart(self) -> tuple[Recording, int]:
        """The GPU's recording, and the most bytes that the host holds for it in the last step.

        A gradient's part is made on the GPU and copied at once. The update works where the parts are.
        """
        whole = self.recorder.recording
        blocks = self.blocks | {number for number, block in enumerate(whole.blocks) if block.phase == "update"}
        device = Recording(whole.blocks)
        became: list[int] = []  # of each event the number of the next one that the GPU has
        live = most = 0
        for number, event in enumerate(whole.events):
            became.append(len(device.events))
            block = abs(event) - 1
            if block not in blocks:
                device.events.append(event)
                continue
            live += whole.blocks[block].nbytes if event > 0 else -whole.blocks[block].nbytes
            most = max(most, live) if number >= whole.last_step else most
            if event > 0 and whole.blocks[block].kind == GRADIENTS:
                device.events += [event, -event]
        became.append(len(device.events))
        device.phases = [(became[at], phase) for at, phase in whole.phases]
        device.last_step = became[whole.last_step]
        return device, most
