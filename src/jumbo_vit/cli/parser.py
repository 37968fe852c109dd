"""The adapter between the words of the command line and a command's dataclass `Config`.

jsonargparse checks the types and writes `--print-config`. What it does not do is here: dashes in flags, several values
after one flag, `--flag` and `--no-flag`, positional arguments among options, the nearest name for a typo, and each
mistake told in one line. The words are sorted into a mapping from field to text, the config files are put under it,
and jsonargparse gets that mapping.

A command is a module that imports nothing slow and has

- `Config`, a dataclass whose docstring (Google style, with `Args:`) is the help, with those of its bases; a field
  `given: frozenset[str]` is no option and is filled with the names of the fields that the user set, on the command line
  or in a config file;
- `run(config)`;
- if wanted, `POSITIONALS`: names of fields given without a flag; a list takes one or more words, anything else one;
- if wanted, `GROUPS`: a mapping from a title in the help to the names of its fields.
"""

import argparse
import dataclasses
import importlib
import os
import re
import sys
import traceback
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jumbo_vit.cli.options import Option
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.version import __version__

if typing.TYPE_CHECKING:
    from jsonargparse import ArgumentParser

PROGRAM = "jumbo-vit"
COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("jumbo_vit.cli.check", "look through pictures before training: counts, unreadable files, duplicates"),
    "train": ("jumbo_vit.cli.train", "train or fine-tune a model on a folder of pictures"),
    "teach": ("jumbo_vit.cli.teach", "store what teachers say of fixed views of pictures, to train on it later"),
    "pretrain": ("jumbo_vit.cli.pretrain", "train an encoder on pictures without labels"),
    "evaluate": ("jumbo_vit.cli.evaluate", "measure a trained model on held-out pictures"),
    "probe": ("jumbo_vit.cli.probe", "measure a model's features: linear heads and k-NN, its trunk as it is"),
    "predict": ("jumbo_vit.cli.predict", "label pictures with a trained model"),
    "embed": ("jumbo_vit.cli.embed", "write the features of pictures and find the nearest ones"),
    "export": ("jumbo_vit.cli.export", "write a model as a file for another runtime, and compare the two"),
    "jumboize": ("jumbo_vit.cli.jumboize", "give a ViT of timm a Jumbo token without changing its outputs"),
    "attention": ("jumbo_vit.cli.attention", "draw where a model looks in a picture"),
    "reconstruct": ("jumbo_vit.cli.reconstruct", "show what a masked autoencoder makes of pictures"),
    "segment check": ("jumbo_vit.cli.segment_check", "look through pictures with masks before training"),
    "bench": ("jumbo_vit.cli.bench", "measure the speed of models side by side, and their share of the limit"),
    "plan": ("jumbo_vit.cli.plan", "find the widths and J that reach a wanted speed on this machine"),
    "models": ("jumbo_vit.cli.models", "list the models: parameters, operations, accuracy, licence"),
    "replay": ("jumbo_vit.cli.replay", "compute again the batch whose loss was not finite"),
}

NEGATIVE_NUMBER = re.compile(r"-\.?\d")
CONFIG, PRINT_CONFIG, HELP = "--config", "--print-config", ("-h", "--help")


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of a command line, sorted: text by field, config files in order, whether only to print."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: list[str] = dataclasses.field(default_factory=list)
    show: bool = False


class Command:
    """One command with its options. Making it imports the command's own module, which must be quick."""

    def __init__(self, name: str) -> None:
        path, self.summary = COMMANDS[name]
        self.name = name
        self.module: ModuleType = importlib.import_module(path)
        self.config: Any = self.module.Config
        hints = typing.get_type_hints(self.config)
        fields = {field.name: field for field in dataclasses.fields(self.config)}
        self.wants_given = fields.pop("given", None) is not None
        positionals: tuple[str, ...] = getattr(self.module, "POSITIONALS", ())
        self.options = {key: Option.of(fields[key], hints[key], key in positionals) for key in (*positionals, *fields)}
        self.positionals = [self.options[key] for key in positionals]
        self.flags = {option.flag: option for option in self.options.values()}
        self.off = {f"--no-{option.flag[2:]}": option for option in self.options.values() if option.switch}

    @property
    def usage(self) -> str:
        parts = (option.metavar + "..." * option.many for option in self.positionals)
        marked = (
            part if option.required else f"[{part}]" for part, option in zip(parts, self.positionals, strict=True)
        )
        return " ".join([PROGRAM, self.name, *marked, "[options]"])

    def read(self, argv: Sequence[str]) -> Words:
        """Sort the words; types are not looked at yet."""
        values: dict[str, Any] = {}
        files: list[str] = []
        loose: list[str] = []
        show = False
        words = list(argv)
        while words:
            word = words.pop(0)
            if word == "--":
                loose += words
                break
            if not _is_flag(word):
                loose.append(word)
                continue
            flag, equals, text = word.partition("=")
            flag, attached = flag.replace("_", "-"), [text] if equals else []
            if flag in self.flags:
                values[self.flags[flag].name] = _take(self.flags[flag], attached, words)
            elif flag == CONFIG:
                files += attached or [_next(words, flag, "the path of a YAML file")]
            elif flag not in self.off and flag != PRINT_CONFIG:
                known = [*self.flags, *self.off, CONFIG, PRINT_CONFIG, "--help"]
                raise UserError(f"unknown option {flag}{_nearest_flag(flag, known)}; see {PROGRAM} {self.name} --help")
            elif attached:
                raise UserError(f"{flag} takes no value, not {text!r}")
            elif flag == PRINT_CONFIG:
                show = True
            else:
                values[self.off[flag].name] = False
        return Words({**values, **self._place(loose)}, files, show)

    def _place(self, loose: list[str]) -> dict[str, Any]:
        """Give words without a flag to the positional fields, from the left; a list takes what later ones leave."""
        values: dict[str, Any] = {}
        rest = list(loose)
        for index, option in enumerate(self.positionals):
            later = len(self.positionals) - index - 1
            count = max(1, len(rest) - later) if option.many else 1
            taken, rest = rest[:count], rest[count:]
            if taken:
                values[option.name] = option.plain(taken) if option.many else taken[0]
        if rest:
            raise UserError(f"unexpected argument {rest[0]!r}; usage: {self.usage}")
        return values

    def from_file(self, path: str) -> dict[str, Any]:
        """The values of a YAML file by field. Keys may have dashes; an unknown key is refused."""
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"no such config file: {path}") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"cannot read the config file {path}: {error}") from None
        if not isinstance(content, dict | None):
            raise UserError(f"the config file {path} must hold lines of the form `option: value`")
        values = {str(key).replace("-", "_"): value for key, value in (content or {}).items()}
        for key in values:
            if key not in self.options:
                raise UserError(f"unknown key {key} in {path}{nearest(key, self.options)}")
        # A printed config has null for what is still to be given.
        unset = {key for key, value in values.items() if value is None and not self.options[key].optional}
        return {key: self.options[key].plain(value) for key, value in values.items() if key not in unset}

    def parse(self, argv: Sequence[str]) -> Any:
        """A filled `Config`, or None if the user only wanted it printed."""
        words = self.read(argv)
        values: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for path in words.files:
            found = self.from_file(path)
            values |= found
            origin |= {name: f"{name} in {path}" for name in found}
        values |= words.values
        origin |= {name: self.options[name].label for name in words.values}
        parser = self._typed_parser()
        checked = self._check(parser, values, origin)
        if words.show:
            print(parser.dump(checked, skip_unset=False), end="")
            return None
        for name, option in self.options.items():
            if option.required and name not in values:
                raise UserError(f"{option.label} is missing; usage: {self.usage}")
        given = {"given": frozenset(values)} if self.wants_given else {}
        return self.config(**{name: checked[name] for name in values}, **given)

    def _check(self, parser: "ArgumentParser", values: dict[str, Any], origin: Mapping[str, str]) -> Any:
        try:
            return parser.parse_object(values)
        except argparse.ArgumentError:
            for name, value in values.items():
                self._check_one(parser, name, value, origin[name])
            raise

    def _check_one(self, parser: "ArgumentParser", name: str, value: Any, label: str) -> None:
        option = self.options[name]
        try:
            parser.parse_object({name: value})
        except argparse.ArgumentError:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            hint = nearest(text, option.choices)
            raise UserError(f"{label} takes {option.expected}, not {text!r}{hint}") from None

    def _typed_parser(self) -> "ArgumentParser":
        import jsonargparse

        parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False)
        for option in self.options.values():
            default = None if option.default is dataclasses.MISSING else option.default
            parser.add_argument(option.flag, type=option.hint, default=default)
        return parser

    def help(self) -> str:
        """The page that `--help` prints, with the texts of the docstring of `Config`."""
        import docstring_parser

        # Of options that a class inherits the texts are its base's, unless it has its own.
        docs = [
            docstring_parser.parse(kind.__doc__ or "", style=docstring_parser.DocstringStyle.GOOGLE)
            for kind in reversed(self.config.__mro__[:-1])
        ]
        doc = docs[-1]
        texts = {p.arg_name: " ".join((p.description or "").split()) for one in docs for p in one.params}
        # Without a docstring a dataclass shows its signature, which is no description.
        about = (doc.description if doc.params else None) or self.summary
        parser = argparse.ArgumentParser(usage=self.usage, description=about, add_help=False)
        groups: dict[str, Sequence[str]] = getattr(self.module, "GROUPS", {})
        grouped = {name for names in groups.values() for name in names}
        rest = [name for name, option in self.options.items() if name not in grouped and not option.positional]
        if self.positionals:
            arguments = parser.add_argument_group("arguments")
            for option in self.positionals:
                arguments.add_argument(option.metavar, help=option.help_keywords(texts.get(option.name, ""))["help"])
        for title, names in {**groups, "other options" if groups else "options": rest}.items():
            group = parser.add_argument_group(title)
            for name in names:
                group.add_argument(self.options[name].flag, **self.options[name].help_keywords(texts.get(name, "")))
        general = parser.add_argument_group("general")
        general.add_argument(CONFIG, metavar="FILE", help="YAML file of options; the command line overrides it")
        general.add_argument(PRINT_CONFIG, action="store_true", help="print all options as such a file and stop")
        general.add_argument(*HELP, action="store_true", help="print this page and stop")
        return parser.format_help()


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not NEGATIVE_NUMBER.match(word)


def _nearest_flag(flag: str, known: Sequence[str]) -> str:
    # Compared without the dashes, which would make any two short flags alike.
    return nearest(flag.lstrip("-"), [name.lstrip("-") for name in known]).replace("mean ", "mean --")


def _next(words: list[str], flag: str, expected: str) -> str:
    if not words or _is_flag(words[0]):
        raise UserError(f"{flag} needs a value: {expected}")
    return words.pop(0)


def _take(option: Option, attached: list[str], words: list[str]) -> Any:
    """The text that belongs to an option: attached by `=`, else from the front of `words`."""
    if option.switch and not attached:
        spelled = bool(words) and words[0].lower() in ("true", "false")
        return words.pop(0).lower() == "true" if spelled else True
    taken = list(attached) or [_next(words, option.flag, option.expected)]
    while option.many and not attached and words and not _is_flag(words[0]):
        taken.append(words.pop(0))
    return option.plain(taken) if option.many else taken[0]


def _overview(start: str = "") -> str:
    """All commands, or those of two words with this first one."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items() if name.startswith(start)]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [options]",
            "",
            "Plain vision transformers with a Jumbo token.",
            "",
            "commands:",
            *lines,
            "",
            f"`{PROGRAM} COMMAND --help` shows the options of a command, `{PROGRAM} --version` the version.",
        ]
    )


def _dispatch(argv: Sequence[str]) -> None:
    if not argv or argv[0] in HELP:
        print(_overview())
        return
    if argv[0] == "--version":
        print(f"{PROGRAM} {__version__}")
        return
    pair = any(name.startswith(f"{argv[0]} ") for name in COMMANDS)
    if pair and set(argv[1:2]) <= set(HELP):
        print(_overview(f"{argv[0]} "))
        return
    name, words = " ".join(argv[: 1 + pair]), list(argv[1 + pair :])
    if name not in COMMANDS:
        kind, known = ("option", ["--help", "--version"]) if _is_flag(name) else ("command", list(COMMANDS))
        raise UserError(f"unknown {kind} {name}{nearest(name, known)}; allowed: {', '.join(known)}")
    command = Command(name)
    if set(HELP) & set(words[: words.index("--")] if "--" in words else words):
        print(command.help(), end="")
        return
    config = command.parse(words)
    if config is not None:
        command.module.run(config)


def main(argv: Sequence[str]) -> int:
    """Run a command; the result is the exit code: 0 done, 2 a user's mistake, 1 a fault of ours, 130 interrupted."""
    try:
        _dispatch(argv)
        sys.stdout.flush()
    except UserError as error:
        message = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        if os.environ.get("LOCAL_RANK", "0") == "0":  # of several processes one speaks
            print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_gone():
            # As the shell reports any program whose reader left. The rest of the buffer must not be flushed at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        if isinstance(error, PermissionError) and error.filename is not None:
            # Whatever was looked at in a locked folder, the reader's case is the same.
            print(f"{PROGRAM}: error: no permission for {error.filename}: change its rights", file=sys.stderr)
            return 2
        traceback.print_exc()
        print(
            f"{PROGRAM}: this is a fault in {PROGRAM} {__version__}; please report it with the lines above",
            file=sys.stderr,
        )
        return 1
    return 0


def _stdout_is_gone() -> bool:
    """Other pipes break too, a worker's for one. Only a write tells, for nothing may be left in the buffer."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False
