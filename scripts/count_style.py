"""Count what makes Python code hard to read, in this project or in another one's folder.

scripts/count_style.py                          a table of src/paceline
scripts/count_style.py FOLDER...                a table with a column for each folder
scripts/count_style.py --list fragments [PATH]  where they are; also: vague, alone, questions, nested, twice, short
scripts/count_style.py --check                  exit with 1 where a limit is exceeded: part of scripts/check
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "paceline"
SHORT_FILE = 60  # lines
LONG_FILE = 600
MAX_PARAMETERS = 6
LEAST_WORDS = 3  # of a description

# Names that say nothing about the value, as they are bound: variables, parameters, attributes, functions and classes.
VAGUE_NAMES = frozenset(
    """
    anything both done each either everything given got held here how it kept left made mine obj one ones
    other others ours own rest something stuff such taken temp that their theirs there these thing things this those
    tmp wanted what where whole why
    """.split()  # noqa: SIM905 - easier to read than forty quoted strings
)

ENTRY = re.compile(r"^(?P<indent> +)\*{0,2}(?P<name>[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \((?P<type>.*?)\))?: (?P<text>.*)$")
SECTION = re.compile(
    r"^(?P<indent> *)(?P<title>Args|Attributes|Returns|Yields|Raises|Examples|Note|Notes|See Also):\s*$"
)
DESCRIBED = ("Args", "Attributes", "Returns", "Yields")
PRONOUN = r"it|its|them|they|this|that|these|those|one|ones|his|their|theirs|some|none|all|both|each|others|the other"
# A text that is only a pronoun, a possessive without its noun, or "the rest".
OF_IT = r"(?: of (?:it|them|these|those|this))?"
NO_NOUN = re.compile(rf"(?:(?:{PRONOUN}){OF_IT}|.*\w(?:'s|s')|the rest(?: of .*)?)", re.IGNORECASE)
QUESTION = re.compile(r"(?:Return|Yield|Say|Tell|Get|Find out|Decide|Check)s? (?:what|how|where|which|why|who)\b")
ALONE = re.compile(r"\b(?:leaves?|left) (?:\w+ )*alone\b|\b(?<!stand )(?<!stands )alone\b")


@dataclass(frozen=True)
class Place:
    """A finding: the file, the line, and the text that was found there."""

    path: Path
    line: int
    text: str


@dataclass
class Count:
    """The counts of one folder.

    Attributes:
        lines (list[int]): the number of lines of each file.
        functions (list[int]): the number of lines of each function, without its docstring.
        code (int): the number of lines with code.
        comments (int): the number of comments.
        docstring_lines (int): the number of lines of docstrings.
        characters (int): the number of characters of the lines with code, without indentation.
        names (int): the number of places where a name is bound.
        entries (int): the number of descriptions of arguments, attributes and returned values.
        nodes (Counter[str]): how often each kind of syntax occurs.
        found (dict[str, list[Place]]): the places of each kind of finding.
    """

    lines: list[int] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    code: int = 0
    comments: int = 0
    docstring_lines: int = 0
    characters: int = 0
    names: int = 0
    entries: int = 0
    nodes: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[Place]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


KINDS = ("fragments", "vague", "alone", "questions", "nested", "twice", "short")


def entries_of(docstring: str) -> Iterator[tuple[int, str, str]]:
    """Yield each description of a docstring's sections: the line's number from 0, the name, and the first sentence."""
    section = ""
    section_indent = entry_indent = -1
    lines = docstring.splitlines()
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        title = SECTION.match(line)
        if title:
            section, section_indent, entry_indent = title["title"], len(title["indent"]), -1
            continue
        if not line.strip() or section not in DESCRIBED:
            continue
        if indent <= section_indent:
            section = ""
            continue
        if entry_indent < 0:
            entry_indent = indent
        entry = ENTRY.match(line)
        if entry and indent == entry_indent:
            following = [entry["text"]]
            for later in lines[number + 1 :]:
                if not later.strip() or len(later) - len(later.lstrip()) <= entry_indent:
                    break
                following.append(later.strip())
            yield number, entry["name"], first_sentence(" ".join(following))


def first_sentence(text: str) -> str:
    """Return the text up to its first full stop, colon or semicolon that ends a clause."""
    return re.split(r"[.;:](?:\s|$)", text.strip(), maxsplit=1)[0].strip()


def is_fragment(text: str) -> bool:
    """Return True where a description has less than three words, or no noun of its own."""
    words = re.findall(r"[\w'`.-]+", text)
    return len(words) < LEAST_WORDS or NO_NOUN.fullmatch(text) is not None


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that the code binds, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)


def count_tree(count: Count, path: Path, tree: ast.AST) -> None:
    """Count the syntax of one file."""
    for node in ast.walk(tree):
        count.nodes[type(node).__name__] += 1
        if isinstance(node, COMPREHENSIONS):
            count.nodes["comprehension"] += 1
            inner = (child for child in ast.walk(node) if child is not node and isinstance(child, COMPREHENSIONS))
            if len(node.generators) > 1 or next(inner, None) is not None:
                count.found["nested"].append(Place(path, node.lineno, ast.unparse(node)))
        if isinstance(node, ast.Name) and node.id == "Any":
            count.nodes["Any"] += 1
        if isinstance(node, Documented):
            count_docstring(count, path, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if len([one for one in parameters if one.arg not in ("self", "cls")]) > MAX_PARAMETERS:
                count.nodes["many parameters"] += 1
            docstring = ast.get_docstring(node, clean=False)
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            count.functions.append(length - (len(docstring.splitlines()) if docstring else 0))
    for name, line in bound_names(tree):
        count.names += 1
        if name.strip("_").lower() in VAGUE_NAMES:
            count.found["vague"].append(Place(path, line, name))


def count_docstring(count: Count, path: Path, node: Documented) -> None:
    """Count one docstring's lines, descriptions and findings."""
    docstring = ast.get_docstring(node, clean=False)
    if docstring is None:
        return
    begin = node.body[0].lineno
    count.docstring_lines += len(docstring.splitlines())
    for number, name, text in entries_of(docstring):
        count.entries += 1
        if is_fragment(text):
            count.found["fragments"].append(Place(path, begin + number, f"{name}: {text}"))
    if QUESTION.match(docstring.strip()):
        count.found["questions"].append(Place(path, begin, docstring.strip().splitlines()[0]))


def count_text(count: Count, path: Path, text: str) -> None:
    """Count one file's lines of code and comments."""
    code = set()
    prose: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            count.comments += 1
            prose.append((token.start[0], token.string))
        elif token.type == tokenize.STRING:
            is_prose = token.string.startswith('"""')
            if is_prose:
                prose += list(enumerate(token.string.splitlines(), token.start[0]))
            else:
                code.update(range(token.start[0], token.end[0] + 1))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    count.lines.append(len(lines))
    count.code += len(code)
    count.characters += sum(len(lines[number - 1].strip()) for number in code if number <= len(lines))
    for line, words in prose:
        if ALONE.search(words):
            count.found["alone"].append(Place(path, line, words.strip()))
    if len(lines) < SHORT_FILE and path.name != "__init__.py":
        count.found["short"].append(Place(path, len(lines), f"{len(lines)} lines"))


def count_folder(folder: Path) -> Count:
    """Count all Python files below a folder, or the one file that `folder` is."""
    count = Count()
    stems: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
        text = path.read_text()
        count_text(count, path, text)
        count_tree(count, path, ast.parse(text))
        if path.name != "__init__.py":
            stems.setdefault(path.stem, []).append(path)
    for stem, paths in stems.items():
        if len(paths) > 1:
            count.found["twice"] += [Place(path, 1, stem) for path in paths]
    return count


def per(number: int, of: int, unit: int) -> float:
    """Return a number for each `unit` of `of`, or zero where there are none."""
    return number / of * unit if of else 0.0


ROWS: dict[str, Callable[[Count], str]] = {
    "files": lambda count: f"{len(count.lines):,}",
    "lines": lambda count: f"{sum(count.lines):,}",
    "lines of code": lambda count: f"{count.code:,}",
    "median file, lines": lambda count: f"{statistics.median(count.lines):.0f}",
    "longest file, lines": lambda count: f"{max(count.lines):,}",
    f"files under {SHORT_FILE} lines": lambda count: str(len(count.found["short"])),
    f"files over {LONG_FILE} lines": lambda count: str(len([lines for lines in count.lines if lines > LONG_FILE])),
    "files with another one's name": lambda count: str(len(count.found["twice"])),
    "median function, lines": lambda count: f"{statistics.median(count.functions):.0f}",
    "longest function, lines": lambda count: str(max(count.functions)),
    "comments per 100 lines of code": lambda count: f"{per(count.comments, count.code, 100):.1f}",
    "lines of docstrings per 100": lambda count: f"{per(count.docstring_lines, count.code, 100):.1f}",
    "comprehensions per 1,000": lambda count: f"{per(count.nodes['comprehension'], count.code, 1000):.1f}",
    "nested comprehensions": lambda count: str(len(count.found["nested"])),
    "conditional expressions per 1,000": lambda count: f"{per(count.nodes['IfExp'], count.code, 1000):.1f}",
    "characters per line of code": lambda count: f"{per(count.characters, count.code, 1):.1f}",
    "vague names, % of bound names": lambda count: f"{per(len(count.found['vague']), count.names, 100):.2f}",
    "descriptions": lambda count: f"{count.entries:,}",
    "descriptions that are fragments, %": lambda count: f"{per(len(count.found['fragments']), count.entries, 100):.2f}",
    "docstrings that begin as a question": lambda count: str(len(count.found["questions"])),
    '"alone" in comments and docstrings': lambda count: str(len(count.found["alone"])),
    "`Any` per 1,000": lambda count: f"{per(count.nodes['Any'], count.code, 1000):.1f}",
    f"functions with over {MAX_PARAMETERS} parameters": lambda count: str(count.nodes["many parameters"]),
}

# The number of findings of each kind that scripts/check accepts. A limit is only ever lowered.
LIMITS: dict[str, int] = {
    "fragments": 36,
    "vague": 103,
    "alone": 0,
    "questions": 31,
    "nested": 2,
    "twice": 0,
    "short": 30,
}


def table(folders: list[Path]) -> str:
    """Return a table with a row for each count and a column for each folder."""
    counts = [count_folder(folder) for folder in folders]
    cells = [["", *(folder.name for folder in folders)]]
    for title, value in ROWS.items():
        cells.append([title, *(value(count) for count in counts)])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *numbers]))
    return "\n".join(lines)


def excesses() -> Iterator[str]:
    """Yield a line for each kind of finding of which the package has more than its limit."""
    count = count_folder(SOURCE)
    for kind, limit in LIMITS.items():
        places = count.found[kind]
        if len(places) > limit:
            yield f"{kind}: {len(places)}, and the limit is {limit}; see scripts/count_style.py --list {kind}"


def main() -> int:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[SOURCE])
    parser.add_argument("--list", choices=KINDS, help="print where the findings of this kind are")
    parser.add_argument("--check", action="store_true", help="compare with the limits")
    arguments = parser.parse_args()
    if arguments.check:
        lines = list(excesses())
        print("\n".join(lines) if lines else "style: within the limits")
        return 1 if lines else 0
    if arguments.list:
        for folder in arguments.folders:
            for place in count_folder(folder).found[arguments.list]:
                print(f"{place.path}:{place.line}: {place.text}")
        return 0
    print(table(arguments.folders))
    return 0


if __name__ == "__main__":
    sys.exit(main())
