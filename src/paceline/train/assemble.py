"""Assemble one rank: the one recipe that a job's rank and the planner's simulated rank share.

process groups    of the mesh, or of a single worker
loader            this rank's part of the data
model             from the same seed on every rank; replicated, sharded or split (train/parallelize.py)
strategies        parallel/engine/declared.py
optimizer         over the parameters that this rank updates
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from paceline.comm.ledger import Ledger
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel.effects import check_effects
from paceline.parallel.engine.declared import strategy_of
from paceline.parallel.engine.engine import Engine, RankPlace, open_comms
from paceline.parallel.loss_scale import check_fits_plan
from paceline.parallel.model_adapter import ModelAdapter
from paceline.train import prepare
from paceline.train.before_update import check_gradients_are_whole
from paceline.train.data import RankLoader, cut_into, cut_without_changing, rank_loader
from paceline.train.parallelize import Fake, parallelize_model
from paceline.train.seed import seed_everything
from paceline.train.snapshot import parameter_names
from paceline.train.whole_state import refuse_parts


class Assembly:
    """The parts of a rank. The steps are separate, so that a simulation can capture graphs between them.

    Args:
        workload: the model, data and optimizer.
        plan: the plan, which has the mesh or the servers, and options.
        place: the place of this rank: its number and its device.
        open_data: a function that returns the data set; () where the training loop makes its own batches.
        ledger: the ledger in which collectives are entered.

    Attributes:
        mesh: the mesh of the plan.
        comms: the process groups of each axis. Collective: every rank makes its assembly.
        loader: the loader of this rank's micro-batches; `place_model` may have it cut no batches.
        cut_notice: a notice for the user if the loader cuts no batches because of the loss.

    Raises:
        MeshError, WorkloadError: the mesh does not fit the ranks or the batch.
    """

    parallel: Engine
    optimizer: torch.optim.Optimizer

    def __init__(
        self, workload: Workload, plan: Plan, place: RankPlace, open_data: Callable[[], Any], ledger: Ledger
    ) -> None:
        self.workload = workload
        self.plan = plan
        self.place = place
        self.mesh = Mesh.parse(plan.mesh)
        self.strategy = self.choose_strategy()
        self.cut_notice = ""
        check_gradients_are_whole(workload.before_update, plan, self.mesh)
        if workload.precision == "fp16":
            check_fits_plan(plan, self.strategy.has_gradients)
        self.comms = open_comms(*self.strategy.comm_mesh(self.mesh, place.rank), ledger, plan.gradient_axes)
        # After the process groups: of a rank that fails here the others learn in their next collective, while in
        # `torch.distributed.new_group` they would wait for it.
        data = open_data()
        self.strategy.check_data(data)
        self.loader = self.make_loader(data, (self.mesh.data_part(place.rank), self.mesh.data_size))

    def choose_strategy(self) -> type[Engine]:
        """Return the class that runs the steps."""
        return strategy_of(self.plan)

    def make_loader(self, data: Any, part: tuple[int, int]) -> RankLoader:
        """Return a loader of one part of a data set, of how many."""
        micro_batches = cut_into(self.plan, self.mesh, self.workload)
        return rank_loader(data, self.workload, part, self.place.device, micro_batches)

    def example(self) -> Any:
        """Return a micro-batch for which a model is split, and with which a rank without samples keeps step.

        None where no rank needs one.
        """
        if self.mesh.world_size == 1 or not len(self.loader.data):
            return None
        return self.loader.example()

    def place_model(self, example: Any, fake: Fake | None = None) -> ModelAdapter:
        """Make the model as this rank holds it.

        Args:
            example: the micro-batch that `example` returned.
            fake: the context in which tensors have no values, as `parallelize_model` takes it.

        Raises:
            WorkloadError, PlanError: the model can't be split as the plan says.
        """
        seed_everything(self.workload.seed)  # every rank draws the same initial values
        placed = parallelize_model(self.workload, self.comms, self.plan, self.place.device, example, fake)
        micro_batches = cut_without_changing(self.plan, self.loader.micro_batches_wanted, placed.couples_samples)
        if micro_batches != self.loader.micro_batches_wanted:
            self.loader = dataclasses.replace(self.loader, micro_batches_wanted=micro_batches)
            self.cut_notice = (
                f"as far as the graph shows, samples meet at {placed.couples_samples}: the pipeline cuts no batch; "
                "with the plan's option micro_batches=N it does, if a trial finds that the loss adds up over samples"
            )
        return placed

    def check_may_cut(self, placed: ModelAdapter, notice: Callable[[str], None]) -> None:
        """Check that batches may be cut as the plan wants it. Collective.

        Raises:
            PlanError, LossError: as `prepare.check_may_cut` has them.
        """
        prepare.check_may_cut(placed, self.workload, self.loader, self.comms, self.mesh, notice)

    def finish(self, placed: ModelAdapter, fake: Fake = contextlib.nullcontext) -> None:
        """Make the strategies and the optimizer, which must hold the parameters that this rank updates.

        Raises:
            PlanError, WorkloadError: the optimizer does not fit the plan.
        """
        with fake():
            self.parallel = self.strategy(placed, self.workload, self.comms, self.plan, self.place)
            self.optimizer = prepare.make_optimizer(self.workload, self.parallel.model, self.plan.optimizer_states)
        self.parallel.check_optimizer(self.optimizer)
        check_effects(self.parallel.model, [self.optimizer], self.parallel.placement, is_cut=True)
        self.later_parameters = prepare.keep_own(self.optimizer, self.mesh, placed)
        refuse_parts(self.parallel.model, self.parallel.local_shards())

    def check_later_parameters(self) -> None:
        """Raise PlanError if the optimizer was given parameters since `finish` that it can't update here."""
        if self.later_parameters is not None:
            self.later_parameters.check(lambda: parameter_names(self.parallel.model, self.optimizer))
