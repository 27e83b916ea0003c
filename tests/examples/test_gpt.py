"""The GPT example: texts and vocabularies are read or refused, any number of ranks ends as one, and it generates."""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import re
import runpy
import struct
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from paceline.nouns.errors import DataError, UsageError
from paceline.nouns.plan import Plan

from support.jobs import Ended, paceline
from support.ranks import preload, run_ranks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
st_file = pytest.importorskip("safetensors.torch")
preload("transformers.models.gpt2.modeling_gpt2", "tokenizers")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt"
SHARED = ROOT.parent / "shared" / "data"
STORIES = SHARED / "stories260K"
LINES = "the cat saw a dog .\nthe dog heard the old cat .\na small bird fed the red cat !\n" * 20
SIZES = ("--layers", "2", "--heads", "2", "--width", "16", "--block", "12", "--batch-size", "8", "--lr", "1e-2")
SAME = (*SIZES, "--steps", "8", "--tokens", "20", "--precision", "float64")


def load(name: str) -> ModuleType:
    """A module of the example, which imports its neighbours by their plain names."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        spec = importlib.util.spec_from_file_location(f"gpt_{name}", EXAMPLE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLE))
    return module


texts, vocabulary, blocks, decoder = (load(name) for name in ("texts", "vocabulary", "blocks", "decoder"))


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "lines"
    folder.mkdir()
    (folder / "input.txt").write_text(LINES)
    return folder


def play(rank: int, words: list[str], plan: str | None) -> None:
    """The example's file as a rank runs it."""
    if plan is not None:
        os.environ["PACELINE_PLAN"] = plan
    sys.argv = [str(EXAMPLE / "workload.py"), *words]
    sys.path.insert(0, str(EXAMPLE))
    runpy.run_path(sys.argv[0], run_name="__main__")


def run(folder: Path, ranks: int, plan: str | None, *words: str | Path) -> dict:
    """The result's JSON of one run, with what it saved, on ranks of the tests' fork server."""
    name = f"{plan or 'replicate'}-{ranks}"
    written = plan and json.dumps(asdict(Plan.parse(plan)))
    files = ("--output", folder / f"{name}.json", "--save", folder / name)
    run_ranks(ranks, play, [*map(str, words), *map(str, files)], written)
    result = json.loads((folder / f"{name}.json").read_text())
    return result | {"tensors": st_file.load_file(folder / name / "model.safetensors")}


def check_same(one: dict, other: dict, tolerance: float = 1e-9) -> None:
    """The same losses, parameters and text."""
    assert other["scores"] == pytest.approx(one["scores"], rel=1e-5)  # they are rounded
    assert other["tensors"].keys() == one["tensors"].keys()
    for name, tensor in one["tensors"].items():
        torch.testing.assert_close(other["tensors"][name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    assert other["text"] == one["text"]


USUAL = ("replicate=2", "shard=2", "tensor=2")
MORE = ("pipeline=2", "shard=2,zero=1", "replicate=4", "replicate=2,tensor=2", "replicate=2,shard=2")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*USUAL, *(pytest.param(plan, marks=pytest.mark.integration) for plan in MORE)])
def test_any_ranks_end_as_one_does(tmp_path, data, plan):
    one = run(tmp_path, 1, None, "--data", data, *SAME)
    assert one["scores"]["validation loss"] < one["scores"]["first loss"] - 0.2
    check_same(one, run(tmp_path, Plan.parse(plan).world_size, plan, "--data", data, *SAME))


@pytest.mark.integration
@pytest.mark.parametrize("tokenizer", ["bpe", "characters"])
def test_an_odd_vocabulary_and_an_odd_batch(tmp_path, data, tokenizer):
    words = ("--data", data, *SAME, "--batch-size", "7", "--tokenizer", tokenizer)
    if tokenizer == "bpe":
        words = (*words, "--vocabulary", "271")
    one = run(tmp_path, 1, None, *words)
    for plan in ("replicate=2", "tensor=2"):
        check_same(one, run(tmp_path, 2, plan, *words))


# Texts


def write(folder: Path, name: str, content: str | bytes) -> Path:
    folder.mkdir(exist_ok=True)
    content = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    return folder / name


@pytest.mark.parametrize(
    ("files", "train", "held_out", "name"),
    [
        ({"input.txt": "0123456789"}, ["012345678"], ["9"], "texts"),
        ({"input.txt.xz": "ab\r\ncd\n\n\n\n"}, ["ab\r\ncd\n\n\n"], ["\n"], "texts"),
        ({"other.txt": "0123456789"}, ["012345678"], ["9"], "other"),
        ({"other.txt": "x", "input.txt": "\ufeff0123456789"}, ["012345678"], ["9"], "texts"),
        ({"train.txt": "a \n", "valid.txt.xz": " = b = \n", "test.txt": "c"}, ["a \n"], [" = b = \n"], "texts"),
    ],
)
def test_a_text_is_read_as_it_stands(tmp_path, files, train, held_out, name):
    for file, content in files.items():
        write(tmp_path / "texts", file, content)
    text = texts.read_text(tmp_path / "texts")
    assert (text.train, text.held_out, text.name, text.are_stories) == (train, held_out, name, False)


def test_stories_are_told_apart():
    text = "One day, a dog ran.\n\nIt was fun.\n\nOnce upon a time it slept.\n\nThe end.\n"
    assert texts.split_stories(text) == ["One day, a dog ran.\nIt was fun.", "Once upon a time it slept.\nThe end."]


def test_the_built_in_text_is_long_enough():
    text = texts.read_text(None)
    assert len(text.train[0]) > 300_000
    assert "Python" in text.held_out[0]


def broken(folder: Path, files: dict[str, str | bytes]) -> Path:
    for file, content in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


# The files of a folder, what is read of it, and the three parts of the error.
REFUSED = {
    "no folder": (
        {},
        "nowhere",
        "--data .*nowhere",
        "there is no such file or folder",
        "tiny shakespeare is input.txt",
    ),
    "no text": ({"notes.md": "x"}, "", "with input.txt, or train.txt and valid.txt", "it has no text", "WikiText-2 is"),
    "two texts": ({"a.txt": "x", "b.txt": "y"}, "", "with input.txt", "it has a.txt, b.txt", "tiny shakespeare"),
    "half of WikiText": ({"train.txt": "x"}, "", "train.txt and valid.txt", "train.txt has no valid.txt", "WikiText-2"),
    "no UTF-8": ({"input.txt": b"a\nb\xff"}, "", r"input.txt, line 2: text in UTF-8", "byte 4", "input.txt of"),
    "torn": ({"input.txt.xz": lzma.compress(b"abc" * 99)[:-9]}, "", "xz-compressed", "it is not whole", "copy it anew"),
    "empty": ({"input.txt": " \n"}, "", "should have a text", "it is empty", "tiny shakespeare"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_broken_text_is_refused(tmp_path, case):
    files, place, asked, found, fix = REFUSED[case]
    with pytest.raises((UsageError, DataError)) as caught:
        texts.read_text(broken(tmp_path, files) / place)
    assert re.search(asked, str(caught.value).split("\n")[0])
    assert found in caught.value.found
    assert fix in caught.value.fix


# Vocabularies


def test_characters_are_sorted_and_come_back():
    tokenizer = vocabulary.characters_of(["ba\nc", "\u00e9 a"])
    assert vocabulary.encode(tokenizer, "\n abc\u00e9").tolist() == [0, 1, 2, 3, 4, 5]
    for text in ("ab c\n\na", "\u00e9\n"):
        ids = vocabulary.encode(tokenizer, text).tolist()
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids) == text


AWKWARD = "a  b\n\n\n c\n = D = \n \n\nE\u2028f\x0bg \n\tH\n\n  i  \nit's 12"


def test_a_bpe_is_not_changed_by_the_pieces_that_are_encoded():
    tokenizer = vocabulary.train_bpe([LINES, AWKWARD * 9], 300)
    assert tokenizer.get_vocab_size() == 300
    ids = vocabulary.encode(tokenizer, AWKWARD).tolist()
    assert len(vocabulary._lines(AWKWARD)) > 3
    assert ids == tokenizer.encode(AWKWARD).ids
    assert tokenizer.decode(ids) == AWKWARD


def llama2c_file() -> bytes:
    """Three tokens, the bytes, and pieces: the first is merged first."""
    pieces = [" a", "bc", " abc", "a", "b", "c", " "]
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    entries = [struct.pack("<fi", -max(n - 259, 0), len(token)) + token.encode() for n, token in enumerate(tokens)]
    return struct.pack("<i", 8) + b"".join(entries)


def test_a_vocabulary_of_llama2c_merges_by_score(tmp_path):
    write(tmp_path / "v", "tok266.bin", llama2c_file())
    tokenizer = vocabulary.open_folder(tmp_path / "v")
    ids = vocabulary.encode(tokenizer, "abc\nabd").tolist()
    assert [tokenizer.id_to_token(number) for number in ids] == [" abc", "<0x0A>", "a", "b", "<0x64>"]
    assert tokenizer.decode(ids) == "abc\nabd"


def test_gpt2s_files_are_a_vocabulary(tmp_path):
    trained = vocabulary.train_bpe([LINES], 280)
    trained.model.save(str(tmp_path))
    (tmp_path / "vocab.json").rename(tmp_path / "gpt2-vocab.json")
    write(tmp_path, "gpt2-merges.txt.xz", (tmp_path / "merges.txt").read_bytes())
    opened = vocabulary.open_folder(tmp_path)
    assert vocabulary.encode(opened, AWKWARD).tolist() == vocabulary.encode(trained, AWKWARD).tolist()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the original files are not here")
def test_the_original_files():
    gpt2 = vocabulary.open_folder(SHARED / "tokenizers")
    assert gpt2.get_vocab_size() == 50257
    assert vocabulary.encode(gpt2, "Hello world\n\nYes").tolist() == [15496, 995, 198, 198, 5297]
    shakespeare = texts.read_text(SHARED / "tinyshakespeare")
    assert str(shakespeare) == "tinyshakespeare, 1,003,854 of 1,115,394 characters"
    assert vocabulary.characters_of([*shakespeare.train, *shakespeare.held_out]).get_vocab_size() == 65
    stories = texts.read_text(STORIES)
    tokenizer = vocabulary.open_folder(STORIES)
    assert stories.are_stories
    assert sum(len(vocabulary.encode(tokenizer, story)) for story in stories.held_out) == 15_156  # as SOURCE counts


# What is refused before the training: the flags, and the error's three parts.
WRONG = {
    "short": (["--block", "2000"], "should have a block of 2000 tokens", "it has 1422", "--block 1421 or less"),
    "short, held out": (["--block", "200"], "the held-out text should have a block", "it has 158", "--block 157"),
    "temperature": (["--temperature", "-1"], "--temperature -1.0", "it should be 0 or more", "--temperature 0.8"),
    "top-k": (["--top-k", "5", "--temperature", "0"], "--top-k 5", "draws none", "leave --top-k out"),
    "prompt": (["--prompt", "the Ox"], "--prompt 'the Ox'", "the vocabulary lacks 'O', 'x'", "--tokenizer bpe"),
    "no prompt": (["--prompt", ""], "--prompt ''", "it is empty", "leave --prompt out"),
    "no model": (["--model", "nowhere"], "--model nowhere", "there is no such folder", "config.json and model.safe"),
    "no config": (["--model", "."], "a causal language model", "it has no config.json", "nothing is downloaded"),
    "no head": (["--model", "headless"], "--model headless", "GPT2Model has no language-model head", "GPT2LMHeadModel"),
    "other head": (["--model", "masked"], "--model masked", "BertForMaskedLM has no language-model head", "GPT2LM"),
    "code": (["--model", "code"], "--model code", "", "no code in it is run"),
    "no vocabulary": (
        ["--model", "bare"],
        "a vocabulary in bare",
        "it has none of the files",
        "--tokenizer characters",
    ),
    "sizes": (["--model", "bare", "--width", "8"], "--width with --model", "has its own sizes", "leave --width out"),
    "heads": (["--width", "10", "--heads", "4"], "--width 10", "shared by 4 heads", "a multiple of --heads"),
    "large vocabulary": (["--model", "bare", "--tokenizer", "bpe"], "of 2", "the model knows 5", "was trained with"),
    "positions": (
        ["--model", "bare", "--tokenizer", "characters", "--block", "99"],
        "--block 99",
        "has 8 pos",
        "most 8",
    ),
    "save": (["--save", "bare"], "can't export to bare", "there is something else", "name a new folder"),
    "steps": (["--steps", "-1"], "--steps -1", "it should be at least 0", "write --steps 0 or more"),
    "size of a vocabulary": (
        ["--vocabulary", "300", "--tokenizer", "characters"],
        "--vocab",
        "its own size",
        "leave it",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders that are no language model that can be trained here."""
    here = tmp_path_factory.mktemp("models")
    (here / "input.txt").write_text(LINES)
    tiny = {
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 1,
        "vocab_size": 5,
        "n_positions": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.GPT2Config(**tiny)
    transformers.GPT2LMHeadModel(config).save_pretrained(here / "bare")
    for name, kind, architecture in (("headless", "gpt2", "GPT2Model"), ("masked", "bert", "BertForMaskedLM")):
        write(here / name, "config.json", json.dumps({"model_type": kind, "architectures": [architecture]}))
    code = {"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoConfig": "mine.Mine"}}
    write(here / "code", "config.json", json.dumps(code))
    write(here / "code", "mine.py", "raise SystemExit('code in a folder was run')")
    return here


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_before_the_training(folders, monkeypatch, case):
    words, asked, found, fix = WRONG[case]
    monkeypatch.chdir(folders)
    monkeypatch.setattr(sys, "argv", ["workload.py", "--data", "input.txt", *words])
    monkeypatch.syspath_prepend(str(EXAMPLE))
    with pytest.raises((UsageError, DataError)) as caught:
        runpy.run_path(str(EXAMPLE / "workload.py"), run_name="refused")
    assert asked in str(caught.value).split("\n")[0]
    assert found in caught.value.found
    assert fix in caught.value.fix


def test_missing_weights_are_not_drawn_at_random(folders):
    config = decoder.open_config(folders / "bare")
    tensors = st_file.load_file(folders / "bare" / "model.safetensors")
    tensors.pop("transformer.h.0.mlp.c_fc.weight")
    write(folders / "lacking", "config.json", (folders / "bare" / "config.json").read_bytes())
    st_file.save_file(tensors, folders / "lacking" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"its weights lack transformer\.h\.0\.mlp\.c_fc\.weight"):
        decoder.make_model(config, folders / "lacking")


def test_blocks_and_padding():
    tokens = torch.arange(10).numpy()
    every = blocks.Blocks(tokens, 3)
    assert len(every) == 7
    assert every[6].tolist() == [6, 7, 8, 9]
    one_each = blocks.Blocks(tokens, 3, stride=3)
    assert [row.tolist() for row in (one_each[n] for n in range(len(one_each)))] == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
    ]
    stories = blocks.Stories([tokens, tokens[:2]], begin=99, block=5)
    assert stories[0].tolist() == [99, 0, 1, 2, 3, 4]
    model = decoder.make_model(decoder.small_config(100, 64, 1, 2, 8), None).eval()
    batch = blocks.pad_up_to(64)([stories[0], stories[1]])
    assert batch.shape == (2, 65)
    with torch.no_grad():
        total, count = blocks.loss_of(are_padded=True)(model, batch)
        alone = [blocks.loss_of(are_padded=False)(model, stories[number][None])[0] for number in (0, 1)]
    assert (float(total), int(count)) == (pytest.approx(float(sum(alone)), rel=1e-5), 7)


# Whole jobs


@pytest.mark.slow
def test_gpt_saved_model_loads_in_transformers_and_the_example(tmp_path, data):
    greedy = ("--data", data, "--tokens", "25", "--temperature", "0", "--prompt", "the ")
    first = run(tmp_path, 1, None, *greedy, *SIZES, "--steps", "30")
    assert first["scores"]["validation loss"] < first["scores"]["first loss"] - 0.8
    folder = tmp_path / "replicate-1"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("the ", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    assert first["text"].startswith(tokenizer.decode(ids))
    row = tokenizer.encode("the ")
    while len(row) < 29:  # by hand: where the block of 12 is full, its newer half goes on
        seen = row[:] if len(row) < 12 else row[-6:]
        begin = len(row) - len(seen)
        while len(row) - begin < 12:
            row.append(int(model(input_ids=torch.tensor([row[begin:]])).logits[0, -1].argmax()))
    assert first["text"] == tokenizer.decode(row[:29])
    again = run(tmp_path, 2, "shard=2", *greedy, "--model", folder, "--steps", "0")
    assert again["text"] == first["text"]
    assert again["scores"]["validation loss"] == pytest.approx(first["scores"]["validation loss"], rel=1e-5)
    for name, tensor in first["tensors"].items():
        assert torch.equal(again["tensors"][name], tensor)


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.is_dir(), reason="stories260K is not here")
def test_gpt_stories260k_has_its_published_loss(tmp_path):
    words = ("--data", STORIES, "--model", STORIES, "--steps", "1", "--batch-size", "4")
    words = (*words, "--tokens", "30", "--temperature", "0")
    found = run(tmp_path, 2, None, *words)
    assert found["scores"]["first loss"] == pytest.approx(1.2657, abs=5e-5)
    assert found["scores"]["validation loss"] == pytest.approx(1.2657, abs=3e-3)
    assert found["scores"]["validation loss"] != found["scores"]["first loss"]
    assert found["text"].startswith("Once upon a time, there was a little girl named Lily. She loved to play outside")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "replicate-2")
    assert type(saved).__name__ == "LlamaForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "replicate-2")
    assert tokenizer.encode("Once upon a time", add_special_tokens=False)[0] == 403


KILL = """
import os, signal
from paceline.train.job import Job
plain_step = Job.step
def step(job, batch):
    if job.step_number == int(os.environ.get("KILL_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain_step(job, batch)
Job.step = step
"""


@pytest.mark.integration
@pytest.mark.complete  # declared jobs that are killed: tests/integration/test_state_resumed.py
def test_a_killed_job_ends_as_an_undisturbed_one(tmp_path, data):
    file = tmp_path / "killed.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(EXAMPLE)!r})\n{KILL}" + (EXAMPLE / "workload.py").read_text())
    file.write_text(file.read_text().replace("from __future__ import annotations\n", ""))

    def train(job: str, *flags: str, **environment: str) -> Ended:
        words = (*SAME, "--steps", "12", "--output", tmp_path / f"{job}.json", "--picture", tmp_path / f"{job}.png")
        command = ("run", "-n", "2", "--job", job, *flags, file, "--data", data, *words)
        return paceline(tmp_path, *command, **environment)

    assert train("whole").code == 0
    assert train("torn", "--checkpoint-every", "3", KILL_AT="8").code == 1
    assert not (tmp_path / "torn.json").exists()
    resumed = train("torn", "--resume")
    assert resumed.code == 0, resumed.err
    whole, torn = (json.loads((tmp_path / f"{job}.json").read_text()) for job in ("whole", "torn"))
    for name in ("scores", "text", "steps", "curves"):
        assert torn[name] == whole[name]
    assert len((tmp_path / "torn.png").read_bytes()) > 5000


@pytest.mark.parametrize(
    "plan",
    [
        *(pytest.param(plan, marks=pytest.mark.complete) for plan in ("replicate=2", "shard=2", "tensor=2")),
        pytest.param("pipeline=2", marks=pytest.mark.integration),
    ],
)
@pytest.mark.complete  # declared jobs that are verified: tests/verify/test_command.py
def test_verify_finds_the_step_of_two_ranks_that_of_one(tmp_path, data, plan):
    words = ("--data", data, *SIZES, "--layers", "2")
    ended = paceline(tmp_path, "verify", "--plan", plan, EXAMPLE / "workload.py", "--", *words)
    assert ended.code == 0, ended.out + ended.err
    assert "step float64  ok" in ended.out


@pytest.mark.integration
def test_servers_train_it_too(tmp_path, data):
    words = ("--data", data, *SIZES, "--steps", "8", "--tokens", "20", "--output", tmp_path / "result.json")
    plan = ("--plan", "replicate=2,server=1")
    ended = paceline(tmp_path, "run", *plan, EXAMPLE / "workload.py", *words, "--save", tmp_path / "saved")
    assert ended.code == 0, ended.err
    scores = json.loads((tmp_path / "result.json").read_text())["scores"]
    assert scores["validation loss"] < scores["first loss"] - 0.1
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").num_parameters() > 5000
