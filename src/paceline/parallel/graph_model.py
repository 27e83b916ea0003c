"""A person's model as the pieces that this rank holds, and the graphs that run on them.

Used whenever the model itself is split, by `tensor` or by `pipeline`. The person's module stays what it is to the
optimizer and to checkpoints: every parameter keeps its name, and is this rank's piece, or, when another stage holds
it, has no storage (it is on the meta device). Its code no longer runs: captured graphs do, one per shape of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn.modules.batchnorm import _NormBase

from paceline.comm.batch_norm import SharedStatistics
from paceline.comm.collectives import AxisComm
from paceline.comm.differentiable import Exchanges, take_piece
from paceline.comm.experts import ExpertLoads
from paceline.comm.pytree import signature, tensors_in
from paceline.graph.capture import Captured, capture
from paceline.graph.context_layout import ContextLayout
from paceline.graph.dry_run import dry_run
from paceline.graph.emit import emit
from paceline.graph.expert_layout import ExpertLayout
from paceline.graph.explain import why_nothing_is_split
from paceline.graph.find_attention import merge_attention
from paceline.graph.layout import Layout, choose_layout
from paceline.graph.loss_is_additive import coupled_at
from paceline.graph.own_modules import OwnModules
from paceline.graph.placement import Placement
from paceline.graph.reshape_rules import shape_of
from paceline.graph.skeleton import skeleton
from paceline.graph.stage_writes import check_stage_writes
from paceline.graph.stages import Assignment, Stage, assign_stages, assignment_of, computed_anew, cut_out
from paceline.graph.tp_plan import own_plan
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import Cut, ShardSpec
from paceline.parallel import expert
from paceline.parallel.compiled_regions import CompiledRegions
from paceline.parallel.context import as_first, emit_positions, layout_of
from paceline.parallel.offload_activations import OffloadedActivations, nothing_offloaded
from paceline.parallel.programs import Programs
from paceline.parallel.recompute import nothing_recomputed, recomputed
from paceline.parallel.shard.blocks import find_blocks

Function = Callable[[Any, Any], Any]
_WHOLE_LOSS = (
    "F.linear_cross_entropy runs without its chunks, as a graph has the product and the loss that it stands for: all "
    "scores of a micro-batch are held, under `tensor` this rank's part of them; replicate and shard keep the chunks"
)
_OWN_PLAN_MAY_COST = 1.05  # times the derived layout's cost; its authors may know what a count of operations doesn't


@dataclass(slots=True)
class StageProgram:
    """One stage, ready to run on this rank, as pieces one after another (one, unless the plan has checkpointing)."""

    index: int
    pieces: list[Stage]
    run: list[Callable[..., Any]]
    states: list[list[torch.Tensor]]  # of each piece

    @property
    def first(self) -> Stage:
        """Return the piece that receives."""
        return self.pieces[0]

    @property
    def last(self) -> Stage:
        """Return the piece that sends."""
        return self.pieces[-1]

    def __call__(self, batch: Sequence[torch.Tensor], received: Sequence[torch.Tensor] = ()) -> list[Any]:
        """Run it; return the flat list that it sends on, or the function's flat result from the last stage."""
        values: Sequence[Any] = received
        for piece, run, states in zip(self.pieces, self.run, self.states, strict=True):
            inputs = [batch[index] for index in piece.inputs]
            values = run(*states, *inputs, *values)
        return list(values)


@dataclass(slots=True)
class Program:
    """A captured function for one shape of batch: this rank's stages of it, in order."""

    captured: Captured
    stages: list[StageProgram]
    total_stages: int
    nodes: int = 0  # of all graphs that it keeps


@dataclass(slots=True)
class SplitModel:
    """The model's pieces on this rank.

    Args:
        model: the person's model; its parameters' values, if it has them, are taken by `fill`.
        tensor: the `tensor` axis.
        pipeline: the `pipeline` axis.
        plan: what else was decided.
        device: where this rank computes.
        stages: pipeline stages altogether.
        context: the `context` axis; None where sequences are whole.
        expert: the `expert` axis; None where every rank has all experts.
    """

    model: torch.nn.Module
    tensor: AxisComm
    pipeline: AxisComm
    plan: Plan
    device: torch.device
    stages: int = 1
    context: AxisComm | None = None
    expert: AxisComm | None = None
    form: torch.nn.Module = field(init=False)  # the model without values, for capturing
    shapes: dict[str, tuple[int, ...]] = field(init=False)  # of every whole state
    placements: dict[str, Placement] = field(default_factory=dict)  # on `tensor`
    expert_placements: dict[str, Placement] = field(default_factory=dict)
    expert_owners: dict[str, int] = field(default_factory=dict)  # the rank of `expert` that alone has a parameter
    expert_layers: dict[str, int] = field(default_factory=dict)  # experts of each layer whose rows are counted
    loads: ExpertLoads = field(default_factory=ExpertLoads)
    assignment: Assignment | None = None
    everywhere: set[str] = field(default_factory=set)  # buffers that nothing writes: every stage may need them
    coupled: str = ""  # the operation in which samples meet, if any
    written: list[str] = field(default_factory=list)  # states that every forward pass writes into
    shared: SharedStatistics | None = None  # batch norm over the ranks with other samples of the same batch
    local: dict[str, torch.Tensor] = field(default_factory=dict)
    programs: Programs = field(default_factory=Programs)
    regions: CompiledRegions = field(default_factory=CompiledRegions)  # of compile=on
    decided_by: tuple[Hashable, Captured] | None = None  # the graph that `decide` looked at, until it is built
    precision: torch.dtype | None = None  # that the graphs run under autocast to
    pieces: int = 1  # of each stage, where activations are recomputed or offloaded
    offloaded: OffloadedActivations | None = None  # under checkpointing=offload
    own_modules: OwnModules = field(default_factory=OwnModules)  # those that run by their own code
    has_whole_loss: bool = False  # which the code computes by chunks
    watch: Callable[[fx.Graph], None] | None = None  # shown every graph before it runs, by who wants to look on

    def __post_init__(self) -> None:
        # A copy: `allocate` puts this rank's pieces into the model itself.
        self.form = skeleton(self.model)
        states = [*self.form.named_parameters(), *self.form.named_buffers()]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in states}
        if self.plan.checkpointing != "none":
            # About one piece per block, as blocks are recomputed where the model runs by its own code.
            self.pieces = max(1, round(len(find_blocks(self.form)) / self.stages))
        if self.plan.checkpointing == "offload":
            self.offloaded = OffloadedActivations(self.device)

    @property
    def written_by_hand(self) -> list[str]:
        """Return the states that the forward pass writes into, those of batch norm apart."""
        prefixes = []
        for name, module in self.form.named_modules():
            if isinstance(module, _NormBase):
                prefixes.append(f"{name}." if name else "")
        return [name for name in self.written if not name.startswith(tuple(prefixes))]

    @property
    def of_experts(self) -> set[str]:
        """Return the parameters of which ranks of `expert` have different parts."""
        return self.expert_placements.keys() | self.expert_owners.keys()

    @property
    def own_stages(self) -> range:
        """Return the stages of this rank."""
        return range(self.pipeline.rank, self.stages, self.pipeline.size)

    def decide(self, function: Function, batch: Any) -> Captured:
        """Choose layout and stages from one batch; `allocate` is next.

        Raises:
            WorkloadError: the model can't be captured.
            PlanError: an axis is larger than what can be split.
        """
        captured = self.capture(function, batch)
        self.decided_by = self._capture_key(function, batch), captured
        # Stages first: they say which rank of the pipeline holds which state.
        stages = self._first_cut(captured)
        self.everywhere = _unwritten_buffers(captured)
        self.written = list(dict.fromkeys(write.state for write in captured.log))  # each once, in order
        # What forbids micro-batches: an operation in which samples meet, or a write that would happen once for each of
        # them.
        meeting = coupled_at(captured)
        if meeting is not None:
            self.coupled = f"{meeting.target} in {captured.module_path.get(meeting) or 'the model or the loss'}"
        elif self.written:  # once per batch, not per micro-batch
            self.coupled = f"the write into {self.written[0]}"
        self.assignment = assignment_of(captured, stages)
        if self.context is not None:
            self.sequence_layout(captured, may_stay_whole=False)  # or a plan that splits nothing would train
        if self.expert is not None:
            layout = expert.first_layout(self.of_first_positions(captured), self.expert)
            self.expert_placements = {name: split for name, split in layout.placements.items() if split is not None}
            self.expert_owners = layout.owners
            self.expert_layers = {spread.name: spread.layer.count for spread in layout.spread}
        if self.tensor.size > 1:
            self.placements = self._choose(self.as_first_place(captured)).placements
            if all(placement is None for placement in self.placements.values()):
                raise PlanError(
                    f"the model should be split over {self.tensor.size} ranks by tensor",
                    why_nothing_is_split(captured, self.tensor.size),
                    "use fewer ranks on that axis, or replicate, shard or pipeline",
                )
        return captured

    def copy_decisions(self, other: SplitModel) -> None:
        """Take over what another rank's model has decided; `decide` would find the same here, at some cost."""
        self.placements = other.placements
        self.expert_placements = other.expert_placements
        self.expert_owners = other.expert_owners
        self.expert_layers = other.expert_layers
        self.assignment = other.assignment
        self.everywhere = other.everywhere
        self.coupled = other.coupled
        self.written = other.written
        self.pieces = other.pieces
        self.own_modules = other.own_modules

    def fill(self, name: str, full: torch.Tensor) -> None:
        """Take this rank's piece of a full tensor."""
        if name not in self.local:
            return
        piece = full
        for cut in self.cuts(name).values():
            piece = take_piece(piece, (cut.dim, cut.blocks), cut.part, cut.parts)
        with torch.no_grad():
            self.local[name].copy_(piece)

    def owns(self, name: str) -> bool:
        """True if this rank holds (a piece of) the state."""
        if self.expert is not None and self.expert_owners.get(name, self.expert.rank) != self.expert.rank:
            return False
        return any(stage in self.own_stages for stage in self.owners(name))

    def owners(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold a state; one that no operation reads stays with the first."""
        assert self.assignment is not None
        if name in self.everywhere:
            return tuple(range(self.stages))
        # The assignment counts pieces of stages.
        stages = {piece // self.pieces for piece in self.assignment.owners.get(name, (0,))}
        return tuple(sorted(stages))

    def shard_spec(self, name: str) -> ShardSpec:
        """Return which part of the state this rank holds."""
        return ShardSpec(self.shapes[name], tuple(self.cuts(name).values()))

    def cuts(self, name: str) -> dict[str, Cut]:
        """Return how `expert` and `tensor` cut a state, by axis."""
        cuts = {}
        for axis, comm, placements in (
            ("expert", self.expert, self.expert_placements),
            ("tensor", self.tensor, self.placements),
        ):
            placement = placements.get(name)
            if placement is not None and comm is not None:
                cuts[axis] = Cut(placement.dim, placement.blocks, comm.rank, comm.size)
        return cuts

    def program(self, key: Hashable, function: Function, batch: Any, is_training: bool = True) -> Program:
        """Return this rank's part of `function` for batches like `batch`; made where none is kept for the shape."""

        def make() -> Program:
            self.form.train(is_training)
            return self.build(self._captured(function, batch))

        # Shapes are constants of a graph, and so is the mode: dropout is an operation of one and not of the other.
        return self.programs.find((key, is_training, signature(batch)), make)

    def _captured(self, function: Function, batch: Any) -> Captured:
        """Return the graph that `decide` looked at, if it is of this function and such a batch, else a new one."""
        if self.decided_by is not None and self.decided_by[0] == self._capture_key(function, batch):
            captured = self.decided_by[1]
            self.decided_by = None
            return captured
        return self.capture(function, batch)

    def _capture_key(self, function: Function, batch: Any) -> Hashable:
        return function, self.form.training, signature(batch)

    def capture(self, function: Function, batch: Any) -> Captured:
        """Return the graph of `function` for batches like `batch`."""
        if not tensors_in(batch):
            raise WorkloadError(
                "a batch should be of tensors", f"it is a {type(batch).__name__}", "collate samples into tensors"
            )
        # The graph runs under autocast; captured under it too, it would hold casts of weights, which no rule splits.
        with torch.autocast(self.device.type, enabled=False):
            captured = capture(self.form, function, batch, self.device, self.own_modules)
        self.has_whole_loss |= captured.has_whole_loss
        if self.context is not None:
            merge_attention(captured, self.context.size)
        return captured

    def stages_of(self, captured: Captured) -> tuple[Captured, list[Stage]]:
        """Return the graph as this rank of `tensor` runs it, and the graphs of all stages, in pieces, cut from it."""
        stages = assign_stages(captured, self.stages * self.pieces, self.assignment)
        if self.context is not None:
            captured, stages = self._on_positions(captured, stages, self.context)
        if self.expert is not None:
            captured, stages = self._on_samples(captured, stages, self.expert)
        if self.tensor.size > 1:
            layout = choose_layout(captured, self.tensor.size, self._decided(captured), self.plan.sequence == "on")
            emitted, origin = emit(captured, layout, Exchanges(self.tensor), stages)
            # For the local shapes and dtypes of what crosses a cut: the next stage allocates by them. And for the
            # memory of each value, without which writes in place would be lost.
            dry_run(emitted, self.local_shapes(emitted), self.comms, self.precision)
            stages = _stages_of_emitted(emitted, origin, stages)
            captured = emitted
        elif self.precision is not None:  # what crosses a cut has the dtypes that autocast gives
            dry_run(captured, {}, self.comms, self.precision)
        pieces = cut_out(captured, stages, self.stages * self.pieces)
        # The last pass over the graphs that will run: none of the passes before may have lost a write.
        check_stage_writes(pieces, captured, self.local_shapes(captured), self.comms, self.precision)
        return captured, pieces

    @property
    def comms(self) -> list[AxisComm]:
        """Return the axes that the graphs talk on."""
        return [comm for comm in (self.expert, self.context, self.tensor) if comm is not None]

    def sequence_layout(self, captured: Captured, may_stay_whole: bool = True) -> ContextLayout:
        """Return how the ranks of `context` share the sequences of a graph.

        Short ones may stay whole once the plan is decided: a last batch, or one of an evaluation.
        """
        assert self.context is not None
        return layout_of(captured, self.context, self.plan.context_by, self.tensor.size, may_stay_whole)

    def _on_positions(
        self, captured: Captured, stages: Mapping[fx.Node, int], context: AxisComm
    ) -> tuple[Captured, dict[fx.Node, int]]:
        """Return the graph as a rank of `context` runs it, weights whole, and the stage of each of its nodes."""
        emitted, origin = emit_positions(captured, self.sequence_layout(captured), context, stages)
        dry_run(emitted, {}, self.comms, self.precision)
        return emitted, _stages_of_emitted(emitted, origin, stages)

    def expert_layout(self, captured: Captured) -> ExpertLayout:
        """Return how the ranks of `expert` spread the experts and the samples of a graph, as `context` left it.

        Raises:
            PlanError: its layers of experts are not those of the graph that the weights were split by.
        """
        assert self.expert is not None
        layout = expert.layout_of(captured, self.expert)
        for name in captured.states:
            is_spread = layout.placements.get(name) is not None or name in layout.owners
            if is_spread != (name in self.of_experts):
                raise PlanError(
                    f"{name} should be used in the same way in every batch, in training and in evaluation",
                    "it is the weight of a layer of experts in one and not in the other",
                    "do the same to the rows of experts in both, with or without dropout, or leave expert out",
                )
        return layout

    def _on_samples(
        self, captured: Captured, stages: Mapping[fx.Node, int], comm: AxisComm
    ) -> tuple[Captured, dict[fx.Node, int]]:
        """Return the graph as a rank of `expert` runs it, and the stage of each of its nodes."""
        emitted, origin = expert.emit_samples(captured, self.expert_layout(captured), comm, stages, self.loads)
        shapes = {}
        for name in captured.states:
            placement = self.expert_placements.get(name)
            if placement is not None:
                shapes[name] = placement.local_shape(shape_of(captured.states[name]), comm.rank, comm.size)
        dry_run(emitted, shapes, self.comms, self.precision)
        return emitted, _stages_of_emitted(emitted, origin, stages)

    def of_first_positions(self, captured: Captured) -> Captured:
        """Return the graph as the first rank of `context` runs it."""
        if self.context is None:
            return captured
        return self._on_positions(captured, {}, as_first(self.context))[0]

    def as_first_place(self, captured: Captured) -> Captured:
        """Return the graph as the first rank of `context` and `expert` runs it.

        One rank's decides where weights are split.
        """
        captured = self.of_first_positions(captured)
        if self.expert is None:
            return captured
        return self._on_samples(captured, {}, as_first(self.expert))[0]

    def _choose(self, captured: Captured) -> Layout:
        """Return the cheaper of the layout that the model's own plan leads to and the one derived without it."""
        parts = self.tensor.size
        is_sequence_split = self.plan.sequence == "on"
        derived = choose_layout(captured, parts, None, is_sequence_split)
        placements = own_plan(self.form, captured, parts)
        if not placements:
            return derived
        planned = choose_layout(captured, parts, placements, is_sequence_split)
        if planned.cost <= _OWN_PLAN_MAY_COST * derived.cost:
            return planned
        return derived

    def local_shapes(self, captured: Captured) -> dict[str, tuple[int, ...]]:
        """Return the shape of this rank's piece of every state that a graph reads."""
        return {name: tuple(self.shard_spec(name).local_shape) for name in captured.states}

    def build(self, captured: Captured) -> Program:
        """Make this rank's stages ready to run."""
        captured, pieces = self.stages_of(captured)
        constants = {name: tensor.to(self.device) for name, tensor in captured.constants.items()}
        programs = []
        for index in self.own_stages:
            stage = pieces[index * self.pieces : (index + 1) * self.pieces]
            run = []
            states = []
            for piece in stage:
                if self.shared is not None:
                    _share(piece.graph, self.shared)
                if self.watch is not None:
                    self.watch(piece.graph)
                own = [self.local[name] for name in piece.states]
                run.append(self._runnable(fx.GraphModule(constants, piece.graph), [*own, *constants.values()]))
                states.append(own)
            programs.append(StageProgram(index, stage, run, states))
        graphs = [captured.graph, *[piece.graph for program in programs for piece in program.pieces]]
        nodes = sum(len(graph.nodes) for graph in graphs)
        return Program(captured, programs, self.stages, nodes)

    def _decided(self, captured: Captured) -> Mapping[str, Placement]:
        return {name: self.placements.get(name) for name in captured.states}

    def _runnable(self, module: fx.GraphModule, states: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Return what runs a piece of the graph that reads `states`."""
        run: Callable[..., Any] = module
        if self.plan.compile == "on":
            run = self.regions.compile(module)
        if self.offloaded is not None:
            return self.offloaded.around(run, lambda: states)
        return self.recompute(run)

    def recompute(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Put `run` under the plan's activation checkpointing, unless the model would write its buffers twice by it."""
        return recomputed(run, "none" if self.written else self.plan.checkpointing)

    @property
    def notices(self) -> list[str]:
        """Return what the person should know of how the model was split."""
        notices = [*self.own_modules.notices, *self.programs.notices]
        if self.has_whole_loss:
            notices.append(_WHOLE_LOSS)
        if self.offloaded is not None:
            # The piece that ran last keeps its tensors; in a pipeline another micro-batch comes after it.
            return [*notices, nothing_offloaded()] if self.pieces * self.stages == 1 else notices
        if not self.written or self.plan.checkpointing == "none":
            return notices
        why = "the model writes into its buffers, and computed again it would write twice"
        return [*notices, nothing_recomputed(self.plan.checkpointing, why)]

    def _first_cut(self, captured: Captured) -> dict[fx.Node, int]:
        """Cut into stages of so many pieces each; fewer pieces where there are too few places to cut."""
        # Pieces only save memory, so they may be fewer; stages are asked for by the plan.
        while True:
            try:
                return assign_stages(captured, self.stages * self.pieces)
            except PlanError:
                if self.pieces == 1:
                    raise
                self.pieces -= 1

    def allocate(self) -> None:
        """Put this rank's pieces, without values yet, where the model's parameters and buffers are."""
        replacements: dict[int, torch.Tensor] = {}  # by identity: tied ones stay tied
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if self.owns(name):
                shape = self.shard_spec(name).local_shape
                piece = torch.empty(shape, dtype=tensor.dtype, device=self.device)
            else:
                piece = tensor.detach().to("meta")
            if isinstance(tensor, torch.nn.Parameter):
                piece = torch.nn.Parameter(piece, tensor.requires_grad)
            if self.owns(name):
                self.local[name] = piece
            replacements[id(tensor)] = piece
        for module in self.model.modules():
            for slots in (module._parameters, module._buffers):
                for key, tensor in slots.items():  # type: ignore[assignment]
                    if tensor is not None and id(tensor) in replacements:
                        slots[key] = replacements[id(tensor)]  # type: ignore[assignment]
        # The model's own code would compute with pieces as if they were whole.
        self.model.register_forward_pre_hook(_refuse_call)


def _unwritten_buffers(captured: Captured) -> set[str]:
    """Return the buffers that nothing writes: read by nodes that any stage may compute, or not at all."""
    anew = computed_anew(captured)
    unwritten = captured.buffers - captured.states.keys()
    for name, node in captured.states.items():
        if name in captured.buffers and node in anew:
            unwritten.add(name)
    return unwritten


def _stages_of_emitted(
    emitted: Captured, origin: Mapping[fx.Node, fx.Node], stages: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """Return the stage of each node of one rank's graph: that of the node it was made for."""
    anew = computed_anew(emitted)
    new_stages = {}
    for new, old in origin.items():
        if old in stages and new not in anew:
            new_stages[new] = stages[old]
    return new_stages


def _share(graph: fx.Graph, shared: SharedStatistics) -> None:
    """Let the graph's batch norms in training share their statistics over the ranks."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default and node.args[5]:
            node.target = shared.batch_norm


def _refuse_call(module: torch.nn.Module, arguments: Any) -> None:
    raise WorkloadError(
        "can't call the model by itself",
        "its parameters are split by tensor or pipeline, so its own code can't run on them",
        "use job.evaluate with a score function, or export a checkpoint and load it in one process",
    )
