"""Workload files with event sinks that write down what they get."""

from __future__ import annotations

import json

from support.jobs import LOOP, write_workload

RECORD = '''
import json

class Record:
    """Writes what it gets to a file, a line for each call."""

    def __init__(self, run_dir):
        self.file = open(os.environ["TEST_SINK"], "a")
        self.put({"made": run_dir and run_dir.name, "pid": os.getpid(), "rank": os.environ.get("PACELINE_RANK")})

    def put(self, row):
        self.file.write(json.dumps(row) + "\\n")
        self.file.flush()

    def write(self, event):
        assert threading.current_thread() is not threading.main_thread()
        self.put(event)

    def close(self):
        self.put({"closed": True})
        self.file.close()
'''
FAILS = """
class Fails:
    def __init__(self, run_dir):
        self.file = open(os.environ["TEST_SINK"] + "-fails", "a")

    def write(self, event):
        self.file.write(event["event"] + "\\n")
        if event["event"] == "step" and event["step"] == 3:
            raise ConnectionError("the server\\nis away")

    def close(self):
        self.file.write("closed\\n")
        self.file.close()
"""


def sink_file(folder, sinks="Record", loop=LOOP):
    """A workload file with sinks."""
    file = write_workload(folder, loop=loop)
    text = file.read_text().replace("import os,", "import threading, os,", 1)
    text = text.replace("torch.manual_seed(0)\n", f"{RECORD}\n{FAILS}\ntorch.manual_seed(0)\n", 1)
    file.write_text(text.replace("    clip_norm=1.0,\n", f"    clip_norm=1.0,\n    sinks=[{sinks}],\n"))
    return file


def received(folder):
    """What the recording sinks got: a list for each one that was made."""
    lists = []
    for line in (folder / "sink").read_text().splitlines():
        row = json.loads(line)
        if "made" in row:
            lists.append([])
        lists[-1].append(row)
    return lists
