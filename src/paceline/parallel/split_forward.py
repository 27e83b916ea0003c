"""A loop of the user's own under `tensor`, `context` or `expert`: `model(...)` runs a captured graph on pieces.

At the first call the forward is captured for its arguments, and the layout is chosen as for a `Workload`. The
optimizers keep their Parameters, whose `.data` become this rank's pieces. From then on a call runs the graph; its
outputs are whole and equal on every rank of the axis, so the loop computes its losses from them as one process does.
Under `context` and `expert` gradients in a graph are partial: those that leave it, of inputs and of all parameters but
the experts', are summed over the axis at the end of a call's backward pass.

Needs: every rank of the axis calls the model with the same arguments; a forward whose path depends only on shapes.
Promises: outputs, gradients of inputs and, piece by piece, of parameters are those of one process, up to rounding.
Traffic: what the graph says, and the sum of the gradients that leave it; at the first call of each model the
placements, in two broadcasts.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.comm.batch_norm import SharedStatistics
from paceline.comm.collectives import AxisComm
from paceline.comm.differentiable import Exchanges
from paceline.comm.dtypes import as_real
from paceline.comm.guarded_parts import Cut, Uncut
from paceline.comm.pytree import map_tensors, signature, tensors_in
from paceline.graph.placement import Split
from paceline.nouns.errors import CollectiveError, PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.parallel.elementwise import find_whole_parameters
from paceline.parallel.engine.agreement import SAME_SAMPLES, SUMS_DIFFER
from paceline.parallel.engine.engine import Comms
from paceline.parallel.graph_adapter import check_whole_experts
from paceline.parallel.graph_model import Program, SplitModel, StageProgram, call_form, modes_of
from paceline.parallel.optimizer_parts import parts_of
from paceline.parallel.shard.local_optimizer_step import StandIns
from paceline.parallel.shard.state_dicts import check_copies
from paceline.parallel.whole_update import WholeUpdate, cut_parameters
from paceline.torch_private.modules import Dropout, compiled_from
from paceline.torch_private.operations import DisableTorchFunctionSubclass

_PLAIN = (
    torch.Tensor,
    enum.Enum,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
)
_OTHER_PLANS = "write replicate or shard in the plan, which run the model's own code"


class NotComputed:
    """Stands for a part of a model's output that is no tensor and no plain value, such as a cache of keys."""

    def __init__(self, kind: str, axis: str) -> None:
        self.kind = kind
        self.axis = axis

    def __repr__(self) -> str:
        return f"NotComputed({self.kind})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise WorkloadError(
            f"under {self.axis} a model's output is tensors and plain values, in dicts, lists, tuples and dataclasses",
            f"the loop uses a {self.kind} of it",
            f"use the tensors of the output alone, or {_OTHER_PLANS}",
        )


class SplitForward:
    """The `forward` of one model on this rank of the axis that splits it.

    Args:
        model: the user's model, whole until the first call.
        prefix: the prefix of its names in the job's model.
        comms: the communicators of the mesh's axes.
        plan: the job's plan, with its mesh and options.
        device: the device on which this rank computes.
        shared: the batch norm statistics that ranks with other samples share; None where each has its own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        prefix: str,
        comms: Comms,
        plan: Plan,
        device: torch.device,
        shared: SharedStatistics | None,
    ) -> None:
        self.model = model
        self.prefix = prefix
        self.comm = comms.same_samples
        self.axis = self.comm.axis
        self.function = partial(_forward, self.axis)
        ways: dict[str, Any] = {self.axis: self.comm} if self.axis != "tensor" else {}
        axes = comms.axes
        self.split = SplitModel(model, axes["tensor"], axes["pipeline"], plan, device, spreads_modules=False, **ways)
        self.split.shared = shared
        self.split.state = self.state
        self.is_placed = False
        self.programs = self.split.programs
        self.place: Callable[[SplitForward, Any], None] = lambda forward, call: None
        self.record: Callable[[torch.Tensor], None] = lambda digest: None
        self.hashes: dict[Hashable, int] = {}
        self.set_aside: dict[str, torch.Tensor] = {}  # what this rank has, while whole tensors are in its place
        self.modules = list(model.modules())
        self.forms = list(self.split.form.modules())
        self.slots: dict[str, tuple[dict[str, Any], str]] = {}
        for path, module in model.named_modules():
            for slots in (module._parameters, module._buffers):
                for key in slots:
                    self.slots[f"{path}.{key}" if path else key] = (slots, key)  # type: ignore[assignment]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the graph of the model's forward."""
        call = {"arguments": arguments, "named": named}
        if not self.is_placed:
            self.place(self, call)
        tensors = tensors_in(call)
        key = self._key(call)
        digest = _digest_of(tensors, self.split.device)
        self.record(digest)
        if self.is_split and self.split.device.type == "cpu":
            self._check_same_call(key, digest)
        program = self._program(key, call)
        (stage,) = program.stages
        with DisableTorchFunctionSubclass():
            if self.axis != "tensor":
                return program.captured.rebuild(self._run_with_whole_gradients(stage, tensors))
            return program.captured.rebuild(stage(tensors))

    def _run_with_whole_gradients(self, stage: StageProgram, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Run a graph whose gradients are partial, and sum those that leave it over the ranks."""
        (piece,) = stage.segments
        values = [*map(self.state, piece.states), *(tensors[index] for index in piece.inputs)]
        of_experts = self.split.of_experts
        # The weights of experts meet the rows of all ranks: their gradients are whole.
        names = [*piece.states, *[""] * len(piece.inputs)]
        partial_numbers = []
        for number, (name, value) in enumerate(zip(names, values, strict=True)):
            if value.requires_grad and name not in of_experts:
                partial_numbers.append(number)
        summed_later = _WithWholeGradients.apply(self.comm, *(values[number] for number in partial_numbers))  # type: ignore[no-untyped-call]
        for number, value in zip(partial_numbers, summed_later or (), strict=True):
            values[number] = value
        return list(stage.run[0](*values))

    def __deepcopy__(self, memo: Any) -> Any:
        raise WorkloadError(
            f"under {self.axis} a model can't be copied once paceline.prepare has it",
            f"a copy of the {type(self.model).__name__} was asked for: it would hold one rank's pieces",
            f"make the copy before paceline.prepare, and hand it in too; for an average of weights {_OTHER_PLANS}",
        )

    @property
    def is_split(self) -> bool:
        """Return True if this rank has a piece of something, or computes one."""
        return self.is_placed and (bool(self.placements) or self.axis == "context")

    @property
    def placements(self) -> dict[str, Split]:
        """Return the split of each state that is cut, by its name in the model."""
        return self.split.expert_placements if self.axis == "expert" else self.split.placements

    def form_of(self, call: Any) -> int:
        """Return a number that is equal for calls with arguments of the same shapes, and hardly ever for others."""
        return zlib.crc32(repr(signature(call)).encode())

    def decide(self, call: Any, may_stay_whole: bool) -> None:
        """Choose the layout for a call.

        Raises:
            WorkloadError: the forward can't be captured.
            PlanError: nothing can be split, and it may not stay whole.
        """
        _check_arguments(call, self.axis)
        # In training mode, whatever the mode of this call: batch norm writes only then, and what is written must not be
        # cut otherwise.
        self.split.form.train()
        with _as_for_training():
            try:
                self.split.decide(self.function, call)
            except PlanError:
                if not may_stay_whole:
                    raise

    def agree(self, comm: AxisComm) -> None:
        """Take over the placements of the first rank: others may have seen other shapes. Collective."""
        text = json.dumps({name: [split.dim, split.blocks] for name, split in self.placements.items()})
        device = self.split.device
        sent = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
        length = torch.tensor([len(sent)], device=device)
        comm.broadcast(length)
        if len(sent) != int(length):  # the first rank decides otherwise
            sent = torch.empty(int(length), dtype=torch.uint8, device=device)
        comm.broadcast(sent)
        decided = json.loads(bytes(sent.tolist()))
        placements = {name: Split(dim, tuple(blocks)) for name, (dim, blocks) in decided.items()}
        if self.axis == "expert":
            self.split.expert_placements = placements
        else:
            self.split.placements = placements

    def cut(self) -> list[torch.Tensor]:
        """Keep this rank's piece of every state that is cut, in the tensor that it was; return the tensors."""
        cut = []
        with torch.inference_mode(False), torch.no_grad():
            for name in self.placements:
                tensor = self.state(name)
                tensor.data = self._piece(name, tensor.data)
                cut.append(tensor)
        self.is_placed = True
        if cut:
            self._guard()
        return cut

    def cut_state(self, optimizer: torch.optim.Optimizer, updated_whole: Mapping[str, bool]) -> None:
        """Keep this rank's pieces of the optimizer's whole state.

        Args:
            optimizer: an optimizer that updates parameters of the model.
            updated_whole: for each parameter that is updated whole, whether this rank does it: then it keeps the whole
                state.
        """
        for name in self.placements:
            parameter = self.state(name)
            for part in parts_of(optimizer):
                if parameter not in part.state:
                    continue
                if name in updated_whole:
                    if not updated_whole[name]:
                        del part.state[parameter]
                    continue
                part.state[parameter] = map_tensors(part.state[parameter], partial(self._piece, name))

    def local_shards(self) -> dict[str, LocalShard]:
        """Return the pieces by their names in the job's model, and the ranks that hold the same ones."""
        found: dict[str, LocalShard] = {}
        for name in self.placements if self.is_placed else ():
            found[self.prefix + name] = LocalShard(self.split.shard_spec(name), self.split.ranks_with_same(name))
        return found

    def pieces(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are cut, by their names in the model."""
        found = {}
        for name in self.placements if self.is_placed else ():
            tensor = self.state(name)
            if isinstance(tensor, torch.nn.Parameter):
                found[name] = tensor
        return found

    def full_tensor(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of which the ranks have pieces. Collective along the axis."""
        split = self.placements[name]
        return Exchanges(self.comm).gather_from_group(piece.detach(), (split.dim, split.blocks))

    def hold(self) -> dict[str, torch.Tensor]:
        """Put whole tensors where the model has pieces, until `release`; return them, by name. Collective.

        Their gradients go to the pieces, also where the model is split only before the backward pass.
        """
        wholes: dict[int, torch.Tensor] = {}  # by identity: tied ones stay tied
        found: dict[str, torch.Tensor] = {}
        for name, (slots, key) in self.slots.items():
            piece = slots[key]
            if piece is None or not self._is_held(name, piece):
                continue
            self.set_aside[name] = piece
            if id(piece) not in wholes:
                with torch.no_grad():
                    value = self.full_tensor(name, piece) if name in self.placements else piece.detach().clone()
                if isinstance(piece, torch.nn.Parameter):
                    value = self._whole_parameter(name, piece, value)
                wholes[id(piece)] = found[name] = value
            slots[key] = wholes[id(piece)]
        return found

    def _is_held(self, name: str, tensor: torch.Tensor) -> bool:
        is_undecided = not self.is_placed and isinstance(tensor, torch.nn.Parameter)
        return is_undecided or any(tensor is self.state(cut_name) for cut_name in self.placements)

    def _whole_parameter(self, name: str, piece: torch.nn.Parameter, value: torch.Tensor) -> torch.nn.Parameter:
        full = torch.nn.Parameter(value, piece.requires_grad)

        def pass_on(full: torch.Tensor) -> None:
            assert full.grad is not None
            gradient, full.grad = full.grad, None
            # Every rank of the axis has the same gradient: each takes its piece of it.
            gradient = self._piece(name, gradient)
            piece.grad = gradient if piece.grad is None else piece.grad + gradient

        if full.requires_grad:
            full.register_post_accumulate_grad_hook(pass_on)
        return full

    def release(self) -> None:
        """Put this rank's pieces back."""
        pieces, self.set_aside = self.set_aside, {}
        for name, piece in pieces.items():
            slots, key = self.slots[name]
            slots[key] = piece

    def fill(self, name: str, full: torch.Tensor) -> None:
        """Take this rank's piece of a whole tensor."""
        with torch.no_grad():
            self.state(name).detach().copy_(self.split.piece_of(name, full))

    def guard(self, is_guarded: bool) -> None:
        """Refuse what the loop can't do with pieces, or let the optimizer use them."""
        kind: type[torch.nn.Parameter] = torch.nn.Parameter
        for name in self.slots:
            tensor = self.state(name)
            if type(tensor) not in (torch.nn.Parameter, Cut, Uncut):
                continue
            if is_guarded:
                kind = Uncut if not self.is_placed else torch.nn.Parameter
            tensor.__class__ = kind
        if is_guarded:
            for piece in self.pieces().values():
                piece.__class__ = Cut

    def _piece(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a tensor that has a state's whole shape; of others, the tensor."""
        if name not in self.placements or tuple(full.shape) != self.split.shapes[name]:
            return full
        return self.split.piece_of(name, full).clone()  # a view would keep the whole tensor alive

    def state(self, name: str) -> Any:
        """Return the parameter or buffer of a name, as it is now."""
        if name in self.set_aside:
            return self.set_aside[name]
        slots, key = self.slots[name]
        return slots[key]

    def _key(self, call: Any) -> Hashable:
        """Return the key of a call, equal for calls that one graph can serve: shapes, modes and need of gradients."""
        return modes_of(self.model), call_form(call)

    def _check_same_call(self, key: Hashable, digest: torch.Tensor) -> None:
        """Find out that ranks of the axis do different things before their collectives meet. Collective.

        On a GPU this would wait for the device: there the arguments are compared with the loss.

        Raises:
            CollectiveError: another rank calls this or another model otherwise.
        """
        if key not in self.hashes:
            self.hashes[key] = zlib.crc32(f"{self.prefix} {key!r}".encode())
        own_numbers = torch.tensor(
            [self.hashes[key] + 2**32 * torch.is_grad_enabled(), float(digest)], dtype=torch.float64
        )
        largest = torch.cat([own_numbers, -own_numbers])
        self.comm.all_reduce(largest, "max")
        kind, arguments = (largest[:2] + largest[2:]).tolist()  # the largest number minus the smallest one
        # Hosts with other processors may add up the same arguments in another order.
        if kind or arguments > SUMS_DIFFER * abs(float(digest)):
            raise CollectiveError(
                f"ranks of one {self.axis} group should call the same models, with the same arguments",
                f"those of rank {self.comm.peers[0]} to rank {self.comm.peers[-1]} are at different calls just now",
                SAME_SAMPLES,
            )

    def _program(self, key: Hashable, call: Any) -> Program:
        """Return the graph for calls with this key, made where none is kept."""

        def make() -> Program:
            _check_arguments(call, self.axis)
            for module, form in zip(self.modules, self.forms, strict=True):
                form.training = module.training
                if isinstance(module, Dropout):
                    form.p = module.p  # type: ignore[assignment]
            with _as_for_training():
                return self.split.build(self.split.captured(self.function, call))

        return self.programs.find(key, make)

    def _guard(self) -> None:
        """Refuse what would take pieces for the whole."""
        for module in self.modules[1:]:
            module.register_forward_pre_hook(self._refuse_part)
        self.model.register_state_dict_pre_hook(self._refuse_state_dict)
        for path, module in self.model.named_modules():
            module.register_load_state_dict_pre_hook(partial(self._before_load, path))

    def _before_load(
        self, path: str, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any
    ) -> None:
        """Put this rank's pieces in the place of whole tensors that are to be loaded.

        Raises:
            WorkloadError: they are to take the parameters' places.
        """
        check_copies(metadata, type(self.model).__name__)
        if self.set_aside:  # what is loaded into whole parameters counts when `job.gathered()` ends
            return
        for key in [*module._parameters, *module._buffers]:
            value = state.get(prefix + key)
            name = f"{path}.{key}" if path else key
            if isinstance(value, torch.Tensor):  # of another shape: torch's own error says so
                state[prefix + key] = self._piece(name, value)

    def _refuse_state_dict(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars or self.set_aside:  # of a checkpoint, which knows what is cut; or whole
            return
        raise WorkloadError(
            f"under {self.axis} a rank has pieces of the model's parameters",
            "the loop asks for model.state_dict(), which would hold these pieces as if they were whole",
            "write `with job.gathered():` around it, on every rank; or job.save(FOLDER), and `paceline export` for a "
            "file with whole parameters",
        )

    def _refuse_part(self, module: torch.nn.Module, arguments: Any) -> None:
        raise WorkloadError(
            f"under {self.axis} the loop should call the model itself, model(...)",
            f"it calls a part of it, a {type(module).__name__}, or another function of the "
            f"{type(self.model).__name__}, which would compute with this rank's pieces",
            "put what the loop needs into the model's forward, and have it return that too; or hand the parts to "
            f"paceline.prepare as models of their own; or {_OTHER_PLANS}",
        )


class SplitForwards:
    """The models of a loop on the axis that splits them.

    Args:
        models: the loop's models, by the prefix of their names in the job's model.
        optimizers: the loop's optimizers, in the order of their numbers.
        comms: the communicators of the mesh's axes.
        plan: the job's plan, with its mesh and options.
        device: the device on which this rank computes.
        shared: the batch norm statistics that ranks with other samples share; None where each has its own.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        comms: Comms,
        plan: Plan,
        device: torch.device,
        shared: SharedStatistics | None,
    ) -> None:
        _check_apart(models, comms.same_samples.axis)
        self.optimizers = optimizers
        self.comms = comms
        self.mesh = Mesh.parse(plan.mesh)
        self.forwards: list[SplitForward] = []
        for prefix, model in models.items():
            forward = SplitForward(model, prefix, comms, plan, device, shared)
            forward.record = self.record
            model.forward = forward  # type: ignore[method-assign]
            self.forwards.append(forward)
        for number, optimizer in enumerate(optimizers, 1):
            optimizer.register_load_state_dict_post_hook(partial(self._take_pieces, number))
        trained = [
            model for model in models.values() if any(parameter.requires_grad for parameter in model.parameters())
        ]
        self.may_stay_whole = len(trained) > 1
        self.whole_updates: dict[int, list[WholeUpdate]] = {}  # by the optimizer's number, from 1
        self.running = StandIns()
        self.calls = 0
        self.arguments = torch.zeros((), dtype=torch.float64, device=device)

    def notices(self) -> list[str]:
        """Return notices for the user about how the models run."""
        notices: list[str] = []
        for forward in self.forwards:
            notices += forward.split.notices
        return notices

    def record(self, digest: torch.Tensor) -> None:
        """Take a call's arguments into a number that ranks with the same samples compare later.

        Of other arguments a layer's sums over the ranks would be of nothing that exists, and nobody would notice.
        """
        self.calls = self.calls % 7 + 1
        with torch.inference_mode(False):
            self.arguments = self.arguments + self.calls * digest

    def take_digest(self) -> torch.Tensor:
        """Return the digest of the calls since it was taken last."""
        digest = self.arguments
        self.arguments = torch.zeros_like(digest)
        return digest

    def guard(self, is_guarded: bool) -> None:
        """Refuse what the loop can't do with pieces, or let an optimizer use them."""
        for forward in self.forwards:
            forward.guard(is_guarded)

    def cut(self, forward: SplitForward) -> list[torch.Tensor]:
        """Cut a model whose placements are agreed, and the optimizers' state of it; return the tensors that are cut.

        Raises:
            PlanError: an optimizer updates parameters from each other.
        """
        for number, optimizer in enumerate(self.optimizers, 1):
            update = self._whole_update(number, forward)
            updated_whole = {}
            if update is not None:
                updated_whole = {name.removeprefix(forward.prefix): update.owns(name) for name in update.parameters}
            forward.cut_state(optimizer, updated_whole)
        return forward.cut()

    def _take_pieces(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's pieces of whole state that was loaded, but of parameters that are updated whole."""
        whole_names = self._names_updated_whole(number)
        for forward in self.forwards:
            if forward.is_placed:
                updated_whole = {name: True for name in forward.placements if forward.prefix + name in whole_names}
                forward.cut_state(optimizer, updated_whole)

    def regroup(self, number: int) -> None:
        """Follow an optimizer that was given other parameters.

        Raises:
            PlanError: the optimizer updates parameters from each other.
        """
        for forward in self.forwards:
            if forward.is_placed:
                self._whole_update(number, forward)

    def _whole_update(self, number: int, forward: SplitForward) -> WholeUpdate | None:
        """Have an optimizer update whole what it can't update in pieces of a model, but what it does so already."""
        if not forward.placements:
            return None
        known = self._names_updated_whole(number)
        needs = find_whole_parameters(self.optimizers[number - 1], (forward.axis,))
        specs = {}
        pieces = {}
        for name in forward.placements:
            parameter = forward.state(name)
            if parameter in needs and forward.prefix + name not in known:
                specs[forward.prefix + name] = forward.split.shard_spec(name)
                pieces[forward.prefix + name] = parameter
        if not specs:
            return None
        check_whole_experts(forward.split, {name.removeprefix(forward.prefix) for name in specs})
        update = WholeUpdate(forward.comm, cut_parameters(specs, forward.comm.size), pieces)
        self.whole_updates.setdefault(number, []).append(update)
        return update

    def _names_updated_whole(self, number: int) -> set[str]:
        names: set[str] = set()
        for update in self.whole_updates.get(number, []):
            names.update(update.parameters)
        return names

    def begin_update(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Put whole parameters in the place of pieces, where the optimizer needs them. Collective."""
        self.running.end()  # of an update that raised
        replaced: dict[torch.nn.Parameter, torch.nn.Parameter | None] = {}
        for update in self.whole_updates.get(number, []):
            replaced |= update.gather()
        if replaced:
            self.running.begin(optimizer, replaced)

    def end_update(self, number: int) -> None:
        """Give the optimizer its pieces back, with their new values. Collective."""
        self.running.end()
        for update in self.whole_updates.get(number, []):
            update.scatter()

    def local_shards(self) -> dict[str, LocalShard]:
        """Return this rank's pieces of states that are cut, and its shards of the optimizers' whole state of them."""
        found: dict[str, LocalShard] = {}
        replicas = tuple(sorted(self.comms.axes["replicate"].peers))
        for forward in self.forwards:
            found |= forward.local_shards()
        for updates in self.whole_updates.values():
            for update in updates:
                found |= update.state_shards(replicas)
        return found

    def pieces(self) -> dict[torch.nn.Parameter, tuple[SplitForward, str]]:
        """Return the parameters that are cut, with their models and their names there."""
        found = {}
        for forward in self.forwards:
            for name, parameter in forward.pieces().items():
                found[parameter] = (forward, name)
        return found

    def counted(self) -> dict[torch.nn.Parameter, bool]:
        """Return whether this rank counts each parameter in the norm: one counts what all ranks of the axis have."""
        pieces = self.pieces()
        is_first = self.comms.same_samples.rank == 0
        counts = {}
        for forward in self.forwards:
            for parameter in forward.model.parameters():
                counts[parameter] = is_first or parameter in pieces
        return counts


class _WithWholeGradients(torch.autograd.Function):
    """Hands tensors on; their gradients, of which each rank has a part, are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, comm: AxisComm, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.comm = comm
        ctx.set_materialize_grads(False)  # none is not the same as zeros: AdamW would decay the parameter
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise WorkloadError(
                "can't take the gradient of a gradient",
                f"under {ctx.comm.axis} the gradients of a model's inputs and parameters are summed over ranks",
                f"write replicate, shard or tensor in place of {ctx.comm.axis}",
            )
        summed: list[torch.Tensor | None] = list(gradients)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number, gradient in enumerate(gradients):  # all ranks run the same graph, and have the same ones
            if gradient is not None:
                by_dtype.setdefault(gradient.dtype, []).append(number)
        for numbers in by_dtype.values():
            parts = [gradients[number] for number in numbers]
            flat = torch.cat([part.reshape(-1) for part in parts if part is not None])
            ctx.comm.all_reduce(flat)
            sizes = [part.numel() for part in parts if part is not None]
            for number, part, values in zip(numbers, parts, flat.split(sizes), strict=True):
                summed[number] = None if part is None else values.view(part.shape)
        return None, *summed


def _forward(axis: str, form: Any, call: Any) -> Any:
    """Call the forward itself: the hooks of the user's model run around the graph."""
    return _returnable(form.forward(*call["arguments"], **call["named"]), axis)


def _digest_of(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a number of the values of some tensors, without waiting for a GPU."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        real = as_real(tensor.detach())
        if real.is_floating_point():  # sums of numbers of both signs would be only rounding
            value = torch.linalg.vector_norm(real, 1, dtype=torch.float64)
        else:
            value = real.sum(dtype=torch.float64)
        total = 3 * total + value.to(device)
    return total.nan_to_num(0.5, 1.5, 2.5)


@contextmanager
def _as_for_training() -> Iterator[None]:
    """Capture with gradients on, whatever the loop has switched off: the graph runs in either mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _returnable(value: Any, axis: str) -> Any:
    """Return a model's output with `NotComputed` in the place of what no graph can return."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return type(value)({key: _returnable(item, axis) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_returnable(item, axis) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_returnable(item, axis) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _returnable(getattr(value, field.name), axis) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return NotComputed(type(value).__name__, axis)


def _check_arguments(call: Any, axis: str) -> None:
    """Raise WorkloadError unless the arguments are tensors and plain values, in the containers that are looked into."""
    pending = [*call["arguments"], *call["named"].values()]
    while pending:
        value = pending.pop()
        if isinstance(value, _PLAIN):
            continue
        if isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            pending.extend(getattr(value, field.name) for field in dataclasses.fields(value))
        else:
            raise WorkloadError(
                f"under {axis} a model should be called with tensors and plain values, in dicts, lists, tuples and "
                "dataclasses",
                f"an argument is or has a {type(value).__name__}",
                f"hand its tensors to the model, or {_OTHER_PLANS}",
            )


def _check_runs_as_graph(prefix: str, model: torch.nn.Module, axis: str) -> None:
    """Raise WorkloadError where a model does what its graph would not."""
    if compiled_from(model) is not None:
        raise WorkloadError(
            f"under {axis} models should be handed in as they are: their graphs are captured",
            f"model {prefix}{type(compiled_from(model)).__name__} is compiled by torch.compile",
            f"leave torch.compile out, or {_OTHER_PLANS}",
        )


def _check_apart(models: Mapping[str, torch.nn.Module], axis: str) -> None:
    """Raise WorkloadError where two models share a parameter, or gradients are sparse."""
    from paceline.parallel.replicate.replicate_strategy import sparse_names

    seen: set[torch.nn.Parameter] = set()
    for prefix, model in models.items():
        _check_runs_as_graph(prefix, model, axis)
        for name, parameter in model.named_parameters():
            if parameter in seen:
                raise WorkloadError(
                    f"under {axis} the models of a loop should have parameters of their own",
                    f"{prefix}{name} belongs to another model too, which would be split in another way",
                    f"hand in one module that has both, and whose forward does what the loop calls; or {_OTHER_PLANS}",
                )
        seen.update(model.parameters())
        sparse = sparse_names(model)
        if sparse:
            raise WorkloadError(
                f"under {axis} gradients should be dense",
                f"that of {prefix}{min(sparse)} is sparse",
                f"make the embedding without sparse=True, or {_OTHER_PLANS}",
            )
