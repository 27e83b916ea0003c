"""The demo's parts: the text, the BERT against transformers' own, and the whole command."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from paceline.demo.bert import Bert, BertConfig
from paceline.demo.corpus import CLS, LENGTH, PAD, SEP, VOCABULARY, prepare
from paceline.demo.report import summary, table, terminal_curve
from paceline.demo.workload import IGNORED, MaskedSequences, save_for_transformers

from support.jobs import paceline


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return folder, prepare(folder)


def test_the_text_is_the_standard_librarys_and_held_out_by_file(text):
    folder, corpus = text
    train, held_out = np.load(folder / "train.npy"), np.load(folder / "held_out.npy")
    assert train.shape == (corpus.sequences, LENGTH)
    assert corpus.sequences > 10_000
    assert 0.02 < corpus.held_out_files / corpus.files < 0.25
    assert (train[:, 0] == CLS).all()
    assert (train[:, -1] == SEP).all()
    assert max(train.max(), held_out.max()) < VOCABULARY
    assert prepare(folder) == corpus


def test_hidden_tokens_are_a_seventh_and_never_the_special_ones(text):
    folder, _ = text
    data = MaskedSequences(folder / "train.npy")
    torch.manual_seed(0)
    rows = [data[index] for index in range(400)]
    assert 0.13 < float((torch.stack([row["labels"] for row in rows]) != IGNORED).float().mean()) * 10 / 64 < 0.17
    for row, tokens in zip(rows, data.rows, strict=False):
        was = torch.from_numpy(tokens.astype("int64"))
        places, counts = row["chosen"], row["labels"] != IGNORED
        assert len(set(places.tolist())) == len(places)
        assert torch.equal(was[places][counts], row["labels"][counts])
        assert not torch.isin(was[places][counts], torch.tensor([CLS, SEP, PAD])).any()
        kept = torch.ones(len(was), dtype=torch.bool)
        kept[places[counts]] = False
        assert torch.equal(row["input_ids"][kept], was[kept])


def test_the_bert_is_transformers_bert(text, tmp_path):
    import transformers  # here: it takes seconds

    torch.manual_seed(0)
    model = Bert(BertConfig(num_hidden_layers=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    save_for_transformers(model, text[0], tmp_path / "model")
    theirs, info = transformers.BertForMaskedLM.from_pretrained(
        tmp_path / "model", local_files_only=True, output_loading_info=True
    )
    assert not info["missing_keys"] - {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}, info
    assert not info["unexpected_keys"], info
    ids = torch.randint(5, VOCABULARY, (3, 20))
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids).view(3, 20, -1), theirs.eval()(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert tokenizer("def main():")["input_ids"][0] == CLS


def test_the_curve_and_the_table_line_up():
    assert terminal_curve([3.0, 2.0, 1.0]) == "3.00 █▅▁ 1.00"
    rows = summary({"loss": 8.0}, {"loss": 5.0, "accuracy": 0.2, "baseline": 0.1}, {1: 10.0, 2: 18.0}, "the")
    lines = table(rows).splitlines()
    assert "samples/s, 2 processes  18.0  (1.80 times one process)" in lines[-1]
    assert len({line.index(value) for line, (_, value) in zip(lines, rows, strict=True)}) == 1


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    ended = paceline(tmp_path, "demo", "--steps", "12", "--batch-size", "8", "--json", timeout=240)
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result["loss_last"] < result["loss_first"]
    assert set(result["samples_per_s"]) == {"1", "2"}
    for path in (result["picture"], result["model"] + "/model.safetensors", result["run_dir"] + "/result.json"):
        assert (tmp_path / path).stat().st_size > 100
    assert "held-out loss, after" in ended.err


def test_no_tokenizers_is_one_error():
    hidden = "import sys; sys.modules['tokenizers'] = None\n"
    code = hidden + "from paceline.demo.corpus import _tokenizer\n_tokenizer([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'paceline[demo]'" in done.stderr
