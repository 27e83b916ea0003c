"""docs/events.md describes the events as they are written: every event, every field, with the right type."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from paceline.demo.report import read_events
from paceline.nouns.step_record import StepRecord
from paceline.run.supervise.progress import Progress
from paceline.train.event_log import VERSION

from support.jobs import LOOP, STEPS, events, paceline, send, start, wait_for, write_workload

PAGE_FILE = Path(__file__).parents[2] / "docs" / "events.md"
PAGE = PAGE_FILE.read_text()
CHECKS = {
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "string": lambda value: type(value) is str,
    "boolean": lambda value: type(value) is bool,
    "null": lambda value: value is None,
    "object of numbers": lambda value: (
        type(value) is dict and all(type(each) in (int, float) for each in value.values())
    ),
}
ANY_NAME = "*name*"


@dataclasses.dataclass
class Field:
    """A row of one of the page's tables."""

    types: list[str]
    is_optional: bool
    is_rare: bool


def tables():
    """The fields of every section that has a table of them."""
    found = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in body.splitlines() if row.startswith("|")]
        if not rows:
            continue
        assert rows[0] == ["field", "type", "unit", "meaning"], title
        fields = {}
        for name, kind, _unit, meaning in rows[2:]:
            kind, _, optional = kind.partition(", ")
            assert optional in ("", "optional"), (title, name)
            fields[name.strip("`")] = Field(kind.split(" or "), bool(optional), "Rare" in meaning)
        found[title.strip("`")] = fields
    return found


TABLES = tables()
COMMON = TABLES.pop("Every event")
ROW = TABLES.pop("A ledger row")


def fits(value, kind):
    """True if a value is of a type as the page writes it."""
    if not kind.startswith("list of "):
        return CHECKS[kind](value)
    item = kind.removeprefix("list of ").removesuffix("s")
    if item == "ledger row":
        return type(value) is list and all(faults(each, ROW) == [] for each in value)
    return type(value) is list and all(CHECKS[item](each) for each in value)


def faults(found, fields):
    """What an object has, or lacks, against a table."""
    wrong = []
    for name, value in found.items():
        field = fields.get(name) or fields.get(ANY_NAME)
        if field is None:
            wrong.append(f"{name} is not documented")
        elif not any(fits(value, kind) for kind in field.types):
            wrong.append(f"{name}={value!r} is no {' or '.join(field.types)}")
    for name, field in fields.items():
        if name not in found and not field.is_optional and name != ANY_NAME:
            wrong.append(f"{name} is missing")
    return wrong


OWN_LOOP = """
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        if job.step_number == 8:
            break
    job.load(os.environ["PACELINE_RUN_DIR"] + "/checkpoints/step-00000004")
    for batch in job.batches():
        job.step(batch)
    job.save("saved")
    job.evaluate(Numbers(), lambda model, batch: {"loss": loss(model, batch), "nothing": (loss(model, batch)[0], 0)})
    job.log(step=job.step_number, nothing=(0, 0))
    job.log_text("said", "it")
    job.log_picture("weights", torch.rand(3, 4))
"""
NO_ROOM = """
if __name__ == "__main__":
    job = paceline.distribute(workload)
    checkpoints = job.run_dir / "checkpoints"
    if checkpoints.exists():
        checkpoints.rmdir()
    checkpoints.touch()
    samples = torch.utils.data.default_collate([Numbers()[index] for index in range(8)])
    for _ in range(3):
        job.step(samples)
"""


def plain(folder):
    """A job in fp16 that goes back to a checkpoint, saves and evaluates; without clipping."""
    file = write_workload(folder, loop=OWN_LOOP)
    text = file.read_text().replace("torch.float64", "torch.float32").replace('"float64"', '"fp16"')
    file.write_text(text.replace("    clip_norm=1.0,\n", ""))
    ended = paceline(folder, "run", "-n", "2", "--job", "a", "--checkpoint-every", "2", "--keep", "9", file)
    assert ended.code == 0, ended.err


def stopped_and_resumed(folder):
    """A job that was asked to stop, and goes on with one rank."""
    file = write_workload(folder)
    process = start(folder, "run", "-n", "2", "--job", "a", file, TEST_PAUSE="0.2")
    assert wait_for(lambda: len(events(folder / "runs" / "a", "step")) >= 2, 60)
    send(process, signal.SIGTERM)
    process.communicate(timeout=60)
    ended = paceline(folder, "run", "--job", "a", "--resume", file)
    assert ended.code == 0, ended.err


def without_room(folder):
    """A loop with its own batches whose checkpoints can't be written."""
    ended = paceline(folder, "run", "--job", "a", "--checkpoint-every", "2", write_workload(folder, loop=NO_ROOM))
    assert ended.code == 1
    assert "the job's last checkpoint" in ended.err


LOSES_STORE = """
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        if job.step_number == 8:
            while '"copied"' not in (job.run_dir / "events.jsonl").read_text():
                time.sleep(0.05)
            os.rename("store", "moved")  # at once: a copy may be under way
            open("store", "w").close()
"""


def without_store(folder):
    """A job whose checkpoints can be copied only at first."""
    file = write_workload(folder, loop=LOSES_STORE)
    copied = ("--copy-to", f"file://{folder}/store")
    ended = paceline(folder, "run", "--job", "a", "--checkpoint-every", "4", *copied, file)
    assert ended.code == 1
    assert "last checkpoint should be copied" in ended.err


def servers(folder):
    """A job with a parameter server whose worker 0 is killed and replaced."""
    file = write_workload(folder, loop=f"print('pid', os.getpid(), flush=True)\n{LOOP}")
    words = ("run", "-n", "2", "--plan", "server=1", "--job", "a", file)
    process = start(folder, *words, stderr=subprocess.STDOUT, TEST_PAUSE="0.15")
    line = ""
    while not line.startswith("[0] pid") and process.poll() is None:
        line = process.stdout.readline()
    assert wait_for(lambda: len(events(folder / "runs" / "a", "step")) >= 3, 60)
    os.kill(int(line.split()[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out


def experts(folder):
    """A mixture of experts: the example of docs/experts.md, for more steps."""
    text = (PAGE_FILE.parent / "experts.md").read_text()
    example = re.search(r"<!-- test: mixture.py -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    (folder / "mixture.py").write_text(example.replace("steps=4", "steps=20"))
    ended = paceline(folder, "run", "--job", "a", "--plan", "expert=2", "mixture.py")
    assert ended.code == 0, ended.err


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The events of all these jobs."""
    found = []
    for job in (plain, stopped_and_resumed, without_room, without_store, servers, experts):
        folder = tmp_path_factory.mktemp(job.__name__)
        job(folder)
        found += map(json.loads, (folder / "runs" / "a" / "events.jsonl").read_text().splitlines())
    return found


@pytest.mark.integration
def test_event_schema_documents_each_written_event_and_field(written):
    assert len(written) > 3 * STEPS
    for event in written:
        assert faults(event, {**TABLES[event["event"]], **COMMON}) == [], event


@pytest.mark.integration
@pytest.mark.parametrize("kind", TABLES)
def test_every_documented_event_and_field_is_written(kind, written):
    found = [event for event in written if event["event"] == kind]
    assert found
    for name, field in {**TABLES[kind], **COMMON}.items():
        if name == ANY_NAME:
            values = [value for event in found for key, value in event.items() if key not in {**COMMON, "step": 0}]
        else:
            values = [event[name] for event in found if name in event]
        for type_ in field.types:
            assert field.is_rare or any(fits(value, type_) for value in values), f"{name} is never a {type_}"
        assert not field.is_optional or field.is_rare or len(values) < len(found), f"{name} is in every {kind}"
        assert "list of" not in field.types[0] or any(values), f"{name} is always empty"


@pytest.mark.integration
def test_a_start_says_which_version_the_page_describes(written):
    assert f"**version {VERSION}**" in PAGE
    assert {event["version"] for event in written if event["event"] == "start"} == {VERSION}


def test_the_record_of_a_step_is_the_documented_one():
    assert {field.name for field in dataclasses.fields(StepRecord)} == TABLES["step"].keys() - {"times"}


def test_event_readers_accept_unknown_fields_and_no_version(tmp_path):
    step = {name: 1 for name in TABLES["step"]}
    lines = [
        {"event": "start", "total_steps": 4, "samples": 8, "batch_size": 2, "world_size": 1, "at": 1.0},
        {"event": "step", **step, "at": 2.0, "a_later_field": {}},
        {"event": "a_later_event", "at": 2.0},
    ]
    progress = Progress(tmp_path)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert progress.read()
    assert (progress.total_steps, progress.last["step"]) == (4, 1)
    assert [event["step"] for event in read_events(tmp_path, "step")] == [1]


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ({"event": "saved", "at": 1.0, "path": "a", "step": 1}, "seconds is missing"),
        ({"event": "saved", "at": 1.0, "path": "a", "step": 1.0, "seconds": 1}, "step=1.0 is no integer"),
        ({"event": "saved", "at": 1.0, "path": "a", "step": 1, "seconds": 1, "b": 1}, "b is not documented"),
        ({"event": "stopped", "at": 1.0, "step": 1, "asked": ["0"]}, "asked=['0'] is no list of integers"),
        ({"event": "end", "at": 1.0, "step": 1, "ledger": [{}]}, "ledger=[{}] is no list of ledger rows"),
    ],
)
def test_a_wrong_event_is_found(event, fault):
    assert faults(event, {**TABLES[event["event"]], **COMMON}) == [fault]
