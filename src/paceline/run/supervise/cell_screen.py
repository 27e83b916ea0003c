"""Show a job in the output of a notebook's cell: ranks' lines, and one line of progress that changes in place."""

from __future__ import annotations

import sys
from typing import Any

from paceline.run.supervise.progress import Screen

EVERY_S = 0.25  # between two changes of the line: each is a message to the notebook's page


def notebook_shell() -> Any | None:
    """Return IPython's shell, if this process is the kernel of a notebook; None: it is not."""
    ipython = sys.modules.get("IPython")  # not imported: without it there is no notebook
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


class CellScreen(Screen):
    """Shows a job in a cell. The line is a display of its own, which notebooks change in place, and keep when saved."""

    def __init__(self) -> None:
        super().__init__(sys.stdout, sys.stdout, EVERY_S)
        self.handle: Any = None

    def show_progress(self, line: str, now_s: float) -> None:
        """Change the line."""
        if line == self.shown or now_s - self.printed_at_s < self.every_s:
            return
        self.shown = line
        self.printed_at_s = now_s
        if self.handle is None:
            import IPython.display

            display: Any = IPython.display.display
            self.handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": line}, raw=True)


def label_of(shell: Any, name: str) -> str:
    """Return what a notebook calls code that a traceback knows by `name`: `Cell In[3]`; "" for a file."""
    compiled = getattr(shell, "compile", None)
    label = getattr(compiled, "format_code_name", lambda name: None)(name)
    return " ".join(label) if label else ""
