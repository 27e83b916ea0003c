"""Each sink's numbers, texts and pictures are read back by the library that they are for."""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from paceline.nouns.errors import UsageError
from paceline.sinks.mlflow import MLflow
from paceline.sinks.numbers import numbers_of
from paceline.sinks.opentelemetry import OpenTelemetry
from paceline.sinks.prometheus import Prometheus
from paceline.sinks.tensorboard import TensorBoard
from paceline.sinks.wandb import WandB
from paceline.train import sinks

EVENTS = [
    {"event": "start", "total_steps": 3, "samples": 9, "batch_size": 3, "world_size": 2, "at": 1.5},
    *(
        {
            "event": "step", "step": step, "position": 3 * step, "loss": 3.0 - step, "weight": 3.0, "samples": 3,
            "seconds": 0.5, "sent_bytes": 7, "gradient_norm": None, "memory_bytes": 9, "at": 1.5 + step,
        }
        for step in (1, 2)
    ),
    {"event": "evaluation", "step": 2, "loss": 3.5, "F1, macro": 0.25, "at": 4.6},
    {"event": "logged", "step": 2, "held out/accuracy (%)": 25.0, "logged_step": 4.0, "at": 4.7},
    {"event": "text", "step": 2, "name": "../x/y:z*", "text": "a", "at": 4.75},
    {"event": "text", "step": 2, "name": "said", "text": "ROMEO:\n<b>What</b> is it?", "at": 4.8},
    {"event": "picture", "step": 2, "name": "weights", "path": "pictures/weights-00000002.png", "at": 4.9},
    {"event": "checkpoint", "path": "step-2", "step": 2, "seconds": 0.1, "at": 5.0},
    {"event": "a later version's", "at": 5.1},
    {"event": "end", "step": 2, "ledger": [], "at": 6.0},
]  # fmt: skip
CURVES = {
    "train/loss": [(1, 2.0), (2, 1.0)],
    "train/seconds": [(1, 0.5), (2, 0.5)],
    "train/sent_bytes": [(1, 7), (2, 7)],
    "train/memory_bytes": [(1, 9), (2, 9)],
    "train/samples_per_s": [(1, 6.0), (2, 6.0)],
    "evaluation/loss": [(2, 3.5)],
    "evaluation/F1, macro": [(2, 0.25)],
    "held out/accuracy (%)": [(2, 25.0)],
    "step": [(2, 4.0)],
}
ALL = (MLflow, OpenTelemetry, Prometheus, TensorBoard, WandB)


@pytest.fixture
def run(tmp_path):
    """A run directory with the picture."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "runs" / "letters"
    (folder / "pictures").mkdir(parents=True)
    image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3)).save(folder / "pictures" / "weights-00000002.png")
    return folder


def write(sink, events=EVENTS):
    for event in events:
        sink.write(event)
    sink.close()


def test_the_numbers_of_an_event():
    found = {}
    for event in EVENTS:
        for name, value in numbers_of(event).items():
            found.setdefault(name, []).append((event["step"], value))
    assert found == CURVES


# TensorBoard


def test_tensorboard(run):
    pytest.importorskip("tensorboard")
    write(TensorBoard(run))
    code = (
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "read = EventAccumulator(sys.argv[1]).Reload()\n"
        "tags = read.Tags()\n"
        "curves = {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in tags['scalars']}\n"
        "text = [one.tensor_proto.string_val[0].decode() for one in read.Tensors('said/text_summary')]\n"
        "(picture,) = read.Images('weights')\n"
        "print(json.dumps([curves, text, picture.step, picture.width, picture.height]))\n"
    )
    words = [sys.executable, "-W", "ignore", "-c", code, str(run / "tensorboard")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    curves, text, *picture = json.loads(done.stdout.splitlines()[-1])
    assert {name: [tuple(point) for point in points] for name, points in curves.items()} == CURVES
    assert text == ["ROMEO:\n<b>What</b> is it?"]
    assert picture == [2, 3, 2]


# MLflow


def test_mlflow(run):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    write(MLflow(run, experiment="tests"), EVENTS[:-1])
    client = MlflowClient((run / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("tests")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FAILED", "it has had no event `end`"
    assert found.info.run_name == "letters"
    curves = {
        name: [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
    }
    assert curves == {re.sub(r"[,()%]", "_", name): points for name, points in CURVES.items()}
    assert found.data.tags["world_size"] == "2"
    write(MLflow(run, experiment="tests"), [EVENTS[0], {**EVENTS[2], "step": 3}, EVENTS[-1]])
    (again,) = client.search_runs([experiment.experiment_id])
    assert again.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(again.info.run_id, "train/loss")] == [1, 2, 3]
    folder = Path(again.info.artifact_uri.removeprefix("file://"))
    assert (folder / "text" / "said-00000002.txt").read_text() == EVENTS[6]["text"]
    assert (folder / "pictures" / "weights-00000002.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("order", [1, -1])
def test_a_metric_may_have_the_name_of_others_folder(run, order):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    values = {"accuracy": 1.0, "accuracy/top5": 2.0, "a//b": 3.0, "a/../c": 4.0, "/d": 5.0, "..": 6.0, "e/": 7.0}
    sink = MLflow(run)
    sink.write({"event": "logged", "step": 1, "at": 1.5, **dict([*values.items()][::order])})
    sink.close()
    found = MlflowClient((run / "mlruns").as_uri()).get_run(sink.run_id).data.metrics
    assert sorted(found.values()) == sorted(values.values())
    again = MLflow(run)
    again.write({"event": "logged", "step": 2, "at": 2.5, **values})


# Weights & Biases


def test_wandb_offline(run, tmp_path):
    """In a process of its own: wandb starts a service, and reads the environment once."""
    pytest.importorskip("wandb")
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from paceline.sinks.wandb import WandB\n"
        "events = json.loads(Path(sys.argv[2]).read_text())\n"
        "for part in (events, [events[0], {**events[2], 'step': 3}]):\n"
        "    sink = WandB(Path(sys.argv[1]), project='letters')\n"
        "    for event in part:\n"
        "        sink.write(event)\n"
        "    sink.close()\n"
    )
    (tmp_path / "events.json").write_text(json.dumps(EVENTS))
    words = [sys.executable, "-c", code, str(run), str(tmp_path / "events.json")]
    environment = {**os.environ, "WANDB_MODE": "offline", "HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    first, second = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert first.name == second.name, "a job that resumes goes on in the same run"
    curves, keys = read_wandb(first)
    curves.pop("train/step")
    assert curves == CURVES
    assert {"said", "weights"} <= keys
    assert read_wandb(second)[0]["train/loss"] == [(3, 1.0)]


def records(content):
    """The records of a file in LevelDB's log format: blocks of 32 KiB, a header of 7 bytes before each piece."""
    place, pieces = 7, []  # after the file's own header
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        pieces.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last piece
            yield b"".join(pieces)
            pieces = []


def read_wandb(path):
    """Points by name of an offline file, by wandb's own messages."""
    from wandb.proto import wandb_internal_pb2

    curves, keys = {}, set()
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        keys |= {key.partition(".")[0] for key in row}
        for name, value in row.items():
            if isinstance(value, int | float) and not name.startswith("_") and "." not in name:
                curves.setdefault(name, []).append((row["train/step"], value))
    return curves, keys


# OpenTelemetry


def test_opentelemetry(run):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    write(OpenTelemetry(run, MeterProvider(metric_readers=[reader])))
    found = {}
    for resource in reader.get_metrics_data().resource_metrics:
        for metric in resource.scope_metrics[0].metrics:
            (point,) = metric.data.data_points
            found[metric.name] = (point.value, dict(point.attributes))
    job = {"job": "letters"}
    assert found["paceline.train.loss"] == (1.0, job)
    assert found["paceline.held_out.accuracy____"] == (25.0, job)
    assert found["paceline.evaluation.f1__macro"] == (0.25, job)
    assert found["paceline.step"] == (2, job)


def test_opentelemetry_sends_to_the_endpoint_of_the_environment(run, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    write(OpenTelemetry(run))
    server.shutdown()
    server.server_close()
    assert got
    assert got[-1][0] == "/v1/metrics"
    assert b"paceline.train.loss" in got[-1][1]


# What asks whom, and which of the job's events can't arrive there.
AWAY = {
    "mlflow": (MLflow, "MLFLOW_TRACKING_URI", len(EVENTS)),
    "opentelemetry": (OpenTelemetry, "OTEL_EXPORTER_OTLP_ENDPOINT", 4),
}


@pytest.mark.parametrize("case", AWAY)
def test_a_server_that_does_not_answer_holds_up_nothing(case, run, monkeypatch, capsys):
    sink, variable, lost = AWAY[case]
    package = {"mlflow": "mlflow", "opentelemetry": "opentelemetry.exporter.otlp.proto.http"}[case]
    pytest.importorskip(package)
    monkeypatch.setattr(sinks, "CLOSE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:  # its kernel takes connections, and nobody answers
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv(variable, address.replace("//", "//me:secret@"))
        sink(run)  # what its package registers when it is imported asks no server
        exits = atexit._ncallbacks()
        (thread,) = sinks.open_sinks([sink], run)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()  # to make it asks no server
        for event in EVENTS:
            thread.put(event)
        sinks.close_sinks([thread])
        assert thread.thread.is_alive()
        if sink is OpenTelemetry:  # what MLflow imports meanwhile registers functions that ask no server
            assert atexit._ncallbacks() == exits, "the exit of the process asks no server either"
        server.settimeout(30)
        server.accept()[0].close()  # only its thread does
    said = capsys.readouterr().err
    assert f"the sink {sink.__name__} ({address}) did not end within 0.2 s" in said
    assert f"{lost} of {len(EVENTS)} events did not arrive" in said
    assert "secret" not in said


def test_to_make_wandb_asks_no_server(run, monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it keeps the settings of an earlier test
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
            monkeypatch.setenv("WANDB_BASE_URL", address)
            assert WandB(run).address == address
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()
    finally:
        wandb.teardown()


def test_mlflow_goes_on_when_its_server_is_back(run, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    sink = MLflow(run)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "create_run", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sink.write(EVENTS[0])
    write(sink, EVENTS[1:])
    kept = MlflowClient((run / "mlruns").as_uri()).get_run((run / "mlflow-run").read_text().strip())
    assert kept.data.metrics["train/loss"] == 1.0
    assert kept.data.tags["total_steps"] == "3", "what the lost event said is there all the same"


# Prometheus


def parsed(text):
    """Samples by name and labels, by Prometheus' own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


JOB = ("job", "letters")
NEWEST = {
    ("paceline_step", JOB): 2.0,
    ("paceline_train", JOB, ("name", "loss")): 1.0,
    ("paceline_train", JOB, ("name", "samples_per_s")): 6.0,
    ("paceline_evaluation", JOB, ("name", "F1, macro")): 0.25,
    ("paceline_logged", JOB, ("name", "held out/accuracy (%)")): 25.0,
    ("paceline_ended", JOB): 1.0,
}


def test_prometheus_reads_the_file(run):
    pytest.importorskip("prometheus_client")
    sink = Prometheus(run)
    assert parsed((run / "metrics.prom").read_text()) == {("paceline_ended", JOB): 0.0}
    write(sink)
    assert NEWEST.items() <= parsed((run / "metrics.prom").read_text()).items()
    assert [path.name for path in run.glob("metrics*")] == ["metrics.prom"], "what it writes first is gone"


def ask(port, path="/metrics", token=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_scrapes_the_endpoint_with_the_token(run, tmp_path):
    pytest.importorskip("prometheus_client")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    sink = Prometheus(run, port=0, token_file=token)
    for event in EVENTS:
        sink.write(event)
    port = sink.port
    assert NEWEST.items() <= parsed(ask(port, token="0123456789abcdef")).items()
    for wrong in (None, "", "0123456789abcdeg", "0123456789abcdef0", "ä"):
        with pytest.raises((urllib.error.HTTPError, UnicodeEncodeError)) as caught:
            ask(port, token=wrong)
        assert getattr(caught.value, "code", 401) == 401
        getattr(caught.value, "close", bool)()
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        ask(port, "/etc/passwd", "0123456789abcdef")
    caught.value.close()
    assert not (run / "metrics.prom").exists()
    sink.close()
    with pytest.raises(urllib.error.URLError):
        ask(port)


def test_prometheus_slow_client_delays_no_others_and_no_job_end(run):
    pytest.importorskip("prometheus_client")
    sink = Prometheus(run, port=0)
    with socket.create_connection(("127.0.0.1", sink.port)) as slow:
        slow.sendall(b"GET /metrics HT")
        began = time.monotonic()
        assert "paceline_ended" in ask(sink.port)
        sink.close()
        assert time.monotonic() - began < 9, "a client has ten seconds"


def test_the_endpoint_is_on_loopback_alone(run):
    pytest.importorskip("prometheus_client")
    import psutil

    sink = Prometheus(run, port=0)
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert ("127.0.0.1", sink.port) in listening
    assert NEWEST.keys() - parsed(ask(sink.port)).keys()
    sink.close()


def files(tmp_path, text="0123456789abcdef", mode=0o600):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


# What is asked for, and what the error says: asked, found, fix.
REFUSED = {
    "beyond loopback": (lambda _: {"port": 0, "host": "0.0.0.0"}, "0.0.0.0", "could read", "token_file"),
    "a host without a port": (lambda _: {"host": "0.0.0.0"}, "host", "there is no endpoint", "write port="),
    "a token without a port": (lambda t: {"token_file": files(t)}, "token_file", "no endpoint", "write port="),
    "both": (lambda t: {"port": 0, "file": t / "a"}, "file=..., port", "a file or an endpoint", "one of them"),
    "no port": (lambda _: {"port": 70000}, "port=70000", "0 to 65535", "port=9400"),
    "no token": (lambda t: {"port": 0, "token_file": t / "no"}, "no", "No such file", "write a file"),
    "a short token": (lambda t: {"port": 0, "token_file": files(t, "abc")}, "token", "3 characters", "16 printable"),
    "a token of two words": (lambda t: {"port": 0, "token_file": files(t, "a b" * 9)}, "token", "no header", "16"),
    "no such host": (lambda t: {"port": 0, "host": "::ffff", "token_file": files(t)}, "::ffff", "", "an address"),
    "open to others": (lambda t: {"port": 0, "token_file": files(t, mode=0o644)}, "token", "others can", "chmod 600"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_prometheus_can_not_do_is_refused(case, run, tmp_path):
    pytest.importorskip("prometheus_client")
    options, asked, found, fix = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        Prometheus(run, **options(tmp_path))
    assert asked in caught.value.asked
    assert found in caught.value.found
    assert fix in caught.value.fix


def test_an_address_of_ipv6(run):
    pytest.importorskip("prometheus_client")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    sink = Prometheus(run, port=0, host="::1")
    with socket.create_connection(("::1", sink.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.0 200")
    sink.close()


def test_paths_may_be_text(run, tmp_path):
    pytest.importorskip("prometheus_client")
    Prometheus(run, file=str(tmp_path / "a.prom")).close()
    assert (tmp_path / "a.prom").exists()
    Prometheus(run, port=0, token_file=str(files(tmp_path))).close()


def test_a_port_that_is_taken_is_refused(run):
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"Address already in use\n  fix: choose a free port"):
            Prometheus(run, port=taken.getsockname()[1])


# All

PACKAGES = {
    MLflow: ("mlflow", "mlflow"),
    OpenTelemetry: ("opentelemetry.sdk.metrics", "opentelemetry"),
    Prometheus: ("prometheus_client", "prometheus"),
    TensorBoard: ("torch.utils.tensorboard", "tensorboard"),
    WandB: ("wandb", "wandb"),
}


@pytest.mark.parametrize("sink", ALL)
def test_without_its_package_it_says_what_to_install(sink, run, monkeypatch):
    package, extra = PACKAGES[sink]
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=re.escape(f"pip install 'paceline[{extra}]'")):
        sink(run)


def test_wandb_without_a_key_says_what_to_do(run, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="WANDB_MODE=offline"):
        WandB(run)


def test_opentelemetry_without_an_endpoint_says_what_to_do(run, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with pytest.raises(UsageError, match="set OTEL_EXPORTER_OTLP_ENDPOINT"):
        OpenTelemetry(run)
