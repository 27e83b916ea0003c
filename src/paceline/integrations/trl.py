"""TRL's own trainers on Paceline's engine, under its plans.

    from trl import SFTConfig
    from paceline.integrations.trl import SFTTrainer  # from trl import SFTTrainer

    SFTTrainer(model, SFTConfig("out"), train_dataset=data, processing_class=tokenizer).train()

Another trainer of TRL's is `class Mine(TrainerMixin, trl.KTOTrainer)`, which was not tried.
"""

from __future__ import annotations

import trl

from paceline.integrations.transformers import TrainerMixin


class SFTTrainer(TrainerMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """A `trl.SFTTrainer` whose model is held, and whose gradients are summed, by Paceline.

    Args:
        arguments: those of `trl.SFTTrainer`.
        plan: the plan, such as "shard=2,zero=2"; that of `paceline run` where None, or plain replication.
        named: those of `trl.SFTTrainer`, by name.

    Raises:
        UsageError: an argument asks for another engine, or for what several ranks can't do.
        PlanError: the plan contradicts that of the command, the number of ranks, or what a loop can have.
        PeerLostError: not all ranks came.
    """


class DPOTrainer(TrainerMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    """A `trl.DPOTrainer` whose model is held, and whose gradients are summed, by Paceline.

    The reference model is whole on every rank.

    Args:
        arguments: those of `trl.DPOTrainer`.
        plan: the plan, such as "shard=2,zero=2"; that of `paceline run` where None, or plain replication.
        named: those of `trl.DPOTrainer`, by name.

    Raises:
        UsageError: an argument asks for another engine, or for what several ranks can't do.
        PlanError: the plan contradicts that of the command, the number of ranks, or what a loop can have.
        PeerLostError: not all ranks came.
    """
