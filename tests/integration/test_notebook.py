"""Real notebooks in a real kernel: `paceline.launch` on two ranks, with live progress, and nothing left behind."""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from support.jobs import leftovers, marked, wait_for

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook" / "launch.ipynb"


class Watched(NotebookClient):
    """A client that keeps the progress lines as they came: of a display that changes, a notebook has only the last."""

    def process_message(self, message, cell, cell_index):
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.lines.append((message["msg_type"], message["content"]["data"]["text/plain"]))
        return super().process_message(message, cell, cell_index)


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Executes a notebook in a kernel of its own, and returns its progress lines; then nothing may be left."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")

    def run(notebook):
        resources = {"metadata": {"path": str(tmp_path)}}
        client = Watched(notebook, timeout=200, kernel_name="python3", resources=resources)
        client.lines = []
        try:
            client.execute(env=marked(tmp_path, {}))
        finally:
            assert wait_for(lambda: not leftovers(tmp_path)), leftovers(tmp_path)
        return client.lines

    return run


def cells(*sources):
    return new_notebook(cells=[new_code_cell(source) for source in sources])


def streams(cell):
    return "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")


def test_the_example_runs_on_two_ranks_with_live_progress(execute):
    notebook = nbformat.read(EXAMPLE, 4)
    lines = execute(notebook)
    declared, result, own = (cell for cell in notebook.cells[3:] if cell.cell_type == "code")
    checked = "[0] paceline: first step checked: equal to one process\n"
    assert sorted(streams(declared).splitlines(True)) == ["[0] 2 ranks took 192 steps\n", checked]
    (progress,) = [output for output in declared.outputs if output.output_type == "display_data"]
    assert re.match(r"step 192/192  loss [\d.]+  [\d.]+ samples/s  ", progress.data["text/plain"])
    first, last = map(float, re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last; 4 tensors", streams(result))[0])
    assert last < first / 2
    assert checked in streams(own)
    assert re.search(r"^loss 0\.\d\d after 128 steps\n", streams(own).replace(checked, ""))
    kinds = [kind for kind, _ in lines]
    assert kinds.count("display_data") == 2, "one line for each launch"
    assert kinds.count("update_display_data") >= 2, "and it changes while the cell runs"


FAILS = """import torch, paceline

def train(value):
    paceline.init()
    total = paceline.all_reduce(torch.ones(1))
    if paceline.rank() == 1:
        raise ValueError("no such thing")  # the cell's own line
    paceline.all_reduce(total)

paceline.launch(train, 1, ranks=2)
"""


def test_an_error_is_shown_once_with_the_lines_of_the_cell(execute):
    notebook = cells("value = 1", FAILS)
    with pytest.raises(CellExecutionError):
        execute(notebook)
    failing = notebook.cells[1]
    (error,) = [output for output in failing.outputs if output.output_type == "error"]
    shown = "\n".join(error.traceback)
    assert error.ename == "RankFailedError"
    assert shown.count("ValueError: no such thing") == 1
    assert 'Cell In[2], line 7, in train\n    raise ValueError("no such thing")  # the cell\'s own line' in shown
    assert "rank 1 failed first" in shown
    assert "/paceline/" not in shown
    assert "ipykernel" not in shown
    assert "no such thing" not in streams(failing)


AGAIN = """big = torch.ones(1000)

def total():
    paceline.init()
    return paceline.rank(), big.sum()

print(paceline.launch(total, ranks=2))
"""


def test_the_kernel_goes_on_after_an_error_and_keeps_its_objects(execute):
    failing = FAILS.replace("paceline.launch", "try:\n    paceline.launch")
    failing += "except paceline.PacelineError as error:\n    print(error.rank)"
    notebook = cells(failing, AGAIN)
    execute(notebook)
    assert [streams(cell) for cell in notebook.cells] == ["1\n", "(0, tensor(1000.))\n"]


WAITS = """
import os, time, paceline

def wait():
    paceline.init()
    open(f"rank{paceline.rank()}", "w").write(str(os.getpid()))
    time.sleep(600)

open("kernel", "w").write(str(os.getpid()))
paceline.launch(wait, ranks=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_an_interrupted_or_killed_kernel_ends_its_ranks(tmp_path, execute, number):
    def end():
        assert wait_for(lambda: all((tmp_path / f"rank{rank}").exists() for rank in (0, 1)), 60)
        wait_for(lambda: False, 0.5)
        psutil.Process(int((tmp_path / "kernel").read_text())).send_signal(number)

    notebook = cells(WAITS)
    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(Exception, match=r"KeyboardInterrupt|Kernel died"):
        execute(notebook)
    thread.join()
    if number == signal.SIGINT:
        (error,) = [output for output in notebook.cells[0].outputs if output.output_type == "error"]
        assert error.ename == "KeyboardInterrupt"
        assert json.dumps(notebook).count("stopping") == 1
