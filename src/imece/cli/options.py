"""Turns a frozen dataclass into a command line, with every mistake reported in one line.

tyro parses and prints the help. Its errors are boxes of several lines; here they become one `UserError`,
which the command line prints as "imece: ..." before it exits with status 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, TextIO, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructTypeInfo,
)

from imece.errors import UserError
from imece.observe.visible import visible

Config = TypeVar("Config")

_BOX = "│╭╮╰╯─ "  # a line of the box without these is empty
_ASCII_RULE = re.compile(r"^\s*-{8,}\s*$", re.MULTILINE)
# With line breaks where tyro wraps.
_CHOICE = re.compile(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\) ?\.")
_NARROWEST = 40  # columns in which a page of help can be read
_NAMES = re.compile(r"-[\w.-]+(?:/-[\w.-]+)+")  # all names of one option
_UNKNOWN = "Unrecognized options:"
_NO_NUMBERS = re.compile(r"Could not find valid parse for arguments: \[(.*)\]")
_MISTAKE = 2  # tyro's exit status
_GLUED = re.compile("-[A-Za-z]{2,}.*")  # read as a short option with its value: -np is -n with p
_NO_VALUE = re.compile(r"Missing value for argument '(.*)'\. Expected .*")


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    prog: str,
    description: str,
    default: Config | None = None,
    operands: str = "",
    others: Sequence[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> Config:
    """The `config_class` (a dataclass) that `argv` describes, with values from `default` where `argv` has
    none.

    `prog` is the command as typed ("imece bench"); `description` is the text above the options in --help;
    `operands` is what follows the options, not parsed here; `others` are options that the caller has taken
    out of `argv`, suggested when one is mistyped; `elsewhere` has options of other programs, each with what
    to suggest instead. --help prints and raises SystemExit(0). UserError, in one line, for anything that
    cannot be parsed, and for a ValueError from the dataclass' own __post_init__.
    """
    options = options_of(config_class)
    for word in argv:
        flag, given, value = word.partition("=")
        if given and options.get(_plain(flag)) is bool:  # tyro would take the value for an operand
            raise UserError(_needless(flag, value))
    helps = not {"-h", "--help"}.isdisjoint(argv)
    if helps and shutil.get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)  # tyro never ends below 6; this process ends in any case
    complaint, page = io.StringIO(), _Page(sys.stdout)
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(page):
            start = tyro.MISSING_NONPROP if default is None else default
            return tyro.cli(
                config_class,
                args=list(argv),
                prog=prog,
                description=description,
                default=start,
                registry=_RULES if helps else _RULES_WITHOUT_TEXTS,
            )
    except SystemExit as leaving:
        if leaving.code in (0, None):
            width = shutil.get_terminal_size().columns
            wrapped = textwrap.fill(description, width, break_on_hyphens=False)  # tyro leaves it as it is
            shown = page.getvalue().replace(description, wrapped, 1)
            print(shown.replace("[OPTIONS]", f"[OPTIONS] {operands}".rstrip(), 1), end="")
            raise
        if leaving.code != _MISTAKE:
            raise  # a signal came meanwhile
        message = _box_body(_ASCII_RULE.sub("─", complaint.getvalue()))
    except (ValueError, TypeError, OverflowError) as error:
        message = str(error)
    names = [*options, *others, "--help"]
    hint = _with_hint(one_line(message), argv, config_class, names, prog, elsewhere)
    raise UserError(hint) from None


def check_named(argv: Sequence[str], options: Sequence[str]) -> None:
    """UserError if one of these options, which name files or folders, has an empty value, as from an unset
    shell variable, or if texts are named twice, of which only the last would count: the command would then
    work on something else."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        option, given, value = word.partition("=")
        named = value if given else following
        if option in options and (not named or named.startswith("--")):
            raise UserError(f"{option} is empty: give it a name, or leave it out")
    texts = [option for word in argv if (option := word.partition("=")[0]) in ("--data", "--data.paths")]
    if len(texts) > 1:
        raise UserError(f"{texts[-1]} is given twice: give all names behind one of them")


def _optional(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Parse and show `X | None` as X, but also take "None", which overrules a file. tyro's own union shows
    {None}|INT, and lists its types when there is a mistake."""
    inner = [each for each in get_args(kind.type) if each is not NoneType]
    if NoneType not in get_args(kind.type) or len(inner) != 1:
        return None
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(inner[0], kind.markers))
    if not isinstance(spec, PrimitiveConstructorSpec) or spec.nargs != 1:
        return None
    return dataclasses.replace(
        spec,
        instance_from_str=lambda words: None if words == ["None"] else spec.instance_from_str(words),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
        choices=spec.choices and (*spec.choices, "None"),
    )


def _fields(struct: StructTypeInfo) -> StructConstructorSpec | None:
    """Fields as tyro reads them, but for --help: it has no "(default: None)", since the field's text says
    what None means, and no line breaks of the source."""
    if _asked:  # this rule was called by its own call below
        return None
    _asked.append(struct)
    try:
        spec = ConstructorRegistry.get_struct_spec(struct)
    finally:
        _asked.pop()
    if not isinstance(spec, StructConstructorSpec):
        return None
    hint = tyro.conf.arg(help_behavior_hint=_default)
    fields = [
        dataclasses.replace(
            each, type=cast(type[Any], Annotated[each.type, hint]), helptext=_filled(each.helptext)
        )
        for each in spec.fields
    ]
    return dataclasses.replace(spec, fields=tuple(fields))


def _filled(help_text: str | Callable[[], str | None] | None) -> str | Callable[[], str | None] | None:
    """Without the line breaks of the source, which tyro would keep."""

    def filled() -> str | None:
        text = help_text() if callable(help_text) else help_text
        return text and " ".join(text.split())

    return filled if help_text is not None else None


def _default(shown: str) -> str:
    return "" if shown in ("None", "", "''") else f"(default: {shown})"


def _fields_without_texts(struct: StructTypeInfo) -> StructConstructorSpec | None:
    """Where nobody asks for help: tyro would read the source for each section's text, half of its time."""
    spec = _fields(struct)
    return spec and dataclasses.replace(
        spec, fields=tuple(dataclasses.replace(each, helptext=None) for each in spec.fields)
    )


_asked: list[StructTypeInfo] = []
_RULES, _RULES_WITHOUT_TEXTS = ConstructorRegistry(), ConstructorRegistry()
for _rules, _rule in ((_RULES, _fields), (_RULES_WITHOUT_TEXTS, _fields_without_texts)):
    _rules.primitive_rule(_optional)
    _rules.struct_rule(_rule)


class _Page(io.StringIO):
    """The help text, with colours and boxes only if `stdout` would show them; tyro does not know NO_COLOR."""

    def __init__(self, stdout: TextIO) -> None:
        super().__init__()
        self._stdout = stdout

    def isatty(self) -> bool:
        return self._stdout.isatty() and not os.environ.get("NO_COLOR")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stdout.encoding


def one_line(text: str) -> str:
    """`text` without line breaks, runs of spaces or control characters: safe to print as one line."""
    return visible(" ".join(text.split()))


def _operands(config_class: type[object]) -> dict[str, str]:
    """What stands without an option, by the name that an option would have: {"--run": "RUN"}."""
    found = {}
    for name, kind in get_type_hints(config_class, include_extras=True).items():
        if tyro.conf.Positional in (extras := get_args(kind)):
            shown = (metavar for extra in extras if (metavar := getattr(extra, "metavar", None)))
            found[f"--{name}"] = next(shown, name.upper())
    return found


def options_of(config_class: type[object], prefix: str = "--") -> dict[str, Any]:
    """The long options of a dataclass, as typed, with the type of each: "--out-dir"; "--model.max-seq" for a
    nested one."""
    if not dataclasses.is_dataclass(config_class):
        raise TypeError(f"{config_class.__name__} is not a dataclass")
    options: dict[str, Any] = {}
    hints = get_type_hints(config_class, include_extras=True)
    for field in dataclasses.fields(config_class):
        name, kind = prefix + field.name.replace("_", "-"), hints[field.name]
        own, *extras = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        if tyro.conf.Positional in extras:
            continue
        if any(isinstance(extra, PrimitiveConstructorSpec) for extra in extras):
            own = str  # as it is typed
        if dataclasses.is_dataclass(own):
            options |= options_of(cast(type[object], own), f"{name}.")
        else:
            options[name] = own
        aliases = (alias for extra in extras for alias in getattr(extra, "aliases", None) or ())
        options |= dict.fromkeys(aliases, own)
    return options


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `word` probably meant, or None."""
    known = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return known[found[0]] if found else None


def _nearest_option(typed: str, names: Iterable[str]) -> str | None:
    """The option that begins with `typed` or is near it; leading dashes do not count as likeness."""
    bare = {name.removeprefix("--"): name for name in names}
    word = typed.removeprefix("--").removeprefix("no-")
    begun = [name for name in bare if len(word) > 2 and name.startswith(word)]
    return bare.get((begun[0] if len(begun) == 1 else nearest(word, bare)) or "")


def _typed(names: Sequence[str], words: Sequence[str]) -> str:
    """Of the names of one option the one that was typed, or all."""
    typed = {word.replace("_", "-") for word in words}
    return next((name for name in names if name in typed), "/".join(names))


def _of_value(message: str, words: Sequence[str]) -> str | None:
    """tyro's message about a wrong choice or a missing value, with the option in front."""
    if wrong := _CHOICE.fullmatch(message):
        value, option, listed = wrong.groups()
        choices = [each for each in re.findall(r"'([^']*)'", listed) if each != "None"]
        meant = nearest(value, choices)
        return f"{option} {value!r}: one of {', '.join(choices)}" + (
            f"; did you mean {meant}?" if meant else ""
        )
    if empty := _NO_VALUE.fullmatch(message):
        for option, word in pairwise(words):
            if option in empty[1].split("/") and re.match("-[^-]", word):
                return f"{option} has no value: one that begins with - stands behind =, {option}={word}"
        return f"{empty[1]} has no value: say one after it"
    return None


def _in_sections(typed: str, names: Sequence[str]) -> str:
    """The options of the same name in other sections, or "": --lr is --optimizer.lr."""
    last = {name: name.removeprefix("--").rpartition(".")[2] for name in (typed, *names)}
    return " or ".join(name for name in names if last[name] == last[typed])


def _box_body(box: str) -> str:
    """tyro's message: the text below the title of its box and above the next rule."""
    title, *lines = [line.strip(_BOX) for line in box.splitlines() if line.strip()] or [""]
    body: list[str] = []
    for text in lines:
        if text:
            body.append(text)
        elif body:
            break
    return " ".join(body) or title


def _with_hint(
    message: str,
    argv: Sequence[str],
    config_class: type[object],
    names: Sequence[str],
    prog: str,
    elsewhere: Mapping[str, str],
) -> str:
    """`message` with the nearest option if one does not exist, or with where to find the options."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("-") else [word])]
    message = _NAMES.sub(lambda found: _typed(found[0].split("/"), words), message)
    own_check = f"Error parsing {config_class.__name__}: "
    if message.startswith(own_check):
        return message.removeprefix(own_check)
    for typed, operand in _operands(config_class).items():
        if typed in words:
            return f"there is no option {typed}: {operand} stands without one, {prog} {operand}"
    missing = message.startswith(f"Missing from {prog}: ")
    if missing:
        named = message.partition(": ")[2].split("(required)")
        typed_as = [what.replace(",", " ").split() for what in named if what.strip()]
        lacking = [next((name for name in names if name in each), each[0]) for each in typed_as]
        message = f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing"
    message = message.removeprefix("Error parsing ")
    section, _, said = message.partition(": ")
    if said.startswith(f"{section}."):  # a section's own check names the section itself
        return said
    if told := _of_value(message, words):
        return told
    message = message.replace("invalid literal for int() with base 10:", "not a whole number:")
    message = message.replace("could not convert string to float:", "not a number:")
    for word in filter(_GLUED.fullmatch, argv):
        if message.endswith(f"number: {word[2:]!r}"):
            return f"there is no option {word.partition('=')[0]}; did you mean {word[:2]}?"
    message = _NO_NUMBERS.sub(r"not numbers with spaces between them: \1", message)
    unknown = message.startswith(_UNKNOWN)
    for word in words:
        typed = word.replace("_", "-")
        is_short = missing and re.fullmatch("-[A-Za-z]", typed) is not None
        is_option = typed.startswith("--") or is_short or f"-{typed}" in names
        if is_option and _plain(typed) not in names:
            if unknown or missing:
                message = f"there is no option {word}"
            meant = elsewhere.get(typed) or _in_sections(typed, names) or _nearest_option(typed, names)
            if meant is not None:
                return f"{message}; did you mean {meant}?"
    if message.startswith(_UNKNOWN):
        left = message.removeprefix(_UNKNOWN).strip()
        if told := _beside(left, words, options_of(config_class)):
            return told
        message = f"not expected here: {left or repr(left)}"
    return f"{message} (see {prog} --help)"


def _beside(left: str, words: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """What to do about what is `left` behind an option that takes no value, or one word of text."""
    at = next((i for i, word in enumerate(words) if word and left.startswith(word)), 0)
    flag, text = words[at - 1] if at else "", words[at - 2] if at > 1 else ""
    if options.get(flag) is bool:
        return _needless(flag, words[at])
    if text in options and {str, Path} & {options[text], *get_args(options[text])}:
        return f"not expected here: {left}; a value of several words stands in quotes: {text} '...'"
    return None


def _needless(flag: str, value: str) -> str:
    """What to do about the value of an option that takes none."""
    section, dot, name = flag.removeprefix("--").rpartition(".")
    other = _plain(flag) if name.startswith("no-") else f"--{section}{dot}no-{name}"
    is_off = flag.startswith("--") and value.lower() in ("false", "no", "off", "0")
    mend = f"say {other} instead" if is_off else f"leave {value or '='} out"
    return f"{flag} takes no value: {mend}"


def _plain(flag: str) -> str:
    """ "--no-compile" as "--compile"."""
    return re.sub(r"^(--(?:.*\.)?)no-", r"\1", flag.replace("_", "-"))
