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

    Its arguments are those of TRL's, and `plan` of `TrainerMixin`.

    Examples:
        >>> from datasets import Dataset
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        >>> from trl import SFTConfig
        >>> from paceline.integrations.trl import SFTTrainer
        >>> words = {"<pad>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4, "three": 5}
        >>> plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        >>> plain.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
        ... )
        >>> config = LlamaConfig(vocab_size=6, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> args = SFTConfig(
        ...     "out", save_strategy="no", report_to="none", disable_tqdm=True, bf16=False, dataloader_pin_memory=False
        ... )
        >>> data = Dataset.from_list([{"text": "one two three"}] * 16)
        >>> trainer = SFTTrainer(LlamaForCausalLM(config), args, train_dataset=data, processing_class=tokenizer)
        >>> output = trainer.train()
        {'train_runtime': ...}
        >>> output.global_step
        6
    """


class DPOTrainer(TrainerMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    """A `trl.DPOTrainer` whose model is held, and whose gradients are summed, by Paceline.

    Its arguments are those of TRL's, and `plan` of `TrainerMixin`. The reference model is whole on every rank.

    Examples:
        >>> from datasets import Dataset
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        >>> from trl import DPOConfig
        >>> from paceline.integrations.trl import DPOTrainer
        >>> words = {"<pad>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4, "three": 5}
        >>> plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        >>> plain.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
        ... )
        >>> config = LlamaConfig(vocab_size=6, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> args = DPOConfig(
        ...     "out", save_strategy="no", report_to="none", disable_tqdm=True, bf16=False, dataloader_pin_memory=False
        ... )
        >>> data = Dataset.from_list([{"prompt": "one", "chosen": "two", "rejected": "three"}] * 16)
        >>> trainer = DPOTrainer(
        ...     LlamaForCausalLM(config), LlamaForCausalLM(config), args, train_dataset=data, processing_class=tokenizer
        ... )
        >>> output = trainer.train()
        {'train_runtime': ...}
        >>> output.global_step
        6
    """
