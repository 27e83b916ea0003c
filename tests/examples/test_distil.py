"""The distillation example: one job trains a teacher and then students, under every plan as one process does."""

from __future__ import annotations

import json
import lzma
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.nouns.errors import DataError, UsageError
from paceline.nouns.plan import Plan

from support.jobs import paceline
from support.ranks import preload, run_ranks
from support.trainings import KILL, load

pytest.importorskip("transformers")
preload("paceline.train.loop_job", "tokenizers", "paceline.integrations.saving")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "distil"
SST_2 = ROOT.parent / "shared" / "data" / "glue" / "SST-2"
MODULES = ("texts", "model", "losses", "picture", "workload")
SMALL = ("--limit-train", "60", "--width", "16", "--tokens", "150", "--max-length", "16", "--batch-size", "6")
TINY = (*SMALL, "--teacher-steps", "3", "--steps", "3")
HEADER = "sentence\tlabel\n"


@pytest.fixture(scope="module")
def example():
    """The example's modules by name."""
    return SimpleNamespace(**dict(zip(MODULES, load("distil", *MODULES), strict=True)))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several would wait for each other where cores are few."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Reading


def test_rows_are_split_at_the_last_tab_and_quotes_stay(example, tmp_path):
    text = HEADER + 'the " worst " \' film \t0\r\nfine\t1\n\n'
    (tmp_path / "train.tsv").write_text(text, newline="")
    with lzma.open(tmp_path / "dev.tsv.xz", "wt", encoding="utf-8") as file:
        file.write(text)
    train, dev, name = example.texts.read(tmp_path)
    assert train == dev == (['the " worst " \' film', "fine"], [0, 1])
    assert name == "SST-2"
    assert example.texts.read(tmp_path, limit=1)[0] == (['the " worst " \' film'], [0])


@pytest.mark.skipif(not SST_2.is_dir(), reason="SST-2 is not here")
@pytest.mark.parametrize("folder", [SST_2, SST_2.parent])
def test_sst_2_itself(example, folder):
    train, dev, _ = example.texts.read(folder)
    assert (len(train.texts), len(dev.texts)) == (67_349, 872)
    assert sum(dev.labels) == 444
    assert train.texts[0] == "hide new secretions from the parental units"


@pytest.mark.parametrize(
    ("files", "asked", "found"),
    [
        (None, r"SST-2 in --data .*: train.tsv, or train.tsv.xz", "there is no such folder"),
        ({}, r"train.tsv, or train.tsv.xz", "the folder holds nothing"),
        ({"train.tsv": HEADER + "fine\t1\n"}, r"dev.tsv, or dev.tsv.xz", "the folder holds train.tsv"),
        ({"train.tsv": "fine\t1\n"}, r"line 1: sentence and label, separated by a tab", r"'fine\\t1'"),
        ({"train.tsv": HEADER + "fine\t1\nbad\t2\n"}, r"line 3: a sentence, a tab, and 0 or 1", r"'bad\\t2'"),
        ({"train.tsv": HEADER + "fine 1\n"}, r"line 2: a sentence, a tab, and 0 or 1", "'fine 1'"),
        ({"train.tsv": HEADER}, r"rows of sentences", "it has a header alone"),
        ({"train.tsv": b"sentence\tlabel\n\xff\t1\n"}, r"text in UTF-8", "it can't be read"),
        ({"train.tsv.xz": b"no xz"}, r"text in UTF-8", "it can't be read"),
    ],
)
def test_files_that_are_none(example, tmp_path, files, asked, found):
    folder = tmp_path / "none" if files is None else tmp_path
    for name, text in (files or {}).items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        if name.startswith("train") and len(files) == 1 and "SST" not in asked and "dev" not in asked:
            (folder / "dev.tsv").write_text(HEADER + "fine\t1\n")
    error = UsageError if "or train" in asked or "or dev" in asked else DataError
    with pytest.raises(error, match=rf"(?s){asked}.*found: {found}.*fix: "):
        example.texts.read(folder)


# The vocabulary, masks and batches


def test_the_vocabulary_has_words_endings_and_all_characters(example):
    rows, _, _ = example.texts.read(None, 200)
    vocabulary = example.texts.make_vocabulary([*rows.texts, "zzz", "filmzz", "filmzz"], 130)
    assert vocabulary == example.texts.make_vocabulary([*rows.texts, "zzz", "filmzz", "filmzz"][::-1], 130)
    assert len(vocabulary) == len(set(vocabulary)) <= 130
    tokenizer = example.texts.open_tokenizer(vocabulary, 16)
    assert tokenizer.encode("the film zfz").tokens == ["[CLS]", "the", "film", "z", "##f", "##z", "[SEP]"]
    assert "##zz" in example.texts.make_vocabulary(["film film film filmzz"], 17)


def test_masks_hide_eight_of_ten_and_spare_the_ends(example):
    rows, _, _ = example.texts.read(None, 400)
    tokenizer = example.texts.open_tokenizer(example.texts.make_vocabulary(rows.texts, 200), 32)
    masked, plain = (example.texts.Sentences(rows, tokenizer, share) for share in (0.15, 0))
    torch.manual_seed(0)
    chosen = hidden = tokens = 0
    for index in range(len(masked)):
        sample, own = masked[index], plain[index]["ids"]
        assert torch.equal(sample["wanted"], own[sample["places"]])
        assert not {0, len(own) - 1} & {*sample["places"].tolist()}
        others = torch.ones(len(own), dtype=torch.bool).index_fill(0, sample["places"], False)
        assert torch.equal(sample["ids"][others], own[others])
        chosen += len(sample["places"])
        hidden += int((sample["ids"] == tokenizer.token_to_id("[MASK]")).sum())
        tokens += len(own) - 2
    assert 0.10 < chosen / tokens < 0.16  # few at most of each sentence
    assert 0.7 < hidden / chosen < 0.9


def test_buckets_have_every_row_once_in_a_round(example):
    lengths = torch.arange(100) % 13
    torch.manual_seed(0)
    buckets = example.texts.Buckets(lengths, 8, 26)
    batches = list(buckets)
    assert len(batches) == len(buckets) == 26
    rounds = [sorted(row for batch in part for row in batch) for part in (batches[:13], batches[13:])]
    assert rounds == [list(range(100))] * 2
    spread = [int(lengths[batch].max() - lengths[batch].min()) for batch in batches[:13]]
    assert max(spread) <= 2


# Losses


def test_the_losses_of_a_batch_are_the_mean_of_its_parts(example):
    torch.manual_seed(0)
    rows, _, _ = example.texts.read(None, 12)
    tokenizer = example.texts.open_tokenizer(example.texts.make_vocabulary(rows.texts, 100), 16)
    data = example.texts.Sentences(rows, tokenizer, 0.3)
    teacher, student = (
        example.model.Encoder(example.model.small_config(layers, 16, tokenizer.get_vocab_size(), 16)).double()
        for layers in (4, 2)
    )
    samples = [data[index] for index in range(12)]

    def loss(part):
        batch = example.texts.pad(part)
        inputs = example.workload.inputs_of(batch)
        return example.losses.student_loss(
            student(**inputs), teacher(**inputs), batch, example.losses.Weights(5.0, 2.0, 1.0), 2.0
        )

    parts = (loss(samples[:3]) * 3 + loss(samples[3:]) * 9) / 12  # padded to other lengths, with other masks
    torch.testing.assert_close(parts, loss(samples), rtol=1e-12, atol=0)


def test_distil_soft_loss_and_angle_are_zero_for_equal_models(example):
    torch.manual_seed(0)
    made = {name: torch.randn(3, 4, 5) for name in ("tokens", "hidden")} | {"classes": torch.randn(3, 2)}
    batch = {"wanted": torch.ones(3, 4, dtype=torch.long), "attention_mask": torch.ones(3, 4)}
    for weights in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0)):
        batch["labels"] = torch.tensor([0, 1, 1])
        found = example.losses.student_loss(made, made, batch, example.losses.Weights(*weights), 2.0)
        assert found.abs() < 1e-6
        softer = {name: value * 2 for name, value in made.items()} | {"hidden": -made["hidden"]}
        assert example.losses.student_loss(softer, made, batch, example.losses.Weights(*weights), 2.0) > 0.01


# The command line


@pytest.mark.parametrize(
    ("words", "asked", "found", "fix"),
    [
        ("--temperature 0", "--temperature 0.0", "it should be a number above 0", "write e.g. --temperature 2"),
        ("--temperature nan", "--temperature nan", "it should be a number above 0", "write e.g. --temperature 2"),
        (
            "--weights 0 0 0",
            "--weights 0.0 0.0 0.0",
            "they should be 0 or more, and one of them above 0",
            "--weights 5 2 1",
        ),
        ("--weights 5 -1 1", "--weights 5.0 -1.0 1.0", "they should be 0 or more", "--weights 5 2 1"),
        ("--teacher-steps 0", "--teacher-steps 0", "it should be at least 1", "write --teacher-steps 1 or more"),
        ("--batch-size 0", "--batch-size 0", "it should be at least 1", "write --batch-size 1 or more"),
        (
            "--teacher t --layers 6",
            "--layers with --teacher",
            "the teacher has its own",
            "leave --layers or --teacher out",
        ),
        ("--output no/o.json", "--output no/o.json", "there is no folder no", "make the folder first"),
        ("--width 100", "--width 100", "a head of attention is 32 wide", "write a multiple of 32"),
    ],
)
def test_flags_that_are_refused(example, words, asked, found, fix):
    with pytest.raises(
        UsageError, match=rf"{re.escape(asked)}\n  found: {re.escape(found)}.*\n  fix: .*{re.escape(fix)}"
    ):
        example.workload.parse_arguments(words.split())


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (None, "there is no such folder"),
        ({}, "it has no config.json"),
        ({"config.json": '{"model_type": "bert"}'}, "it has a config.json and no weights"),
        ({"config.json": '{"model_type": "gpt2"}', "model.safetensors": ""}, "it is a gpt2"),
        ({"config.json": '{"model_type": "bert"}', "model.safetensors": "no"}, "."),
    ],
)
def test_folders_that_hold_no_teacher(example, tmp_path, files, found):
    folder = tmp_path / "none" if files is None else tmp_path
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    with pytest.raises(UsageError, match=rf"a BERT of transformers in --teacher .*\n  found: {found}.*\n  fix: name"):
        example.model.open_teacher(folder, 48)


def test_a_teacher_with_an_odd_number_of_layers(example):
    with pytest.raises(UsageError, match=r"the teacher has 3\n  fix: take a teacher with an even number"):
        example.workload.prepare(example.workload.parse_arguments([*TINY, "--layers", "3"]))


# Whole jobs


def train_on_rank(rank, plan, words):
    """Train in float64: the curve, and every parameter, whole."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(EXAMPLE))
    import workload

    arguments = workload.parse_arguments(words)
    setting = workload.prepare(arguments)
    job, progress = workload.train(setting, arguments)
    result = workload.report(setting, arguments, job, progress)
    curve = [{name: value for name, value in point.items() if name != "seconds"} for point in progress["curve"]]
    whole = {name: job.parallel.models.full_tensor(each).clone() for name, each in job.parallel.named().items()}
    return curve, result["scores"], whole


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, train_on_rank, "replicate=1", TINY)[0]


def check_same(results, alone):
    for curve, scores, parameters in results:
        assert curve == alone[0]
        assert scores == alone[1]
        torch.testing.assert_close(parameters, alone[2], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_two_ranks_end_as_one_does(alone, plan):
    check_same(run_ranks(2, train_on_rank, plan, TINY), alone)


@pytest.mark.integration
@pytest.mark.parametrize("plan", ["shard=2,zero=1", "tensor=2", "replicate=4", "replicate=2,shard=2"])
def test_other_plans_end_as_one_rank_does(alone, plan):
    check_same(run_ranks(Plan.parse(plan).world_size, train_on_rank, plan, TINY), alone)


def test_the_student_begins_as_every_second_layer_of_its_teacher(example):
    arguments = example.workload.parse_arguments([*TINY, "--steps", "1", "--lr", "1e-30", "--no-baseline"])
    setting = example.workload.prepare(arguments)
    example.workload.train(setting, arguments)
    student, teacher = setting.students["student"].state_dict(), setting.teacher.state_dict()
    assert len(student) < len(teacher)
    for name, value in student.items():
        of_teacher = re.sub(r"layer\.(\d)", lambda found: f"layer.{2 * int(found[1]) + 1}", name)
        torch.testing.assert_close(value, teacher[of_teacher], rtol=0, atol=1e-12)


# The same after a kill


TRAIN = """
import os, sys
import torch
torch.set_default_dtype(torch.float64)
plain_take = LoopJob.take
def take(job, part, batch=None):
    plain_take(job, part, batch)
    if part is not None and job.rank == 0:
        ids = part.batch["input_ids"]
        with open(os.environ["SEEN"], "a") as file:
            file.write(f"{job.step_number + 1} {ids.sum().item()} {part.batch['places'].sum().item()}\\n")
LoopJob.take = take
sys.path.insert(0, FOLDER)
import workload
arguments = workload.parse_arguments()
setting = workload.prepare(arguments)
job, progress = workload.train(setting, arguments)
total = sum(float((job.parallel.models.full_tensor(each) * torch.arange(1.0, 1 + each.numel()).view(each.shape)).sum())
            for each in job.parallel.named().values())
print("ends at", job.step_number, [point["step"] for point in progress["curve"]], repr(total))
"""


@pytest.mark.integration
@pytest.mark.parametrize(("at", "plan"), [(5, "replicate=2"), (6, "shard=2"), (9, "replicate=2")])
def test_distil_killed_in_either_phase_sees_each_batch_once(tmp_path, at, plan):
    file = tmp_path / "killed.py"
    file.write_text(KILL + TRAIN.replace("FOLDER", repr(str(EXAMPLE))))
    words = (*SMALL, "--teacher-steps", "6", "--steps", "8")

    def run(name, *flags, **environment):
        seen = tmp_path / f"{name}.seen"
        ended = paceline(
            tmp_path, "run", "--plan", plan, "--job", name, *flags, file, *words, SEEN=str(seen), **environment
        )
        assert seen.exists(), ended.err
        return ended, sorted({line for line in seen.read_text().splitlines()}, key=lambda line: int(line.split()[0]))

    ended, expected = run("whole")
    assert ended.code == 0, ended.err
    assert run("killed", "--checkpoint-every", "2", KILL_AT=str(at))[0].code == 1
    ended_again, seen = run("killed", "--resume")
    assert ended_again.code == 0, ended_again.err
    assert "goes on at step" in ended_again.err
    assert seen == expected
    assert len(seen) == 14
    assert re.findall("ends at .*", ended_again.out) == re.findall("ends at .*", ended.out)
    assert len(re.findall("ends at .*", ended.out)) == 2


# Verify, and the commands that the page shows


@pytest.mark.parametrize(
    "plan",
    [
        "replicate=2",
        pytest.param("shard=2", marks=pytest.mark.complete),
        pytest.param("tensor=2", marks=pytest.mark.complete),
    ],
)
@pytest.mark.complete  # loops that are verified: test_loops.py, test_racer.py
def test_verify_agrees_across_both_phases(tmp_path, plan):
    words = [*SMALL, "--teacher-steps", "1"]
    ended = paceline(tmp_path, "verify", "--plan", plan, "--steps", "3", EXAMPLE / "workload.py", "--", *words)
    assert ended.code == 0, ended.out + ended.err
    assert re.search(r"^step float64 +ok ", ended.out, re.MULTILINE), ended.out


@pytest.mark.integration
def test_a_teacher_that_was_saved_teaches_in_parts(tmp_path):
    words = [*SMALL, "--steps", "2"]
    files = ("--output", "o.json", "--picture", "f.png")
    saved = ("--save-teacher", "teacher", "--save-student", "student")
    first = paceline(
        tmp_path, "run", "-n", "2", EXAMPLE / "workload.py", *words, "--teacher-steps", "4", *saved, *files
    )
    assert first.code == 0, first.err
    made = json.loads((tmp_path / "o.json").read_text())
    assert (made["steps"], made["data"]) == (6, "made-up reviews, 36 of 60 rows")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    kept = [word for word in words if word not in ("--width", "16", "--tokens", "150", "--max-length")]
    again = paceline(
        tmp_path,
        "run",
        "-n",
        "2",
        EXAMPLE / "workload.py",
        *kept,
        "--max-length",
        "16",
        "--teacher",
        "teacher",
        *files[:2],
    )
    assert again.code == 0, again.err
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["steps"] == 2
    assert found["scores"]["teacher"] == pytest.approx(made["scores"]["teacher"])
    transformers = pytest.importorskip("transformers")
    model, loaded = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "student", output_loading_info=True
    )
    assert not loaded["missing_keys"]
    assert model.config.num_hidden_layers == 2


@pytest.mark.integration
@pytest.mark.complete  # how well: benchmarks/train_examples.py; that ranks do alike: above
def test_the_students_learn(example):
    arguments = example.workload.parse_arguments(["--teacher-steps", "250", "--steps", "80"])
    setting = example.workload.prepare(arguments)
    _, progress = example.workload.train(setting, arguments)
    scores = progress["curve"][-1]
    teacher = [point["teacher"] for point in progress["curve"] if "teacher" in point][-1]
    assert teacher > 0.7
    assert scores["student"] > teacher - 0.03
