"""A user's model as the pieces that this rank holds, and the graphs that run on them.

Used whenever the model itself is split, by `tensor` or by `pipeline`. The user's module stays what it is to the
optimizer and to checkpoints: every parameter keeps its name, and is this rank's piece, or, when another stage holds
it, has no storage (it is on the meta device). Its code no longer runs: captured graphs do, one per shape of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from paceline.comm.batch_norm import SharedStatistics
from paceline.comm.collectives import AxisComm
from paceline.comm.differentiable import Exchanges, take_piece
from paceline.comm.pytree import signature, tensors_in
from paceline.graph.capture import Captured, capture
from paceline.graph.context.context_exchanges import SequenceExchanges
from paceline.graph.context.context_layout import split_sequence
from paceline.graph.context.find_attention import merge_attention
from paceline.graph.emit import emit
from paceline.graph.expert.expert_exchanges import ExpertExchanges, ExpertLoads
from paceline.graph.expert.expert_layout import first_layout, spread_experts
from paceline.graph.fake_run import dry_run
from paceline.graph.loss_is_additive import coupled_at
from paceline.graph.own_modules import OwnModules
from paceline.graph.placement import Split
from paceline.graph.skeleton import skeleton
from paceline.graph.stage_writes import check_stage_writes
from paceline.graph.stages import Assignment, Stage, assign_stages, assignment_of, computed_anew, cut_out
from paceline.graph.tensor.explain import why_nothing_is_split
from paceline.graph.tensor.tensor_layout import Layout, choose_layout, own_plan
from paceline.graph.walk import SpreadLayout
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import Cut, ShardSpec
from paceline.parallel.compiled_regions import CompiledRegions
from paceline.parallel.offload_activations import OffloadedActivations, nothing_offloaded
from paceline.parallel.programs import Programs
from paceline.parallel.recompute import nothing_recomputed, recomputed
from paceline.parallel.shard.blocks import find_blocks
from paceline.torch_private.modules import Dropout, NormBase

Function = Callable[[Any, Any], Any]
_WHOLE_LOSS = (
    "F.linear_cross_entropy runs without its chunks, as a graph has the product and the loss that it stands for: all "
    "scores of a micro-batch are held, under `tensor` this rank's part of them; replicate and shard keep the chunks"
)
_OWN_PLAN_MAY_COST = 1.05  # times the derived layout's cost; its authors may know what a count of operations doesn't


@dataclass(slots=True)
class StageProgram:
    """One stage, ready to run on this rank, as segments one after another (one, unless the plan has checkpointing).

    Attributes:
        index: the number of the stage.
        segments: the graphs of its segments.
        run: the functions that run the segments.
        state: a function that returns this rank's piece of a state, by name. It is called in each run: for samples that
            do not count other tensors take the places of buffers.
    """

    index: int
    segments: list[Stage]
    run: list[Callable[..., Any]]
    state: Callable[[str], torch.Tensor]

    @property
    def first(self) -> Stage:
        """Return the segment that receives."""
        return self.segments[0]

    @property
    def last(self) -> Stage:
        """Return the segment that sends."""
        return self.segments[-1]

    def __call__(self, batch: Sequence[torch.Tensor], received: Sequence[torch.Tensor] = ()) -> list[Any]:
        """Run the stage; return the flat list that it sends on, or the function's flat result from the last stage."""
        values: Sequence[Any] = received
        for segment, run in zip(self.segments, self.run, strict=True):
            inputs = [batch[index] for index in segment.inputs]
            values = run(*map(self.state, segment.states), *inputs, *values)
        return list(values)

    @property
    def states(self) -> list[torch.Tensor]:
        """Return the states that the stage reads, segment after segment."""
        states: list[torch.Tensor] = []
        for segment in self.segments:
            states += map(self.state, segment.states)
        return states


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
        model: the user's model; its parameters' values, if it has them, are taken by `fill`.
        tensor: the communicator of the axis `tensor`.
        pipeline: the communicator of the axis `pipeline`.
        plan: the job's plan, with its options.
        device: the device on which this rank computes.
        stages: the number of pipeline stages altogether.
        context: the communicator of the axis `context`; None where sequences are whole.
        expert: the communicator of the axis `expert`; None where every rank has all experts.
        spreads_modules: whether experts that are modules, called by the code of others, may be on one rank each.
    """

    model: torch.nn.Module
    tensor: AxisComm
    pipeline: AxisComm
    plan: Plan
    device: torch.device
    stages: int = 1
    context: AxisComm | None = None
    expert: AxisComm | None = None
    spreads_modules: bool = True
    form: torch.nn.Module = field(init=False)  # the model without values, for capturing
    shapes: dict[str, tuple[int, ...]] = field(init=False)  # of every whole state
    placements: dict[str, Split] = field(default_factory=dict)  # on `tensor`, of the states that it cuts
    expert_placements: dict[str, Split] = field(default_factory=dict)
    expert_owners: dict[str, int] = field(default_factory=dict)  # the rank of `expert`, where only one has a parameter
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
    segments: int = 1  # of each stage, where activations are recomputed or offloaded
    offloaded: OffloadedActivations | None = None  # under checkpointing=offload
    own_modules: OwnModules = field(default_factory=OwnModules)  # those that run by their own code
    has_whole_loss: bool = False  # which the code computes by chunks
    watch: Callable[[fx.Graph], None] | None = None  # shown every graph before it runs, by who wants to look on
    state: Callable[[str], torch.Tensor] = field(init=False)  # returns what this rank holds of a state, by name

    def __post_init__(self) -> None:
        self.state = self.local.__getitem__
        # A copy: `allocate` puts this rank's pieces into the model itself.
        self.form = skeleton(self.model)
        states = [*self.form.named_parameters(), *self.form.named_buffers()]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in states}
        if self.plan.checkpointing != "none":
            # About one segment per block, as blocks are recomputed where the model runs by its own code.
            self.segments = max(1, round(len(find_blocks(self.form)) / self.stages))
        if self.plan.checkpointing == "offload":
            self.offloaded = OffloadedActivations(self.device)

    @property
    def written_by_hand(self) -> list[str]:
        """Return the states that the forward pass writes into, those of batch norm apart."""
        prefixes = []
        for name, module in self.form.named_modules():
            if isinstance(module, NormBase):
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
            layout = first_layout(self.of_first_rank(captured, "expert"), self.expert.size, self.spreads_modules)
            self.expert_placements = {name: split for name, split in layout.placements.items() if split is not None}
            self.expert_owners = layout.owners
            self.expert_layers = {spread.name: spread.layer.count for spread in layout.spread}
        if self.tensor.size > 1:
            chosen = self._choose(self.of_first_rank(captured, "tensor")).placements
            self.placements = {name: split for name, split in chosen.items() if split is not None}
            if not self.placements:
                raise PlanError(
                    f"the model should be split over {self.tensor.size} ranks by tensor",
                    why_nothing_is_split(captured, self.tensor.size),
                    "use fewer ranks on that axis, or replicate, shard or pipeline",
                )
        return captured

    def copy_decisions(self, source: SplitModel) -> None:
        """Take over what another rank's model has decided; `decide` would find the same here, at some cost."""
        self.placements = source.placements
        self.expert_placements = source.expert_placements
        self.expert_owners = source.expert_owners
        self.expert_layers = source.expert_layers
        self.assignment = source.assignment
        self.everywhere = source.everywhere
        self.coupled = source.coupled
        self.written = source.written
        self.segments = source.segments
        self.own_modules = source.own_modules

    def fill(self, name: str, full: torch.Tensor) -> None:
        """Take this rank's piece of a full tensor."""
        if name in self.local:
            with torch.no_grad():
                self.local[name].copy_(self.piece_of(name, full))

    def piece_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a state, or of a tensor of the same shape."""
        for cut in self.cuts(name).values():
            full = take_piece(full, (cut.dim, cut.blocks), cut.part, cut.parts)
        return full

    def pipeline_ranks(self, name: str) -> list[int]:
        """Return the ranks of the pipeline that hold a state: stage s runs on rank s modulo their number."""
        return sorted({stage % self.pipeline.size for stage in self.owners(name)})

    def ranks_with_same(self, name: str, also: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Return the ranks of the world that hold the same piece of a state; `also` at these places on other axes."""
        at = {axis: cut.part for axis, cut in self.cuts(name).items()} | dict(also or {})
        if self.expert is not None and name in self.expert_owners:
            at["expert"] = self.expert.rank
        mesh = Mesh.parse(self.plan.mesh)
        ranks = []
        for rank in range(mesh.world_size):
            place = mesh.coordinate(rank)
            if place["pipeline"] in self.pipeline_ranks(name) and at.items() <= place.items():
                ranks.append(rank)
        return tuple(ranks)

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
        # The assignment counts segments of stages.
        stages = {segment // self.segments for segment in self.assignment.owners.get(name, (0,))}
        return tuple(sorted(stages))

    def shard_spec(self, name: str) -> ShardSpec:
        """Return the shard spec of this rank's piece of a state."""
        return ShardSpec(self.shapes[name], tuple(self.cuts(name).values()))

    def cuts(self, name: str) -> dict[str, Cut]:
        """Return the cuts of a state by `expert` and `tensor`, by axis."""
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
            return self.build(self.captured(function, batch))

        # Shapes are constants of a graph, and so is the mode: dropout is an operation of one and not of the other.
        return self.programs.find((key, is_training, signature(batch)), make)

    def run(self, key: Hashable, function: Function, batch: Any, is_training: bool = True) -> Any:
        """Run a function of the model on one batch where there is one stage; return its result, rebuilt."""
        program = self.program(key, function, batch, is_training)
        (stage,) = program.stages
        return program.captured.rebuild(stage(tensors_in(batch)))

    def captured(self, function: Function, batch: Any) -> Captured:
        """Return the graph that `decide` looked at, if it is of this function and such a batch, else a new one."""
        if self.decided_by is not None and self.decided_by[0] == self._capture_key(function, batch):
            captured = self.decided_by[1]
            self.decided_by = None
            return captured
        return self.capture(function, batch)

    def _capture_key(self, function: Function, batch: Any) -> Hashable:
        return function, modes_of(self.form), call_form(batch)

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
        """Return the graph as this rank of `tensor` runs it, and the graphs of all stages' segments, cut from it."""
        stages: Mapping[fx.Node, int] = assign_stages(captured, self.stages * self.segments, self.assignment)
        captured, stages = self._emitted(captured, stages)
        if self.precision is not None and not self.comms:  # what crosses a cut has the dtypes that autocast gives
            dry_run(captured, {}, self.comms, self.precision)
        segments = cut_out(captured, stages, self.stages * self.segments)
        # The last pass over the graphs that will run: none of the passes before may have lost a write.
        check_stage_writes(segments, captured, self.local_shapes(captured), self.comms, self.precision)
        return captured, segments

    @property
    def comms(self) -> list[AxisComm]:
        """Return the axes that the graphs communicate over."""
        return [comm for comm in (self.context, self.expert, self.tensor) if comm is not None and comm.size > 1]

    def sequence_layout(self, captured: Captured, may_stay_whole: bool = True) -> SpreadLayout:
        """Return the layout by which the ranks of `context` share the sequences of a graph.

        Short ones may stay whole once the plan is decided: a last batch, or one of an evaluation.
        """
        assert self.context is not None
        return split_sequence(captured, self.context.size, self.plan.context_by, self.tensor.size, may_stay_whole)

    def expert_layout(self, captured: Captured) -> SpreadLayout:
        """Return the layout by which the ranks of `expert` share a graph's experts and samples, as `context` left it.

        Raises:
            PlanError: its layers of experts are not those of the graph that the weights were split by.
        """
        assert self.expert is not None
        layout = spread_experts(captured, self.expert.size, self.spreads_modules)
        for name in captured.states:
            is_spread = layout.placements.get(name) is not None or name in layout.owners
            if is_spread != (name in self.of_experts):
                raise PlanError(
                    f"{name} should be used in the same way in every batch, in training and in evaluation",
                    "it is the weight of a layer of experts in one and not in the other",
                    "do the same to the rows of experts in both, with or without dropout, or leave expert out",
                )
        return layout

    def _emitted(
        self, captured: Captured, stages: Mapping[fx.Node, int], until: str = "", as_first: bool = False
    ) -> tuple[Captured, Mapping[fx.Node, int]]:
        """Return the graph as a rank of the axes runs it, one axis after the other, and the stage of each node.

        Args:
            captured: the captured graph.
            stages: the stage of each of its nodes.
            until: the first axis that is left out; "" for none.
            as_first: whether the graph is the first rank's; else it is this rank's.
        """
        axes: dict[str, Callable[[Captured, AxisComm], tuple[Layout, Exchanges]]] = {
            "context": lambda graph, comm: (self.sequence_layout(graph), SequenceExchanges(comm)),
            "expert": lambda graph, comm: (self.expert_layout(graph), ExpertExchanges(comm, self.loads)),
            "tensor": lambda graph, comm: (self.tensor_layout(graph), Exchanges(comm)),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        talking = []
        for comm in self.comms:
            if comm.axis == until:
                break
            comm = replace(comm, rank=0) if as_first else comm
            talking.append(comm)
            layout, exchanges = axes[comm.axis](captured, comm)
            emitted, origin = emit(captured, layout, exchanges, stages)
            for name, placement in layout.placements.items():
                if placement is not None:
                    full_shape = shapes.get(name, self.shapes[name])
                    shapes[name] = placement.local_shape(full_shape, comm.rank, comm.size)
            # For the local shapes and dtypes of what crosses a cut: the next stage allocates by them. And for the
            # memory of each value, without which writes in place would be lost.
            dry_run(emitted, shapes, talking, self.precision)
            captured, stages = emitted, _stages_of_emitted(emitted, origin, stages)
        return captured, stages

    def of_first_rank(self, captured: Captured, axis: str) -> Captured:
        """Return the graph as the first rank of the axes before `axis` runs it: all decide by that one."""
        return self._emitted(captured, {}, axis, as_first=True)[0]

    def tensor_layout(self, captured: Captured) -> Layout:
        """Return the layout by which the ranks of `tensor` run a graph, with the weights split as was decided."""
        decided = {name: self.placements.get(name) for name in captured.states}
        return choose_layout(captured, self.tensor.size, decided, self.plan.sequence == "on")

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
        captured, segments = self.stages_of(captured)
        constants = {name: tensor.to(self.device) for name, tensor in captured.constants.items()}
        programs = []
        for index in self.own_stages:
            stage = segments[index * self.segments : (index + 1) * self.segments]
            run = []
            for segment in stage:
                if self.shared is not None:
                    _share(segment.graph, self.shared)
                if self.watch is not None:
                    self.watch(segment.graph)
                run.append(self._runnable(fx.GraphModule(constants, segment.graph), segment.states, constants))
            programs.append(StageProgram(index, stage, run, self.state))
        graphs = [captured.graph]
        for program in programs:
            graphs += [segment.graph for segment in program.segments]
        nodes = sum(len(graph.nodes) for graph in graphs)
        return Program(captured, programs, self.stages, nodes)

    def _runnable(
        self, module: fx.GraphModule, states: Sequence[str], constants: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return a function that runs a segment of the graph, which reads these states and constants."""
        run: Callable[..., Any] = module
        if self.plan.compile == "on":
            run = self.regions.compile(module)
        if self.offloaded is not None:
            return self.offloaded.around(run, lambda: [*map(self.state, states), *constants.values()])
        return self.recompute(run)

    def recompute(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Put `run` under the plan's activation checkpointing, unless the model would write its buffers twice by it."""
        return recomputed(run, "none" if self.written else self.plan.checkpointing)

    @property
    def notices(self) -> list[str]:
        """Return notices for the user about how the model was split."""
        notices = [*self.own_modules.notices, *self.programs.notices]
        if self.has_whole_loss:
            notices.append(_WHOLE_LOSS)
        if self.offloaded is not None:
            # The segment that ran last keeps its tensors; in a pipeline another micro-batch comes after it.
            return [*notices, nothing_offloaded()] if self.segments * self.stages == 1 else notices
        if not self.written or self.plan.checkpointing == "none":
            return notices
        reason = "the model writes into its buffers, and computed again it would write twice"
        return [*notices, nothing_recomputed(self.plan.checkpointing, reason)]

    def _first_cut(self, captured: Captured) -> dict[fx.Node, int]:
        """Cut into stages of so many segments each; fewer segments where there are too few places to cut."""
        # Segments only save memory, so they may be fewer; stages are asked for by the plan.
        while True:
            try:
                return assign_stages(captured, self.stages * self.segments)
            except PlanError:
                if self.segments == 1:
                    raise
                self.segments -= 1

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


def modes_of(model: torch.nn.Module) -> Hashable:
    """Return the modes that a graph depends on: whether each module trains, and its dropout probability."""
    return tuple((part.training, part.p if isinstance(part, Dropout) else 0) for part in model.modules())


def call_form(batch: Any) -> Hashable:
    """Return the form of a batch, equal for batches that one graph can serve: shapes, strides, need of gradients."""
    forms = tuple((tensor.requires_grad, tensor.stride()) for tensor in tensors_in(batch))
    return forms, signature(batch)


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
