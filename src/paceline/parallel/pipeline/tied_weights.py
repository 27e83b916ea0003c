"""Parameters that several pipeline stages hold, such as a tied embedding: their gradients are added up.

Every holder sends its gradient to the others and adds all of them in stage order: the same bits everywhere, so the
copies stay equal under the same update.

Traffic per step: each holder sends the gradient once to every other holder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.comm.collectives import AxisComm

_TAG = 1 << 20  # above the tags of micro-batches


def add_tied_gradients(
    parameters: Mapping[str, torch.Tensor], holders: Mapping[str, Sequence[int]], comm: AxisComm
) -> None:
    """Give every holder the sum of all holders' gradients; None where nobody has one.

    Args:
        parameters: this rank's.
        holders: of every parameter of the model the ranks on the pipeline axis that hold it, in rising order; the
            same on all ranks.
        comm: the pipeline axis.
    """
    for number, (name, ranks) in enumerate(sorted(holders.items())):  # in the same order on every rank
        if len(ranks) < 2 or comm.rank not in ranks:
            continue
        parameter = parameters[name]
        if not parameter.requires_grad:
            continue
        # (elements of the gradient + 1): the last is 1 if this rank has one
        mine = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype, device=parameter.device)
        if parameter.grad is not None:
            mine[:-1] = parameter.grad.reshape(-1)
            mine[-1] = 1  # somebody has one
        # All send before anybody waits in `receive`: two holders that waited for each other would hang.
        sending = [comm.begin_send(mine, rank, _TAG + number) for rank in ranks if rank != comm.rank]
        total = torch.zeros_like(mine)
        # In the same order on every holder: rounding depends on it.
        for rank in ranks:
            gradient = mine
            if rank != comm.rank:
                gradient = torch.empty_like(mine)
                comm.receive(gradient, rank, _TAG + number)
            total += gradient
        for pending in sending:
            pending.wait()
        # Where this rank has one, nothing is read, for which the host would wait.
        has_gradient = parameter.grad is not None or float(total[-1]) > 0
        parameter.grad = total[:-1].view_as(parameter) if has_gradient else None
