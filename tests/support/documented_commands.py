"""The commands that README.md and docs/*.md show: in code blocks, in tables and in running text."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The first page that shows a command or an option is the one that it belongs to.
_FIRST = [ROOT / "README.md", ROOT / "docs" / "features.md"]
_DOCS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path not in _FIRST]
PAGES = [*_FIRST, *_DOCS, *sorted((ROOT / "examples").glob("*/README.md"))]
PROGRAMS = (
    "paceline",
    "scripts/bench",
    "python",
    "torchrun",
    "mpirun",
    "srun",
    "make",
    "pip",
    "kubectl",
    "ssh",
    "sbatch",
)
_OTHER_LANGUAGES = ("python", "json", "toml")


@dataclass(frozen=True)
class Shown:
    """A command, or an option such as `--plan tensor=2`, as a page shows it."""

    text: str
    page: str

    @property
    def words(self) -> list[str]:
        """Its words, without prompt and remark."""
        return shlex.split(self.text)

    @property
    def own(self) -> list[str]:
        """The words from `paceline` on; none where it is not among them."""
        return self.words[self.words.index("paceline") + 1 :] if "paceline" in self.words else []


def shown() -> list[Shown]:
    """Every command and option of every page, each once."""
    found: dict[str, Shown] = {}
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for text in [*_in_blocks(page.read_text()), *_in_spans(page.read_text())]:
            found.setdefault(text, Shown(text, name))
    return list(found.values())


def _in_blocks(text: str) -> list[str]:
    """The commands of the code blocks, a line each."""
    found = []
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        if language in _OTHER_LANGUAGES:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            found += [command for part in re.split(r"&&|\|", line) if (command := _command(part))]
    return found


def _command(line: str) -> str:
    """The command of a line, or "": what a program printed is none."""
    bare = re.sub(r"^\s*(\$ |- run: )?", "", line)
    bare = re.sub(r"\s{2,}#.*| > \S+.*", "", bare).strip()
    is_output = bare.split(" ")[0].endswith(":") or re.match(r"paceline [\w ]+: ", bare)
    return bare if bare.split(" ")[0] in PROGRAMS and not is_output else ""


def _in_spans(text: str) -> list[str]:
    """The commands and options that stand between single backquotes."""
    without_blocks = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = [span.split(" | ")[0].strip() for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", without_blocks)]
    commands = [span for span in spans if span.split(" ")[0] in PROGRAMS and " " in span]
    return [*commands, *(span for span in spans if re.match(r"--?[a-zA-Z]", span))]
