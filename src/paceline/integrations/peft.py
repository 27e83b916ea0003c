"""Save adapters of peft from a job of `paceline.prepare`, under any plan.

model = peft.get_peft_model(base, peft.LoraConfig(...))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
...
save_adapter(job, model, "adapter")  # peft.PeftModel.from_pretrained(base, "adapter") loads it
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import torch
from peft.utils import CONFIG_NAME, get_peft_model_state_dict

from paceline.integrations.saving import names_of_parts, prefix_of, write_folder
from paceline.nouns.errors import CheckpointError, UsageError, WorkloadError
from paceline.nouns.parts import shown
from paceline.train.loop_job import LoopJob
from paceline.train.whole_state import whole_state

_ASKED = "save_adapter writes the adapters of a peft.PeftModel"


def save_adapter(job: LoopJob, model: object, folder: str | Path) -> None:
    """Write the adapters of a model to a folder from which `peft.PeftModel.from_pretrained` loads them. Collective.

    Only the adapters' tensors are put together, and those of `modules_to_save`; the base model's stay where they are.
    Rank 0 writes. Base weights that were resized are not in it: list their modules in `modules_to_save`.

    Args:
        job: that trains the model.
        model: the PeftModel that `paceline.prepare` was handed.
        folder: new, empty or with an adapter, which is replaced.

    Raises:
        WorkloadError: it is no PeftModel, or its kind of adapter makes new tensors of those that are trained.
        UsageError: the job has no such model.
        CheckpointError: the folder holds something else, or can't be written.
        PeerLostError: another rank has gone.

    Examples:
        >>> import peft
        >>> from paceline.integrations.peft import save_adapter
        >>> base = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
        >>> optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
        >>> job, model, optimizer = paceline.prepare(model, optimizer)
        >>> job.backward(model(torch.ones(8, 4)).square().mean(), weight=8)
        >>> optimizer.step()
        >>> save_adapter(job, model, "adapter")
        >>> import pathlib
        >>> sorted(path.name for path in pathlib.Path("adapter").iterdir())
        ['README.md', 'adapter_config.json', 'adapter_model.safetensors']
    """
    write_adapter(job, model, Path(folder), lambda path: None, _check_folder)


def write_adapter(
    job: LoopJob, model: object, folder: Path, others: Callable[[Path], object], check: Callable[[Path], None]
) -> None:
    """Do what `save_adapter` does.

    Args:
        job: that trains the model.
        model: the PeftModel.
        folder: to write to.
        others: writes what else belongs there.
        check: raises a PacelineError where the folder should not be written to.
    """
    if not isinstance(job, LoopJob):
        raise UsageError(
            "save_adapter saves from the job of paceline.prepare",
            f"the job is {shown(job)}",
            "write save_adapter(job, model, folder)",
        )
    if not isinstance(model, peft.PeftModel):
        raise WorkloadError(_ASKED, f"the model is {shown(model)}", "hand in what peft.get_peft_model returned")
    prefix = prefix_of(job, model, "save_adapter")
    state = whole_state(job, prefix, names_of_adapters(model).__contains__)

    def write(path: Path) -> None:
        # The embeddings are the base model's: "auto" would ask a server whether they were resized.
        with names_of_parts():
            model.save_pretrained(str(path), state_dict=state, save_embedding_layers=False)
        others(path)

    write_folder(job, folder, write, check)


def names_of_adapters(model: peft.PeftModel) -> set[str]:
    """Return the names of the tensors that the adapters are made of.

    Args:
        model: whose `state_dict` has these names.

    Raises:
        WorkloadError: peft makes others of them.
    """
    # Tensors without values, so that peft says which it takes.
    forms = {}
    for name, value in model.state_dict(keep_vars=True).items():
        forms[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    names = {id(form): name for name, form in forms.items()}
    found = set()
    for adapter in model.peft_config:
        with names_of_parts():
            taken = get_peft_model_state_dict(model, dict(forms), adapter, save_embedding_layers=False)
        for key, form in taken.items():
            if id(form) not in names:
                kind = getattr(model.peft_config[adapter].peft_type, "value", "its kind")
                raise WorkloadError(
                    "save_adapter writes tensors as they are trained",
                    f"{key} of adapter {adapter!r} is computed from several, as {kind} does",
                    "use an adapter such as LoRA, or save the job by job.save",
                )
            found.add(names[id(form)])
    return found


def _check_folder(folder: Path) -> None:
    is_other = folder.is_file()
    if folder.is_dir():
        is_other = any(folder.iterdir()) and not (folder / CONFIG_NAME).exists()
    if is_other:
        raise CheckpointError(
            f"can't write an adapter to {folder}", "there is something else", "name a new folder; nothing was written"
        )
