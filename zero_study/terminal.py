"""Format text for readers: numbers, counts and lists of names, tables, and lines that fit the terminal.

`printable` puts a text from outside this program (such as a name or a key of a user's file) on one line. Use it
where such a text becomes a part of a message or of a written file. `guarded_output` is the safety net behind it: every
command runs within it, so that a forgotten control character is printed as its escape code. `mask` hides tokens and
passwords in such texts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsFloat, cast

GIB = 1 << 30

# Text that is not broken at its spaces: a JSON snippet to paste, or a command in backticks.
_WHOLE = re.compile(
    r"""("[^"\s]+": )?\{[^{}]{1,60}\}|\[[^\[\]]{1,40}\]|"[^"\s]+": [^\s{]+|`[^`]{1,60}`|"""
    r"""`(zero-study|python|pip|torchrun|accelerate|deepspeed|make|export) [^`]+`"""
)
_KEPT_SPACE = "\N{NO-BREAK SPACE}"  # textwrap does not break lines here

DEFAULT_WIDTH = 80
_ERROR_INDENT = "  "  # of the lines of an error after the first
NARROWEST = 40
WRAPPED_FROM = 16  # characters; shorter cells of a table are not wrapped

_NUMBER = re.compile(r"[-+\N{MINUS SIGN}.<(]*\d[-+\d.,:e\N{MINUS SIGN}]*( ?(%|x|GiB|MiB|KiB|s))?\)?")


def width(stream: int = 1) -> int:
    """Return the number of columns of the terminal, or 80 if it is unknown. The variable COLUMNS overrides it.

    `stream` is the number of the stream that is written to: 1 for standard output, 2 for standard error.
    """
    columns = shutil.get_terminal_size((0, 0)).columns
    if stream != 1 and not os.environ.get("COLUMNS"):
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(stream).columns
    return max(NARROWEST, columns or DEFAULT_WIDTH)


def wrap(text: str, indent: str = "", later_indent: str | None = None, columns: int | None = None) -> str:
    """Return text wrapped to the width of the terminal. Words, paths and JSON snippets are not broken.

    `indent` begins the first line, and `later_indent` begins the others (by default the same). Line breaks in `text`
    are kept.
    """
    later = indent if later_indent is None else later_indent
    lines: list[str] = []
    for line in text.split("\n"):
        begin = later if lines else indent
        lines += textwrap.wrap(
            _WHOLE.sub(lambda snippet: snippet[0].replace(" ", _KEPT_SPACE), line),
            columns or width(),
            initial_indent=begin,
            subsequent_indent=later,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines).replace(_KEPT_SPACE, " ")


def print_error(message: object, program: str = "zero-study") -> None:
    """Print an error to standard error, wrapped to the width of the terminal.

    All errors for people are printed here. Commands in backticks stay on one line, so that they can be copied.
    """
    line = f"{program}: {' '.join(str(message).splitlines())}"
    print(wrap(line, later_indent=_ERROR_INDENT, columns=width(2)), file=sys.stderr, flush=True)


def last_error(text: str) -> str:
    """Return the last error that `print_error` wrote to a program's standard error, on one line.

    If there is none, return the last line.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    begin = max((number for number, line in enumerate(lines) if not line.startswith(_ERROR_INDENT)), default=0)
    return " ".join(line.strip() for line in lines[begin:])


def command(words: Iterable[str], indent: str = "", columns: int | None = None) -> str:
    """Return a shell command, broken into lines that fit the terminal and can be copied.

    Words are quoted where the shell needs it. A command that is too long continues on lines that are indented further,
    with a backslash at the end of each line but the last.
    """
    lines, line = list[str](), indent
    for part in _parts(words):
        is_first = line.strip() == ""
        if not is_first and len(line) + len(part) + len(" \\") >= (columns or width()):
            lines.append(f"{line} \\")
            line = f"{indent}    {part}"
        else:
            line += part if is_first else f" {part}"
    return "\n".join([*lines, line])


def _parts(words: Iterable[str]) -> Iterator[str]:
    """Yield the quoted words of a command. An option is in one part with its value."""
    option = ""
    for word in map(shlex.quote, words):
        if word.startswith("-"):
            if option:
                yield option
            option = word
        else:
            yield f"{option} {word}".lstrip()
            option = ""
    if option:
        yield option


def printable(text: str) -> str:
    """Return a text from outside this program on one line. Control characters are shown as escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


# ---------------------------------------------------------------- secrets

# A number after "token", as in max_tokens: 9, is no secret.
_NAMES = (
    r"(?:(?:api|access|account|private|secret|encryption)[_ -]?key|secret|passw(?:or)?d|pass(?:phrase)?|pwd|credential|"
    r"cookie|token(?!s?[\"']?\s*[=:]?\s*\d[\d.,]*(?![\w:-])))s?"
)
_SECRETS = (
    re.compile(
        r"\b(hf_|sk-(?:ant-|proj-)?|gh[oprsu]_|github_pat_|glpat-|xox[abps]-|A[KS]IA|AIza|nvapi-|npm_|dckr_pat_|eyJ|wandb_v1_)"
        r"[\w\-.]{8,}"
    ),
    # A flag such as --password, or a variable: its value may be short. A quoted value ends with its quote.
    re.compile(
        rf"(?i)((?:--?[\w-]*{_NAMES}(?:\s+|=)|\b\w*{_NAMES}[\"']?\s*[=:]\s*)(?:b|\$)?)(?:\"[^\"]+\"|'[^']+'|(?![\s\"'])[^\s\"']+)"
    ),
    re.compile(r"(://[^/\s:@]*:)[^\s/]+(?=@)"),
    re.compile(r"(://)[^/\s:@]{16,}(?=@)"),
    re.compile(r"(?i)((?:bearer|authorization: basic)\s+)\S+"),
)


def mask(text: str) -> str:
    """Return a text without tokens and passwords."""
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return text


def masked(value: Any) -> Any:
    """Return a value of JSON with masked texts, at each depth."""
    if isinstance(value, dict):
        return {name: masked(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each) for each in value]
    return mask(value) if isinstance(value, str) else value


# ---------------------------------------------------------------- counts and numbers


def count(number: float, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 run", "2 runs". `plural` is needed if it is not the noun with an "s"."""
    return f"{number:.0f} {noun if number == 1 else plural or f'{noun}s'}"


def names(words: Sequence[str], most: int = 3) -> str:
    """Return the first elements of a list, and how many more there are: "a, b, c and 4 more"."""
    left_out = len(words) - most
    return ", ".join(words[:most]) + (f" and {left_out} more" if left_out > 0 else "")


def listed(words: Sequence[str]) -> str:
    """Join words as in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def gib(num_bytes: SupportsFloat | None, digits: int = 2) -> str:
    """Return a number of bytes as text in GiB, without the unit. None gives an empty string."""
    return "" if num_bytes is None else f"{float(num_bytes) / GIB:.{digits}f}"


def bytes_text(num_bytes: float) -> str:
    """Return a number of bytes with three digits and a suitable unit: GiB, MiB or KiB."""
    units = (("GiB", GIB), ("MiB", 2**20))
    name, size = next((unit for unit in units if num_bytes >= unit[1]), ("KiB", 2**10))
    return f"{significant(num_bytes / size)} {name}"


def significant(value: float, digits: int = 3) -> str:
    """Return a number as text with `digits` significant digits, such as "12.3". Larger numbers become whole numbers.

    Only numbers below 0.001 are written with a power of ten.
    """
    if value != 0 and abs(value) < 1e-3:
        return scientific(value)
    text = f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"
    return text.replace("-", "\N{MINUS SIGN}")


def signed_percent(relative: float) -> str:
    """Return a relative difference in percent with its sign and three decimals, but without the "%".

    A difference that would round to zero is written with a power of ten.
    """
    percent = 100 * relative
    if 0 < abs(percent) < 5e-4:
        return f"{'+' if percent > 0 else '-'}{scientific(abs(percent))}"
    return f"{percent:+z.3f}"


def percent(share: float, digits: int = 2) -> str:
    """Return a share as text such as "12 %", with `digits` significant digits. From 100 % on, it has at least three."""
    value = 100 * share
    if 0 < abs(value) < 5e-4:
        return f"{scientific(value)} %"
    return f"{value:.{digits if abs(value) < 99.5 else max(digits, 3)}g} %"


def whole_percent(share: float) -> str:
    """Return a share as a whole percentage, such as "12 %"."""
    return f"{100 * share:.0f} %"


def scientific(value: float, digits: int = 2) -> str:
    """Return a number as text with a power of ten, such as "2.1e-6".

    Superscripts would be too small on a phone.
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def difference(relative: float | None) -> str:
    """Return a relative difference as text with two digits and a power of ten, such as "2.1e-06".

    None gives "unknown".
    """
    return "unknown" if relative is None else f"{relative:.1e}"


# ---------------------------------------------------------------- tables


class _Column:
    """A column of a table: its cells, the first of which is the head, and the side to which they are aligned."""

    def __init__(self, cells: Sequence[str], side: str, is_first: bool) -> None:
        self.cells = cells
        is_number = not is_first and all(map(_NUMBER.fullmatch, filter(None, cells[1:])))
        self.side = side or (">" if is_number else "<")
        self.size = max(map(_size, cells))
        longest_word = max((len(word) for cell in cells for word in cell.split()), default=0)
        size_of_rows = max(map(_size, cells[1:]), default=0)
        self.least_size = max(size_of_rows if size_of_rows <= WRAPPED_FROM else 0, longest_word)


def _size(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    columns: int | None = None,
    sides: str = "",
    has_ruler: bool = False,
) -> list[str]:
    """Return the lines of a table that fits the terminal. Columns that do not fit are moved to further tables.

    `sides` has "<" or ">" for each column, which is aligned to the left or to the right. By default, columns of
    numbers are aligned to the right, apart from the first column. With `has_ruler`, a line separates the head from the
    rows. A line break in a cell is kept.
    """
    width_of_all = columns or width()
    cells = zip(*([str(cell) for cell in row] for row in (head, *rows)), strict=True)
    every = [_Column(column, sides[at : at + 1], is_first=at == 0) for at, column in enumerate(cells)]
    lines: list[str] = []
    for group in _groups(every, width_of_all):
        lines += [*([""] if lines else []), *_aligned(group, width_of_all, has_ruler)]
    return lines


def _groups(columns: list[_Column], width: int) -> Iterator[list[_Column]]:
    """Divide columns into groups that fit the width. The first column is repeated in every group."""
    first, *others = columns
    group = [first]
    for column in others:
        if len(group) > 1 and _widths([*group, column], width) is None:
            yield group
            group = [first]
        group.append(column)
    yield group


def _aligned(columns: Sequence[_Column], width: int, has_ruler: bool) -> list[str]:
    """Return the lines of a table. Long cells are wrapped."""
    widths = _widths(columns, width)
    if widths is None:  # a single word is too long and has to be broken
        name = min(columns[0].size, width // 2)
        widths = [name, width - 2 - name][: len(columns)]
    lines = []
    for row in zip(*(column.cells for column in columns), strict=True):
        cells = [_wrapped_cell(cell, size) for cell, size in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            padded = (f"{part:{column.side}{size}}" for part, column, size in zip(parts, columns, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
        if has_ruler:
            lines.append("  ".join("-" * size for size in widths))
            has_ruler = False
    return lines


def _wrapped_cell(cell: str, size: int) -> list[str]:
    return [part for line in cell.split("\n") for part in textwrap.wrap(line, size, break_on_hyphens=False) or [""]]


def _widths(columns: Sequence[_Column], width: int) -> list[int] | None:
    """Return the width of each column. The widest columns are narrowed until all fit.

    None if they fit only with broken words.
    """
    widths = [column.size for column in columns]
    available = width - 2 * (len(widths) - 1)
    while sum(widths) > available:
        slack = [size - column.least_size for size, column in zip(widths, columns, strict=True)]
        if not any(slack):
            return None
        widest = max(range(len(widths)), key=lambda place: (slack[place] > 0, widths[place]))
        widths[widest] -= 1
    return widths


# ---------------------------------------------------------------- Markdown


def escape_markdown(text: Any) -> str:
    """Return text that is safe in a cell of a Markdown table.

    The text is on one line. The characters that would end the cell or begin HTML are escaped, and so are control
    characters, such as those that reverse the direction of the text.
    """
    line = " ".join(str(text).split())
    visible = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return visible.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]], num_texts: int = 1) -> list[str]:
    """Return the lines of a Markdown table. The first `num_texts` columns are left-aligned, others right-aligned."""
    ruler = "|" + "|".join([" --- "] * num_texts + [" ---: "] * (len(head) - num_texts)) + "|"
    first, *others = ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in (head, *rows)]
    return [first, ruler, *others]


# ---------------------------------------------------------------- text from outside this program

# What a terminal acts on: control characters apart from the tab and the end of a line, other ends of lines, and
# characters that reverse the direction of the text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


STREAMS = ("standard output", "standard error")  # their names in the errors of guarded streams


class _Guarded:
    """A stream that shows control characters as their escape codes instead of writing them.

    Errors of the operating system get the name of the stream as their file name.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        # Progress bars begin what they write with a carriage return.
        begin = text[: text.startswith("\r")]
        with self._named():
            return int(self._stream.write(begin + _CONTROL.sub(lambda found: repr(found[0])[1:-1], text[len(begin) :])))

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._name
            raise


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Keep control characters out of everything that is printed in the `with` block, on stdout and on stderr.

    Standard streams that were closed before the program started become `/dev/null`. Otherwise, the next file that is
    opened would get the number of a standard stream, and output of libraries would be written to this file.
    """
    _open_closed_streams()
    streams = sys.stdout, sys.stderr
    guarded = [_Guarded(stream, name) for stream, name in zip(streams, STREAMS, strict=True)]
    sys.stdout, sys.stderr = cast(Any, guarded)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _open_closed_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def finish_output() -> None:
    """Flush the output streams. Discard what a stream does not accept, for instance because its reader has ended."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # Python would flush again when it ends, and print this error
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
