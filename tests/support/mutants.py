"""Realistic bugs, to be switched on in a rank's process: the verifier must catch each and name where it is.

Each patches the product from outside; nothing of the product knows of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mutant:
    """A bug.

    Attributes:
        switch_on: patches the process.
        plan: under which it bites.
        subject: the model.
        module: of the paths that may be named, the beginnings; "" stands for no module.
        collective: what the collective that is named must contain.
        what: checks besides the step.
        precision: in which it shows.
        says: a pattern that the first failed check must match.
        culprit: a pattern that the sentence on the first difference must match.
        steps: how many are taken.
    """

    switch_on: Callable[[], None]
    plan: str
    subject: str = "decoder"
    module: tuple[str, ...] = ()
    collective: str = ""
    what: tuple[str, ...] = ("step",)
    precision: str = "float64"
    says: str = ""
    culprit: str = ""
    steps: int = 2


MUTANTS: dict[str, Mutant] = {}


def mutant(plan, **facts):
    def note(function):
        MUTANTS[function.__name__] = Mutant(function, plan, **facts)
        return function

    return note


def wrap(owner, name, around):
    """Replace a function by `around(the old one, arguments...)`."""
    plain = getattr(owner, name)
    setattr(owner, name, functools.wraps(plain)(lambda *arguments, **named: around(plain, *arguments, **named)))


# --- tensor


@mutant("tensor=2,sequence=on", module=("blocks.", "norm"), collective="on tensor")
def missing_all_reduce_of_a_norms_gradient():
    from paceline.comm.differentiable import Exchanges

    wrap(Exchanges, "copy_to_group", lambda plain, self, x: x if x.dim() == 1 else plain(self, x))


@mutant("tensor=2", module=("head",), collective="all_reduce on tensor")
def missing_all_reduce_into_the_columns():
    from paceline.comm.differentiable import Exchanges

    wrap(Exchanges, "copy_to_group", lambda plain, self, x: x.view_as(x))


@mutant(
    "tensor=2",
    module=("blocks.1.down", "blocks.0.attention.out", "blocks.0", "words"),
    collective="all_reduce on tensor",
)
def mean_for_sum_after_the_rows():
    from paceline.comm.differentiable import Exchanges

    wrap(Exchanges, "reduce_from_group", lambda plain, self, x: plain(self, x) / self.comm.size)


@mutant("tensor=2", module=("blocks.0",))
def bias_added_on_every_rank():
    from paceline.graph import emit

    def partial(plain, self, node, arguments, named, sources):
        return self._call(node.target, *arguments, **named)

    wrap(emit.Emitter, "_partial", partial)


@mutant("tensor=2", module=("blocks.0.attention",))
def swapped_row_and_column_shard():
    from paceline.parallel.graph_model import SplitModel

    def fill(plain, self, name, full):
        is_square = full.dim() == 2 and full.shape[0] == full.shape[1]
        plain(self, name, full.T if is_square and "query" in name else full)

    wrap(SplitModel, "fill", fill)


@mutant("tensor=2", module=("words", ""))
def uneven_vocabulary():
    from paceline.comm.differentiable import Exchanges

    def embedding(plain, self, weight, indices, rows, padding=-1):  # as if all pieces were as long as the first
        own = -(-rows // self.comm.size)
        return (
            plain(self, weight[: rows - own], indices, rows, padding)
            if self.comm.rank
            else plain(self, weight, torch.where(indices == own - 1, 0, indices), rows, padding)
        )

    wrap(Exchanges, "split_embedding", embedding)


@mutant("tensor=2,sequence=on", module=("blocks.0.attention", "blocks.0"))
def rotary_position_off_by_one():
    from paceline.comm import api
    from paceline.parallel import graph_model as split_model

    def captured(plain, *arguments):
        made = plain(*arguments)
        for node in [n for n in made.graph.nodes if n.target is torch.ops.aten.cos.default]:
            with made.graph.inserting_after(node):  # the later half of the sequence, on the second rank
                later = made.graph.call_function(torch.roll, (node, api.rank(), 0))
            later.meta.update({key: value for key, value in node.meta.items() if key != "original"})
            node.replace_all_uses_with(later, delete_user_cb=lambda user, later=later: user is not later)
        return made

    wrap(split_model, "capture", captured)


@mutant("tensor=2", module=("", "head"), collective="all_reduce on tensor")
def vocabulary_loss_of_the_own_classes_alone():
    from paceline.comm.collectives import AxisComm

    wrap(AxisComm, "all_reduce", lambda plain, self, x, op="sum": None if op == "max" else plain(self, x, op))
    from paceline.comm import differentiable

    def forward(plain, ctx, scores, labels, *rest):
        return plain(ctx, scores, torch.where(labels > 200, 0, labels), *rest)

    wrap(differentiable._SplitCrossEntropy, "forward", forward)


@mutant("tensor=4", module=("blocks.0", "words"))
def gathered_in_the_wrong_order():
    def reverse(plain, self, x):
        return plain(self, x.flip(0) if self.comm.rank == 1 and x.dim() == 3 else x)

    from paceline.comm.differentiable import Exchanges

    wrap(Exchanges, "reduce_from_group", reverse)


@mutant("replicate=2,tensor=2", module=("norm", "blocks.", "words", "head"), collective="of the norm")
def clipping_by_the_local_norm():
    from paceline.parallel.engine import declared

    wrap(declared, "global_norm", lambda plain, parameters, counted, comms: plain(parameters, counted, []))


# --- replicate


@mutant("replicate=2", culprit="the gradient of what the model makes is wrong")
def wrong_share_of_the_mean():
    from paceline.parallel.step_stats import StepStatsReducer

    wrap(StepStatsReducer, "weight", lambda plain, self: plain(self) * self.comm.size)


@mutant("replicate=2", module=("", "norm", "head", "words"), collective="on replicate")
def wrong_loss_weight():
    from paceline.parallel.step_stats import StepStatsReducer

    wrap(StepStatsReducer, "add", lambda plain, self, loss, weight: plain(self, loss, 32.0))


@mutant("replicate=2", subject="remembers", module=("",), collective="of buffers")
def a_skipped_buffer():
    from paceline.parallel.replicate.buffers import Buffers

    wrap(Buffers, "reduce", lambda plain, self, changed: None)


@mutant("replicate=2", subject="remembers", module=("norm",))
def local_batch_statistics():
    from paceline.comm import batch_norm

    wrap(
        batch_norm, "_merged", lambda plain, mine, comm: torch.stack([mine[0], mine[1], mine[2] / mine[0].clamp(min=1)])
    )


@mutant("replicate=2", module=("words",), collective="broadcast on replicate")
def broadcast_from_the_wrong_root():
    from paceline.comm.collectives import AxisComm

    wrap(AxisComm, "broadcast", lambda plain, self, x, root=0: plain(self, x, self.size - 1))


@mutant("replicate=2", what=("step", "draws"))
def dropout_equal_on_all_data_ranks():
    from paceline.train import job

    wrap(job, "seed_everything", lambda plain, *numbers: plain(numbers[0], 1) if len(numbers) > 1 else plain(*numbers))


@mutant("tensor=2", what=("step", "draws"))
def dropout_differs_between_ranks_with_the_same_samples():
    from paceline.comm import api
    from paceline.train import job

    wrap(job, "seed_everything", lambda plain, *numbers: plain(*numbers, *[api.rank()] * (len(numbers) > 1)))


@mutant(
    "replicate=2", precision="float32", subject="plain", module=("words", "norm", "blocks."), collective="all_reduce on"
)
def reduction_in_bf16():
    from paceline.parallel.replicate.bucket import Bucket

    def rounded(gradient):
        return gradient.bfloat16().to(gradient.dtype)

    def copy_in(plain, self, gradients, scale):
        plain(self, [(index, rounded(gradient)) for index, gradient in gradients], scale)

    wrap(Bucket, "fill", lambda plain, self, index, gradient, scale: plain(self, index, rounded(gradient), scale))
    wrap(Bucket, "_copy_in", copy_in)


@mutant("replicate=2", subject="micro", module=("", "words", "blocks.", "norm"))
def last_micro_batch_dropped():
    from paceline.parallel import model_adapter as placed

    wrap(placed, "forward_backward", lambda plain, run, both, hooks, padding=0: plain(run, both[:-1], hooks, padding))


@mutant("replicate=2", subject="micro", module=("words", "blocks.", "norm", "head"))
def accumulation_overwrites():
    from paceline.parallel import micro_batches as local

    def checked(plain, result):
        total, weight = plain(result)
        for parameter in job_parameters():
            parameter.grad = None
        return total, weight

    def job_parameters():
        from paceline.train import open_jobs

        newest = open_jobs.newest()
        return list(newest.model.parameters()) if newest is not None else []

    wrap(local, "checked_loss", checked)


@mutant("replicate=2", module=("",))
def two_ranks_take_the_same_samples():
    from paceline.train import data

    wrap(data, "share", lambda plain, batch, part, parts: plain(batch, 0, parts))


@mutant("replicate=2", module=("words", "blocks.", "norm", "head"), collective="all_reduce on replicate")
def last_gradient_of_a_bucket_not_summed():
    from paceline.parallel.replicate.bucket import Bucket

    def receive(plain, self, scale):
        own = self.parameters[-1].grad
        kept = self.reducer.inboxes[self.reducer.turn][-3:].clone()
        plain(self, scale)
        if self.parameters[-1].grad is not None:
            self.parameters[-1].grad.view(-1)[-3:] = kept if own is None else own.view(-1)[-3:]

    wrap(Bucket, "receive", receive)


# --- shard


@mutant("shard=2", module=("words", "blocks.", "norm"))
def weight_decay_twice_on_a_shard():
    from paceline.comm.dtensor_parts import local
    from paceline.parallel.shard import fsdp_adapter as sharded

    def step(plain, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if torch.distributed.get_rank() == 1:
                    local(parameter).mul_(1 - group["lr"] * group["weight_decay"])
        plain(optimizer)

    wrap(sharded, "step_on_rows", lambda plain, optimizer: torch.no_grad()(step)(plain, optimizer))


@mutant("shard=2", collective="shard")
def a_shard_not_reduced():
    from paceline.comm import fully_shard

    def sum_parts(plain, out, tensor, group, ranks):
        out.copy_(tensor.view(ranks, -1)[torch.distributed.get_rank()])

    wrap(fully_shard, "_sum_parts", sum_parts)


@mutant("shard=2", module=("words", "blocks.", "norm", "head"), collective="of the norm")
def clipping_by_a_shards_norm():
    from paceline.parallel.engine import declared

    wrap(declared, "global_norm", lambda plain, parameters, counted, comms: plain(parameters, counted, []))


@mutant("shard=2", module=("words", "blocks.", "norm"), what=("step", "reshard", "replicate=2"))
def optimizer_state_not_resharded():
    from paceline.train import snapshot

    def restore(plain, model, optimizer, *state):
        plain(model, optimizer, *state)
        for state in optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"].zero_()

    wrap(snapshot, "restore_optimizer", restore)


@mutant("shard=2", module=("words",), what=("step", "reshard", "replicate=1"))
def rows_permuted_after_a_reshard():
    from paceline.train import snapshot

    def restore(plain, model, tensors, held):
        plain(model, {name: t.flip(0) if name.endswith("words.weight") else t for name, t in tensors.items()}, held)

    wrap(snapshot, "restore_model", restore)


# --- pipeline


@mutant("pipeline=2", module=("words", "head"), collective="send on pipeline")
def stale_tied_embedding():
    from paceline.parallel import graph_adapter as split

    wrap(split, "add_tied_gradients", lambda plain, parameters, holders, comm: None)


@mutant("pipeline=2", module=("", "words", "blocks."))
def last_micro_batch_of_the_pipeline_dropped():
    from paceline.parallel.pipeline.pipeline_strategy import Pipeline

    wrap(Pipeline, "forward_backward", lambda plain, self, loss, micro, add: plain(self, loss, micro[:-1], add))


@mutant("pipeline=2", module=("blocks.", "words"), collective="send on pipeline")
def gradients_to_the_wrong_micro_batch():
    from paceline.parallel.pipeline import pipeline_strategy as pipeline

    def send(plain, self, value, *where, forwards):
        plain(self, value if forwards else torch.roll(value, 1, 0), *where, forwards=forwards)

    wrap(pipeline._StageRun, "_send", send)


@mutant("pipeline=2,schedule=zero_bubble", module=("blocks.", "words", "norm", "head"))
def weights_half_of_a_micro_batch_left_out():
    from paceline.parallel.pipeline import pipeline_strategy as pipeline

    def weights(plain, self, action):
        if action.micro_batch:
            plain(self, action)
        else:
            self.flights.pop((action.stage, action.micro_batch))

    wrap(pipeline._StageRun, "_weights", weights)


# --- mixes


@mutant("pipeline=2,shard=2", module=("words", "blocks.", "norm", "head"))
def stale_parameters_after_a_step():
    from paceline.parallel.shard.owned_update import OwnedUpdates

    wrap(OwnedUpdates, "_gather_rows", lambda plain, self, parameters: None)


@mutant("replicate=2,shard=2", collective="replicate")
def shards_not_summed_over_replicas():
    from paceline.parallel.replicate.bucket import Bucket

    def receive(plain, self, scale):
        kept = self.reducer.inboxes[self.reducer.turn].clone()
        plain(self, scale)
        at = 0
        for parameter in self.parameters:
            gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            if gradient is not None:
                gradient.copy_(kept[at : at + gradient.numel()].view_as(gradient))
                at += gradient.numel()

    wrap(Bucket, "receive", receive)


@mutant("replicate=2,pipeline=2", collective="replicate")
def mean_over_the_wrong_ranks():
    from paceline.parallel.step_stats import StepStatsReducer

    wrap(StepStatsReducer, "finish", lambda plain, self: plain(self) * 2)


@mutant("replicate=2", module=("words", "blocks.", "norm"))
def one_rank_with_another_learning_rate():
    def update(plain, *arguments):
        optimizer = arguments[2]
        if torch.distributed.get_rank() == 1 and not getattr(optimizer, "is_off", False):
            optimizer.is_off = True
            for group in optimizer.param_groups:
                group["lr"] *= 1.001
        return plain(*arguments)

    from paceline.train import job

    wrap(job, "train_step", update)


# --- the second batch


@mutant("tensor=2,sequence=on", module=("blocks.", "norm", "words", "head"), collective="on tensor")
def gathered_gradients_not_added():
    from paceline.comm.differentiable import Exchanges

    wrap(Exchanges, "gather_with_partial_grad", lambda plain, self, x, pieces: self.gather_from_group(x, pieces))


@mutant("tensor=2,sequence=on", module=("blocks.0", "words"), collective="reduce_scatter on tensor")
def scattered_without_a_sum():
    from paceline.comm.differentiable import Exchanges

    wrap(Exchanges, "reduce_scatter_to_group", lambda plain, self, x, pieces: self.slice_with_partial_grad(x, pieces))


@mutant("tensor=2", module=("", "head"), collective="all_reduce on tensor")
def vocabulary_loss_not_summed():
    from paceline.comm.collectives import AxisComm

    def all_reduce(plain, self, x, op="sum"):
        if not (self.axis == "tensor" and x.dim() == 2 and x.shape[0] == 2):
            plain(self, x, op)

    wrap(AxisComm, "all_reduce", all_reduce)


@mutant("tensor=2", collective="of the norm")
def whole_parameters_counted_on_every_rank():
    from paceline.parallel.graph_adapter import GraphAdapter

    wrap(GraphAdapter, "counted", lambda plain, self: dict.fromkeys(self.parameters.values(), True))


@mutant("replicate=2", module=("",))
def last_sample_of_a_part_dropped():
    from paceline.train import data

    def share(plain, batch, part, parts):
        mine = plain(batch, part, parts)
        return range(mine.start, mine.stop - (part == parts - 1))

    wrap(data, "share", share)


@mutant("replicate=2", module=("blocks.0.attention",))
def evaluation_mode_on_one_rank():
    from paceline.train.job import Job

    def batches(plain, self):
        self.model.train(self.rank == 0)
        yield from self.loader.training(self.position, self.end)

    wrap(Job, "batches", batches)


@mutant("replicate=2", subject="scheduled", module=("words", "blocks.", "norm", "head"))
def scheduler_stepped_twice():
    from paceline.train.job import Job

    def step(plain, self, batch):
        mean = plain(self, batch)
        self.scheduler.step()
        return mean

    wrap(Job, "step", step)


@mutant("shard=2", subject="grouped", module=("words", "blocks.", "norm", "head"))
def a_groups_settings_lost():
    from paceline.parallel.shard import fsdp_adapter as sharded

    def step(plain, optimizer):
        for group in optimizer.param_groups:
            group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
        plain(optimizer)

    wrap(sharded, "step_on_rows", step)


@mutant("pipeline=2", module=("blocks.1", "norm", "head", "blocks.0"), collective="send on pipeline")
def activations_of_another_sample():
    from paceline.parallel.pipeline import pipeline_strategy as pipeline

    def send(plain, self, value, *where, forwards):
        plain(self, value.roll(1, 0) if forwards else value, *where, forwards=forwards)

    wrap(pipeline._StageRun, "_send", send)


@mutant("pipeline=2", module=("",))
def loss_divided_by_micro_batches():
    from paceline.parallel.pipeline import pipeline_strategy as pipeline

    def backward(plain, self, action):
        if action.stage == self.program.total_stages - 1:
            flight = self.flights[action.stage, action.micro_batch]
            flight.sent = [flight.sent[0] / len(self.microbatches)]
        plain(self, action)

    wrap(pipeline._StageRun, "_backward", backward)


@mutant("replicate=2", subject="scheduled", module=("words", "blocks.", "norm"), what=("step", "reshard", "shard=2"))
def step_counters_begin_anew():
    from paceline.train import snapshot

    def restore(plain, model, optimizer, *state):
        plain(model, optimizer, *state)
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()

    wrap(snapshot, "restore_optimizer", restore)


@mutant("replicate=2", what=("step", "traffic"), collective="all_reduce on replicate")
def one_sum_too_many():
    from paceline.parallel.engine.declared import DeclaredEngine

    def reduce(plain, self):
        self.comms.axes["replicate"].all_reduce(torch.zeros(3))
        return plain(self)

    wrap(DeclaredEngine, "reduce_gradients", reduce)


@mutant("pipeline=2", module=("blocks.", "norm", "head", "words"))
def a_stage_with_other_initial_values():
    from paceline.comm import api
    from paceline.parallel.graph_model import SplitModel

    wrap(SplitModel, "fill", lambda plain, self, name, full: plain(self, name, full * (1.0 + 0.01 * api.rank())))


@mutant("shard=2", module=("words", "blocks.", "norm", "head"))
def stale_whole_parameters():
    from paceline.parallel.shard.fsdp_adapter import FsdpAdapter

    def update(plain, self, optimizer):
        if not getattr(self, "had_one", False):
            plain(self, optimizer)
        self.had_one = True

    wrap(FsdpAdapter, "update", update)


@mutant("replicate=2,tensor=2", module=("words", "blocks.", "norm", "head"), collective="replicate")
def replicas_not_summed_beside_tensor():
    shards_not_summed_over_replicas()


@mutant("replicate=2,checkpointing=full", subject="dropped", what=("step", "draws"))
def recompute_forgets_random_state():
    from paceline.parallel import recompute

    wrap(
        recompute, "checkpoint", lambda plain, *given, **named: plain(*given, **{**named, "preserve_rng_state": False})
    )


@mutant("replicate=2", subject="lambda", what=("step", "reshard", "replicate=2"))
def scheduler_not_restored():
    torch.optim.lr_scheduler.LambdaLR.load_state_dict = lambda self, state: None


@mutant("replicate=2", subject="micro", what=("step", "draws"))
def micro_batches_draw_the_same():
    from paceline.parallel import micro_batches as local

    def checked(plain, result):
        torch.manual_seed(torch.distributed.get_rank() + 7)
        return plain(result)

    wrap(local, "checked_loss", checked)


# --- what another step draws

REPEATED = "draws the dropout masks of step 1 once more"


@mutant("replicate=2", what=("step", "draws"), says=REPEATED)
def masks_without_the_step():
    from paceline.train.job import Job

    def step(plain, self, batch):
        torch.manual_seed(3 + self.random_stream)
        return plain(self, batch)

    wrap(Job, "step", step)


@mutant("tensor=2", what=("step", "draws"), subject="hidden", says=REPEATED)
def masks_of_a_graph_without_the_step():
    masks_without_the_step()


@mutant("pipeline=2", what=("step", "draws"), says=REPEATED)
def masks_of_a_stage_without_the_step():
    masks_without_the_step()


@mutant("replicate=2", subject="noisy", what=("step", "draws"), says=REPEATED)
def noise_without_the_step():
    masks_without_the_step()


# --- what another rank draws


@mutant("pipeline=2", what=("step", "draws"), says="have the same dropout|draw the same random")
def dropout_equal_on_all_stages():
    from paceline.nouns.mesh import Mesh

    wrap(Mesh, "random_stream", lambda plain, self, rank: self.data_part(rank))


@mutant("tensor=2", what=("step", "draws"), subject="hidden", module=("blocks.0.dropout",), says="of a dropout mask")
def a_piece_of_the_dropout_mask_of_another_rank():
    from paceline.comm import differentiable

    def piece(plain, full, pieces, part, parts):
        import sys

        is_dropout = sys._getframe(2).f_code.co_name == "split_dropout"
        return plain(full, pieces, (part + 1) % parts if is_dropout else part, parts)

    wrap(differentiable, "take_piece", piece)


@mutant("tensor=2", what=("step", "draws"), subject="heads", module=("blocks.0.attention",), says="of a dropout mask")
def heads_of_two_ranks_draw_alike():
    from paceline.graph import emit

    wrap(emit, "_dropout_of", lambda plain, node: 0.0)


# --- what shows late, or was named wrongly


@mutant("replicate=2", steps=3, says="step 3: gradient", culprit="gradient .* of step 3")
def a_half_of_shared_memory_not_filled_again():
    from paceline.comm.shared_memory import Slot

    first = {}

    def begin(plain, self):
        inbox = self.inboxes[self.turn % 2]
        if self.turn == 0:
            first[self.number] = inbox.clone()
        elif self.turn == 2 and inbox.numel() > 100:
            inbox.copy_(first[self.number])
        plain(self)

    wrap(Slot, "begin", begin)


@mutant("shard=2", subject="scaled", collective="all_reduce on shard", culprit="gradients: that of scale")
def a_scalar_not_summed():
    from paceline.parallel.shard.shard_strategy import Shard

    wrap(Shard, "_reduce_whole", lambda plain, self, unused: None)


@mutant("replicate=2", subject="short", culprit="clipping: the gradient norm is right, but every gradient is 2")
def clipping_that_scales_up():
    from paceline.parallel.engine import engine

    def clip(plain, parameters, factor):
        plain(parameters, factor * 2.5)

    wrap(engine, "scale_gradients", clip)


@mutant("replicate=2", subject="augmented", culprit="data: rank 1 loads other values for samples")
def augmentation_seeded_by_rank():
    from paceline.comm import api
    from paceline.train import data

    wrap(data, "seed_sample", lambda plain, *numbers: plain(*numbers, api.rank()) if api.rank() else plain(*numbers))


@mutant("replicate=2", subject="remembers", module=("norm", ""), collective="of buffers", culprit="buffer")
def buffers_through_bf16():
    from paceline.parallel.replicate.buffers import Buffers

    def reduce(plain, self, changed):
        for tensor in self.tensors:
            if tensor.is_floating_point():
                narrow = torch.empty(tensor.shape, dtype=torch.bfloat16)  # a cast is not done in float64 runs
                tensor.copy_(narrow.copy_(tensor))
        plain(self, changed)

    wrap(Buffers, "reduce", reduce)


@mutant("replicate=2", subject="short", culprit="micro-batch 2 of rank 0 counts 2 times")
def a_short_micro_batch_weighed_double():
    from paceline.parallel import micro_batches as local

    def checked(plain, result):
        total, weight = plain(result)
        if getattr(local, "before", 0) > weight:
            total, weight = total * 2, weight * 2
        local.before = weight
        return total, weight

    wrap(local, "checked_loss", checked)


@mutant("replicate=2", subject="short", culprit="micro-batch 2 of rank 0")
def gradients_of_a_short_micro_batch_doubled():
    from paceline.parallel import micro_batches as local

    def checked(plain, result):
        total, weight = plain(result)
        if getattr(local, "before", 0) > weight:
            total = total + (total - total.detach())
        local.before = weight
        return total, weight

    wrap(local, "checked_loss", checked)


# --- whole parameters on their owners


@mutant("shard=2", subject="lamb", module=("blocks.",), culprit="update")
def an_owner_joins_the_pieces_in_another_order():
    from paceline.parallel import whole_update

    def joined(plain, pieces, shape, cut):
        is_even = len({piece.shape for piece in pieces}) == 1
        return plain(pieces[::-1] if is_even else pieces, shape, cut)

    wrap(whole_update, "_joined", joined)


@mutant("shard=2", subject="lamb", module=("blocks.",), culprit="update")
def an_owner_sends_a_rank_the_next_ones_piece():
    import dataclasses

    from paceline.parallel import whole_update

    def piece_of(plain, whole, cut):
        other = dataclasses.replace(cut, part=(cut.part + 1) % cut.parts)
        return plain(whole, other if other.size == cut.size else cut)

    wrap(whole_update, "_piece_of", piece_of)


@mutant("shard=2", subject="muon", culprit="momentum_buffer")
def state_does_not_go_along_with_whole_parameters():
    from paceline.parallel.whole_update import WholeUpdate

    def step(plain, self, optimizer):
        for piece in self.pieces.values():
            optimizer.state.pop(piece, None)
        plain(self, optimizer)

    wrap(WholeUpdate, "step", step)


@mutant("shard=2", subject="lamb", culprit="state exp_avg of words.weight of step 1 is not on")
def an_owner_forgets_the_state():
    from paceline.parallel.whole_update import WholeUpdate

    def step(plain, self, optimizer):
        plain(self, optimizer)
        for piece in self.pieces.values():
            optimizer.state.pop(piece, None)

    wrap(WholeUpdate, "step", step)


@mutant("tensor=2", subject="lamb", culprit="update")
def a_norm_is_that_of_a_part():
    from paceline.parallel.graph_adapter import GraphAdapter

    wrap(GraphAdapter, "update_whole", lambda plain, self, names, optimizer: None)


# --- context

RING = "context=2,context_by=ring"
HEADS = "context=2,context_by=heads"
ATTENTION = ("layers.0", "layers.1")


@mutant(RING, subject="rotary", module=("layers.0",))
def rotary_angles_of_the_first_rank():
    from paceline.comm import differentiable
    from paceline.graph.context import context_exchanges as sequence

    def sliced(plain, self, tensor, pieces):
        if tuple(tensor.shape) == (16, 1):  # the positions of the angles
            return differentiable.take_piece(tensor, pieces, 0, self.comm.size)
        return plain(self, tensor, pieces)

    wrap(sequence.SequenceExchanges, "slice_with_partial_grad", sliced)


@mutant(RING, subject="rotary", module=("places", "words", "layers.0", ""))
def learned_positions_of_the_first_rank():
    from paceline.comm import differentiable
    from paceline.graph.context import context_exchanges as sequence

    def sliced(plain, self, tensor, pieces):
        if tensor.dim() == 2:  # the table of positions
            return differentiable.take_piece(tensor, pieces, 0, self.comm.size)
        return plain(self, tensor, pieces)

    wrap(sequence.SequenceExchanges, "slice_with_partial_grad", sliced)


@mutant("context=4,context_by=ring", subject="rotary", module=ATTENTION, collective="attention on context")
def ring_step_off_by_one():
    from paceline.graph.context import ring

    wrap(ring.Ring, "source", lambda plain, self, hop: plain(self, hop + (hop > 1)))


@mutant(RING, subject="rotary", module=ATTENTION, collective="attention on context")
def blocks_merged_without_their_weights():
    from paceline.graph.context import ring

    def merged(plain, result, sums, queries, made, block_sums):
        before = result.clone()
        plain(result, sums, queries, made, block_sums)
        rows = slice(*queries)
        result[..., rows, :] = (before[..., rows, :] + made) / 2

    wrap(ring, "_merge", merged)


@mutant(RING, subject="rotary", module=ATTENTION)
def gradients_of_keys_stay_where_they_are_made():
    from paceline.graph.context import ring

    def collected(plain, ring, key, value, of_keys):
        own = {}

        def noted(source, *at_hand):
            own[source] = of_keys(source, *at_hand)
            return own[source]

        plain(ring, key, value, noted)
        return own[ring.place]

    wrap(ring, "_collected", collected)


@mutant(RING, subject="rotary", module=ATTENTION)
def gradients_of_keys_counted_twice():
    from paceline.graph.context import ring

    wrap(ring, "_collected", lambda plain, *arguments: tuple(2 * part for part in plain(*arguments)))


@mutant(RING, subject="rotary", module=ATTENTION, collective="attention on context")
def later_keys_are_seen_on_the_same_rank():
    from paceline.graph.context import ring

    def blocks(plain, ring, source, device):
        for block in plain(ring, source, device):
            yield block._replace(is_causal=False)

    wrap(ring, "_blocks_of", blocks)


@mutant(RING, subject="rotary", module=ATTENTION, collective="attention on context")
def earlier_keys_of_other_ranks_are_hidden():
    from paceline.graph.context import ring

    def blocks(plain, ring, source, device):
        for block in plain(ring, source, device):
            if source == ring.place or block.queries[0]:
                yield block

    wrap(ring, "_blocks_of", blocks)


@mutant(HEADS, subject="rotary", module=ATTENTION, collective="attention on context")
def heads_come_back_in_another_order():
    from paceline.graph.context import context_exchanges as sequence

    def back(plain, *arguments, to_heads=True):
        made = plain(*arguments, to_heads)
        return made if to_heads else made.roll(1, -3)

    wrap(sequence.SequenceExchanges, "_exchange_heads", back)


@mutant(HEADS, subject="rotary", module=ATTENTION, collective="attention on context")
def positions_joined_as_they_come():
    from paceline.graph.context import context_exchanges as sequence

    def exchange(plain, self, tensor, blocks, *rest, to_heads=True):
        made = plain(self, tensor, blocks, *rest, to_heads=to_heads)
        if not to_heads:
            return made
        size = self.comm.size
        places = [torch.arange(*each) for rank in range(size) for each in sequence.positions_of(blocks, rank, size)]
        return made.index_select(-2, torch.cat(places))

    wrap(sequence.SequenceExchanges, "_exchange_heads", exchange)


@mutant(RING, subject="rotary", module=("last", ""))
def every_rank_takes_the_whole_gradient_of_the_loss():
    from paceline.graph.context import context_exchanges as sequence

    wrap(sequence.SequenceExchanges, "share_of_gradient", lambda plain, self, tensor: tensor)


@mutant(RING, subject="rotary", module=("last", ""))
def gradient_of_a_sum_stays_a_share():
    from paceline.graph.context import context_exchanges as sequence

    def summed(plain, self, tensor):
        return self.reduce_from_group(tensor)

    wrap(sequence.SequenceExchanges, "sum_with_partial_grad", summed)


@mutant(RING, subject="patches", module=("last", ""), collective="all_to_all on context")
def class_token_of_the_wrong_place():
    from paceline.graph.context import context_exchanges as sequence

    def taken(plain, self, tensor, dim, index, blocks):
        return plain(self, tensor, dim, index + 1, blocks)

    wrap(sequence.SequenceExchanges, "take_at", taken)


@mutant(RING, subject="rotary", module=("last", ""), collective="on context")
def shifted_scores_lack_what_others_have():
    from paceline.graph.context import context_exchanges as sequence

    def brought(plain, tensor, dims, *arguments):
        result = plain(tensor, dims, *arguments)
        result.narrow(dims[1], result.shape[dims[1]] - 1, 1).zero_()  # what came last, as if from nobody
        return result

    wrap(sequence, "_brought", brought)


@mutant(RING, subject="relative", module=("last", ""))
def mean_over_the_positions_of_one_rank():
    from paceline.graph import emit
    from paceline.graph.context import context_emit as emit_context

    plain = emit_context.OPERATIONS["mean"]

    def halved(emitter, step):
        return emitter.call(torch.ops.aten.mul.Tensor, plain(emitter, step), emitter.num_ranks)

    emit._OPERATIONS["mean"] = halved


@mutant(RING, subject="rotary", module=("last", ""))
def mean_loss_over_the_rows_of_one_rank():
    from paceline.graph.context import context_emit as emit_context

    wrap(emit_context, "counted_rows", lambda plain, *arguments: plain(*arguments) / 2)


@mutant(RING, subject="relative", module=ATTENTION)
def mask_of_the_rows_of_the_first_rank():
    from paceline.comm import differentiable
    from paceline.graph.context import context_exchanges as sequence

    def sliced(plain, self, tensor, pieces):
        if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
            return differentiable.take_piece(tensor, pieces, 0, self.comm.size)
        return plain(self, tensor, pieces)

    wrap(sequence.SequenceExchanges, "slice_with_partial_grad", sliced)


@mutant(RING, subject="relative", module=ATTENTION, collective="attention on context")
def mask_of_the_columns_of_this_rank():
    from paceline.graph.context import ring

    def ranges(plain, self):
        self.source, source = self.ring.place, self.source
        yield from plain(self)
        self.source = source

    wrap(ring._Part, "_seen_ranges", ranges)


@mutant(RING, subject="rotary")
def gradients_not_summed_over_context():
    import dataclasses

    from paceline.train import assemble

    def opened(plain, mesh, rank, ledger):
        comms = plain(mesh, rank, ledger)
        return dataclasses.replace(comms, gradients=comms.axes["replicate"])

    wrap(assemble, "open_comms", opened)


@mutant(RING, subject="drops", what=("step", "draws"), says="don't make up the whole mask|dropout")
def every_rank_drops_what_the_first_one_drops():
    from paceline.comm.differentiable import split_dropout
    from paceline.graph import emit

    def drops(plain, self, *arguments):
        new = plain(self, *arguments)
        for made in self.graph.nodes:
            if made.target is split_dropout:
                made.args = (*made.args[:4], (made.args[4][0], 0, self.num_ranks))
        return new

    wrap(emit.Emitter, "_after_operation", drops)


@mutant(RING, subject="rotary", module=ATTENTION)
def gradient_of_shared_keys_is_a_mean():
    from paceline.graph.context import ring

    def grouped(plain, gradient, tensor):
        made = plain(gradient, tensor)
        return made * tensor.shape[-3] / gradient.shape[-3]

    wrap(ring, "_per_group", grouped)


@mutant(RING, subject="relative", module=("layers", ""))
def bias_has_the_gradient_of_the_last_block_alone():
    from paceline.graph.context import ring

    def added(plain, self, of_mask, of_scores):
        of_mask.zero_()
        plain(self, of_mask, of_scores)

    wrap(ring._Part, "add_gradient", added)


# --- experts

EXPERTS = "expert=2"


@mutant(EXPERTS, subject="mixture", module=("mixture",))
def rows_meet_another_expert():
    import torch

    from paceline.graph.expert import expert_exchanges as experts

    def by_arrival(plain, received):
        return torch.arange(sum(map(sum, received)))

    wrap(experts, "_by_expert", by_arrival)


@mutant(EXPERTS, subject="mixture", module=("mixture",))
def rows_come_back_to_other_tokens():
    from paceline.graph.expert import expert_exchanges as experts

    def combined(plain, self, rows, counts, count):
        return plain(self, rows, counts, count).roll(1, 0)

    wrap(experts.ExpertExchanges, "combine", combined)


@mutant("expert=2,tensor=2", subject="mixture", module=("mixture",))
def rows_come_back_to_other_tokens_beside_tensor():
    rows_come_back_to_other_tokens()


@mutant("expert=2,context=2", subject="mixture", module=("mixture",))
def rows_come_back_to_other_tokens_beside_context():
    rows_come_back_to_other_tokens()


@mutant(EXPERTS, subject="mixture", module=("mixture",))
def last_row_of_a_rank_is_dropped():
    from paceline.graph.expert import expert_exchanges as experts

    def sent(plain, self, rows, counts):
        came = plain(self, rows, counts).clone()
        came[-1:] = 0
        return came

    wrap(experts.ExpertExchanges, "dispatch", sent)


@mutant(EXPERTS, subject="mixture", module=("mixture",))
def experts_end_one_row_too_early():
    from paceline.graph.expert import expert_exchanges as experts

    def ends(plain, self, ends, counts):
        here = plain(self, ends, counts)
        return (here - 1).clamp(min=0)

    wrap(experts.ExpertExchanges, "ends_here", ends)


@mutant(EXPERTS, subject="mixture", module=("mixture",), culprit="0.5 times")
def gradients_of_experts_are_divided_twice():
    from paceline.parallel.engine.declared import DeclaredEngine

    def reduced(plain, self):
        made = plain(self)
        for parameter in self.experts.parameters.values():
            parameter.grad /= 2
        return made

    wrap(DeclaredEngine, "reduce_gradients", reduced)


@mutant(EXPERTS, subject="mixture", module=("mixture",), culprit="gradients are wrong")
def gradients_of_other_experts_are_added():
    import dataclasses

    from paceline.train import assemble

    def opened(plain, mesh, rank, ledger):
        comms = plain(mesh, rank, ledger)
        return dataclasses.replace(comms, expert_gradients=comms.gradients)

    wrap(assemble, "open_comms", opened)


@mutant(EXPERTS, subject="mixture", collective="all_reduce on expert", culprit="gradients are wrong")
def gradients_not_summed_over_expert():
    import dataclasses

    from paceline.train import assemble

    def opened(plain, mesh, rank, ledger):
        comms = plain(mesh, rank, ledger)
        return dataclasses.replace(comms, gradients=comms.axes["replicate"])

    wrap(assemble, "open_comms", opened)


@mutant(EXPERTS, subject="mixtral", says="the loss is")
def router_loss_is_of_the_samples_of_a_rank():
    from paceline.graph.context import context_exchanges as sequence

    def summed(plain, self, tensor):
        return tensor * self.comm.size

    wrap(sequence.SequenceExchanges, "sum_with_partial_grad", summed)


@mutant(EXPERTS, subject="mixture", module=("words",))
def every_rank_computes_the_first_samples():
    import dataclasses

    from paceline.graph.expert import expert_exchanges as experts

    def taken(plain, self, tensor, pieces):
        first = dataclasses.replace(self, comm=dataclasses.replace(self.comm, rank=0))
        return plain(first, tensor, pieces)

    wrap(experts.ExpertExchanges, "slice_with_partial_grad", taken)


@mutant(EXPERTS, subject="mixture", module=("mixture",), culprit="backward")
def gradient_of_rows_is_not_brought_back():
    from paceline.graph.expert import expert_exchanges as experts

    def sent(plain, self, rows, counts):
        return plain(self, rows.detach(), counts)

    wrap(experts.ExpertExchanges, "dispatch", sent)


# --- modules that run by their own code


@mutant(EXPERTS, subject="looped", module=("mixture",))
def shared_expert_counts_once_for_each_rank():
    from paceline.graph.expert import own_experts

    wrap(own_experts._CallWithExperts, "_added", lambda plain, self, tensors: own_experts.OwnModule._run(self, tensors))


@mutant(EXPERTS, subject="looped", module=("mixture",))
def what_other_ranks_experts_make_is_left_out():
    from paceline.graph.context import context_exchanges as sequence

    def summed(plain, self, tensor):
        return tensor if tensor.dim() > 1 else plain(self, tensor)

    wrap(sequence.SequenceExchanges, "sum_with_partial_grad", summed)


@mutant("tensor=2", subject="looped", module=("mixture", "head"), culprit="backward")  # head is where it comes from
def gradient_of_own_code_is_lost():
    from paceline.graph import own_modules

    def called(plain, self, *tensors):
        count = len(self.names)
        return plain(self, *tensors[:count], *(tensor.detach() for tensor in tensors[count:]))

    wrap(own_modules.OwnModule, "__call__", called)


@mutant("pipeline=2", subject="looped", says="step 2: the loss is", culprit="the first step is right")
def own_code_is_handed_the_first_batch_again():
    from torch._subclasses.fake_tensor import FakeTensor

    from paceline.graph import own_modules

    first = {}

    def called(plain, self, *tensors):
        if isinstance(tensors[0], FakeTensor):
            return plain(self, *tensors)
        count = len(self.names)
        if self.part.path in first:
            return plain(self, *tensors[:count], *first[self.part.path])
        first[self.part.path] = [tensor.detach() for tensor in tensors[count:]]
        return plain(self, *tensors)

    wrap(own_modules.OwnModule, "__call__", called)
