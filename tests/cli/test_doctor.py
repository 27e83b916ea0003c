"""`paceline doctor` on this host, with faults that are really there."""
# ruff: noqa: E501 (what other programs print, a line a line)

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from paceline.cli.main import main

DOCTOR = [sys.executable, "-m", "paceline.cli.main", "doctor", "--quick", "--json"]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="injects faults as Linux has them")


def can_unshare():
    tried = shutil.which("unshare") and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    return bool(tried)


mounts = pytest.mark.skipif(not can_unshare(), reason="needs a mount namespace of its own: root and unshare")


@pytest.fixture(autouse=True)
def _known_torch(tmp_path, monkeypatch):
    """torch is imported once, in the test of the whole: here a module of that name says what is asked of it."""
    (tmp_path / "fake").mkdir()
    lines = [
        "__version__ = '2.13.0'",
        "class version: cuda = hip = None",
        "class distributed: is_available = staticmethod(lambda: True)",
    ]
    (tmp_path / "fake" / "torch.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"), prepend=os.pathsep)
    for name in ("OMP_NUM_THREADS", "MASTER_PORT", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "RANK"):
        monkeypatch.delenv(name, raising=False)


def doctor(*words, shell="", **environment):
    """The command's exit code and its findings by (level, check); `shell` goes before it."""
    command = [*DOCTOR, *words]
    if shell:
        command = ["sh", "-c", f'{shell} exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    return done.returncode, {(one["level"], one["check"]): one for one in answer["findings"]}


def test_few_open_files():
    code, findings = doctor(shell="ulimit -n 256;")
    assert code == 1
    assert "256" in findings["error", "open files"]["found"]
    assert "ulimit -n" in findings["error", "open files"]["fix"]


def test_settings_that_name_nothing():
    code, findings = doctor(
        GLOO_SOCKET_IFNAME="nope0", CUDA_VISIBLE_DEVICES="9", OMP_NUM_THREADS="0", LD_PRELOAD="/nowhere/lib.so"
    )
    assert code == 1
    assert {
        ("error", "GLOO_SOCKET_IFNAME"),
        ("error", "CUDA_VISIBLE_DEVICES"),
        ("warning", "OMP_NUM_THREADS"),
        ("error", "LD_PRELOAD"),
    } <= set(findings)


def test_a_taken_port_and_a_master_that_nobody_knows():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, findings = doctor(MASTER_PORT=port, MASTER_ADDR="no-such-host.invalid")
    assert code == 1
    assert f"end process {os.getpid()}" in findings["error", "port"]["fix"]
    assert ("error", "MASTER_ADDR") in findings


@linux
@mounts
def test_a_read_only_run_directory(tmp_path):
    (tmp_path / "ro").mkdir()
    command = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o ro none {tmp_path}/ro; exec "$@"', "sh", *DOCTOR]
    done = subprocess.run([*command, "--runs", f"{tmp_path}/ro/runs"], capture_output=True, text=True)
    findings = {(one["level"], one["check"]): one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert "read-only" in findings["error", "run directory"]["found"]


@linux
@mounts
def test_a_tiny_run_directory_a_small_shm_and_a_stale_hosts_file(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n192.0.2.77 {socket.gethostname()}\n")
    mount = (
        f"mount -t tmpfs -o size=2m,nr_inodes=100 none {tmp_path}/tiny; mount -t tmpfs -o size=64m,noexec none /dev/shm;"
        f" mount --bind {tmp_path}/hosts /etc/hosts;"
    )
    command = ["unshare", "-m", "sh", "-c", f'{mount} exec "$@"', "sh", *DOCTOR, "--runs", f"{tmp_path}/tiny"]
    done = subprocess.run(command, capture_output=True, text=True)
    findings = {(one["level"], one["check"]): one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert "2 MiB free" in findings["error", "run directory"]["found"]
    assert "--shm-size" in findings["error", "/dev/shm"]["fix"]
    assert "noexec" in findings["warning", "/dev/shm"]["found"]
    assert "192.0.2.77" in findings["error", "own name"]["found"]


@linux
@mounts
def test_a_run_directory_that_can_hold_no_more_files(tmp_path):
    (tmp_path / "full").mkdir()
    fill = f"mount -t tmpfs -o nr_inodes=3 none {tmp_path}/full; touch {tmp_path}/full/a {tmp_path}/full/b;"
    command = ["unshare", "-m", "sh", "-c", f'{fill} exec "$@"', "sh", *DOCTOR, "--runs", f"{tmp_path}/full"]
    done = subprocess.run(command, capture_output=True, text=True)
    findings = {(one["level"], one["check"]): one for one in json.loads(done.stdout)["findings"]}
    assert "inodes" in findings["error", "run directory"]["found"]


@linux
def test_a_driver_whose_accelerators_torch_can_not_use(tmp_path):
    topology = "\\tGPU0\\tGPU1\\tGPU2\\tCPU Affinity\\nGPU0\\tX\\tNV18\\tSYS\\t0-7\\nGPU1\\tNV18\\tX\\tSYS\\t0-7\\nGPU2\\tSYS\\tSYS\\tX\\t8-15\\n"
    devices = "A, 1000, 1, GPU-1, 550.1\\nA, 1000, 1, GPU-2, 550.1\\nB, 900, 1, GPU-3, 550.1\\n"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncase \"$1\" in topo) printf '{topology}';; --q*) printf '{devices}';; esac\n")
    program.chmod(0o755)
    code, findings = doctor(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert code == 1
    assert "without CUDA" in findings["error", "driver"]["found"]
    assert "2x A" in findings["warning", "accelerators"]["found"]
    assert "1 of 3 pairs" in findings["warning", "links"]["found"]


def test_no_torch_and_a_broken_torch(tmp_path):
    (tmp_path / "fake" / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    code, findings = doctor()
    assert code == 1
    assert "libcudart.so.12" in findings["error", "torch"]["found"]


@pytest.mark.slow
def test_this_host_and_the_table(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "doctor", "--runs", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("1 host: ")
    assert any(line.startswith("ok") and "torch" in line for line in lines)
    assert any("written through" in line for line in lines)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_fleet_of_this_host_twice(tmp_path):
    command = [*DOCTOR, "-H", "localhost:1,127.0.0.1:1", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert set(answer["hosts"]) == {"localhost", "127.0.0.1"}
    checks = {(one["level"], one["check"]) for one in answer["findings"]}
    assert {("error", "hosts"), ("ok", "reach"), ("ok", "run directory"), ("ok", "torch"), ("ok", "clock")} <= checks
    assert "listens" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["fake"]


@pytest.mark.slow
@linux
def test_a_host_whose_key_ssh_does_not_know(tmp_path):
    program = tmp_path / "ssh"
    program.write_text(
        "#!/bin/sh\necho 'No ED25519 host key is known for h9.' >&2\necho 'Host key verification failed.' >&2\nexit 255\n"
    )
    program.chmod(0o755)
    code, findings = doctor("-H", "localhost,h9", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert code == 1
    assert findings["error", "ssh"]["host"] == "h9"
    assert "ssh-keyscan" in findings["error", "ssh"]["fix"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--port", "0"], "ports go from 1"),
        (["-H", "h1:x"], "slots"),
        (["--hosts=-oProxyCommand=x"], "no host's name"),
        (["--hostfile", "nowhere.txt"], "can't read the hosts of nowhere.txt"),
    ],
)
def test_a_request_that_can_not_be_met(words, part, capsys):
    assert main(["doctor", *words]) == 2
    assert part in capsys.readouterr().err


def test_no_ssh_for_a_fleet(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["doctor", "-H", "h1,h2"]) == 2
    assert "there is no such program" in capsys.readouterr().err
