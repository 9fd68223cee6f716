"""From a TOML file and flags to a Config, and back. File and flags are equally strict."""

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import jsonargparse

from commands import InputError
from config.schema import KEYS, SECTIONS, Config, items
from config.validate import problems

USAGE = """usage: python train.py CONFIG.toml [--section.key=value ...] [--resume | --overwrite] [--print-config] [--debug]

Trains one model as CONFIG.toml says. Flags override the file; the last of two equal flags wins.

  --resume        go on from the newest checkpoint of the run folder
  --overwrite     empty the run folder first
  --print-config  print the resolved config and stop
  --debug         show the traceback of an error
  --help          this text

Keys (in the file: [section], then key = value; none unsets a key that has no default):
"""
SWITCHES = ("resume", "overwrite", "print_config")
NONE_WORDS = ("none", "null")


@dataclass(frozen=True)
class CommandLine:
    """What `python train.py ...` was asked to do."""

    config: Config
    config_path: Path
    resume: bool = False
    overwrite: bool = False
    print_config: bool = False


@dataclass(frozen=True)
class Setting:
    """One key as somebody wrote it, and where: a file's path, or the flag itself."""

    key: str
    value: Any
    source: str


def parse_command_line(argv: list[str]) -> CommandLine:
    """Reads the arguments of `train.py`. `--help` prints every key and exits 0.

    Raises: InputError, one line, for anything that cannot be meant.
    """
    if "-h" in argv or "--help" in argv:
        print(help_text(), end="")
        sys.exit(0)
    spellings = {f"--{name}": name for name in SWITCHES} | {f"--{name.replace('_', '-')}": name for name in SWITCHES}
    asked = {spellings[argument] for argument in argv if argument in spellings}
    rest = [argument for argument in argv if argument not in spellings]
    paths, flags = split_flags(rest)
    if len(paths) != 1:
        wanted = f"one config file is wanted, not {len(paths)}: {' '.join(paths)}" if paths else "which config file?"
        raise InputError(f"{wanted} (python train.py CONFIG.toml [--section.key=value ...]; --help lists every key)")
    if {"resume", "overwrite"} <= asked:
        raise InputError("--resume keeps the run folder and --overwrite empties it; give one of the two")
    return CommandLine(build_config(paths[0], flags), Path(paths[0]), **dict.fromkeys(asked, True))


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Config of the TOML file at `path` with `overrides` ("--section.key=value", or the flag and its value apart) on top.

    `out_dir` becomes "out/<stem of the file>" where neither sets it. Raises: InputError, one line naming file or flag, key and value.
    """
    paths, flags = split_flags(list(overrides))
    if paths:
        raise InputError(f"{paths[0]}: not a flag; flags are --section.key=value")
    return build_config(path, flags)


def to_toml(config: Config) -> str:
    """The complete config as TOML that loads to an equal config. Unset keys are left out, for TOML has no null."""
    lines, current = [], ""
    for name, value in items(config):
        section, _, key = name.rpartition(".")
        if value is None:
            continue
        if section != current:
            lines += ["", f"[{section}]"]
            current = section
        lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes of an argument under the C locale
        return '"' + "".join(f"\\u{ord(char):04X}" if char < " " or char in '"\\\x7f' else char for char in text) + '"'
    return repr(value)


def help_text() -> str:
    """Every key with its meaning and default, by section."""
    return USAGE + build_parser().format_help().partition("\n\n")[2]


def split_flags(argv: list[str]) -> tuple[list[str], list[Setting]]:
    """Takes positional arguments and `--key=value` or `--key value` apart."""
    positional, flags, rest = [], [], list(argv)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            positional.append(argument)
            continue
        flag, equals, text = argument.partition("=")
        if not equals:
            if flag[2:] in KEYS and (not rest or rest[0].startswith("--")):
                raise InputError(f"{flag} needs a value: {flag}=VALUE")
            text = rest.pop(0) if rest else ""
        flags.append(Setting(flag[2:], text, flag))
    return positional, flags


def build_config(path: str | Path, flags: list[Setting]) -> Config:
    settings = {setting.key: setting for setting in read_file(path) + flags}
    for setting in settings.values():
        check_key(setting)
    settings = {name: replace(setting, value=read_value(setting)) for name, setting in settings.items()}
    for name, entry in KEYS.items():
        if entry.default is MISSING and name not in settings:
            raise InputError(f"{path}: {name} is missing; it is the {entry.metadata['help']}")
    config = instantiate(settings)
    if config.out_dir is None:
        config = replace(config, out_dir=f"out/{Path(path).stem}")
    for problem in problems(config):
        flagged = [setting.source for name, setting in settings.items() if f"{name} = " in problem and setting.source != str(path)]
        raise InputError(f"{flagged[0] if flagged else path}: {problem}")
    return config


def read_file(path: str | Path) -> list[Setting]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such config file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from error
    return [Setting(name, value, str(path)) for name, value in flatten(table)]


def flatten(table: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and (value or prefix + name not in SECTIONS):
            if not value:
                yield prefix + name, value  # an empty table that is no section: somebody's misspelling
            yield from flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, dict):
            yield prefix + name, value


def check_key(setting: Setting) -> None:
    if setting.key in KEYS:
        return
    dashes = "--" if setting.source.startswith("--") else ""
    what = setting.source if dashes else f"{setting.source}: {setting.key}"
    if setting.key in SECTIONS:
        raise InputError(f"{what} is a section, not a key; its keys are {', '.join(k for k in KEYS if k.startswith(setting.key + '.'))}")
    near = nearest_keys(setting.key)
    hint = f"did you mean {' or '.join(dashes + name for name in near)}?" if near else "python train.py --help lists every key"
    raise InputError(f"{what}: unknown key; {hint}")


def nearest_keys(name: str) -> list[str]:
    """Keys of the same last name in other sections; else the most similar key, if any is similar."""
    wanted = name.replace("-", "_").lower()
    same = [known for known in KEYS if known.rpartition(".")[2] == wanted.rpartition(".")[2]]
    if same:
        return [known for known in same if known == wanted] or same
    whole = difflib.get_close_matches(wanted, KEYS, n=1)
    leaves = {known.rpartition(".")[2]: known for known in KEYS}
    return whole or [leaves[leaf] for leaf in difflib.get_close_matches(wanted.rpartition(".")[2], leaves, n=1)]


def read_value(setting: Setting) -> Any:
    """The value with what jsonargparse would wave through or not know put right: strings for numbers in a file, none, inf."""
    kinds, value = value_types(KEYS[setting.key]), setting.value
    if isinstance(value, str) and setting.source.startswith("--"):
        if type(None) in kinds and value.lower() in NONE_WORDS:
            return None
        if float in kinds and re.fullmatch(r"[+-]?(inf|nan)", value.lower()):
            return float(value)
    elif isinstance(value, str) and str not in kinds and value not in kinds:
        raise wrong_type(setting)
    elif not isinstance(value, bool | int | float | str):
        raise wrong_type(setting)
    return value


def value_types(entry: Field) -> list[Any]:
    """A field's type taken apart: types, and the strings of a Literal."""
    kinds = get_args(entry.type) if get_origin(entry.type) is not Literal and get_args(entry.type) else (entry.type,)
    return [part for kind in kinds for part in (get_args(kind) if get_origin(kind) is Literal else (kind,))]


def wrong_type(setting: Setting) -> InputError:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "unset"}
    kinds = [words.get(kind, repr(kind)) for kind in value_types(KEYS[setting.key]) if kind is not type(None)]
    if setting.source.startswith("--"):
        return InputError(f"{setting.source}={setting.value}: must be {' or '.join(kinds)}")
    return InputError(f"{setting.source}: {setting.key} = {setting.value!r} must be {' or '.join(kinds)}")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """argparse's own layout (jsonargparse's default states types and defaults once more), with room for long keys."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, max_help_position=36, width=140, **options)


def build_parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False, add_help=False, formatter_class=HelpFormatter)
    groups = {"": parser.add_argument_group("the run")}
    groups |= {name: parser.add_argument_group(f"[{name}]  {cls.__doc__}") for name, cls in SECTIONS.items()}
    for name, entry in KEYS.items():
        default = None if entry.default is MISSING else entry.default
        note = "required" if entry.default is MISSING else None if default is None else f"default {toml_value(default)}"
        meaning = entry.metadata["help"] + (f" ({note})" if note else "")
        metavar = "|".join(sorted({getattr(kind, "__name__", str(kind)) for kind in value_types(entry)} - {"NoneType"}))
        groups[name.rpartition(".")[0]].add_argument(
            f"--{name}", type=entry.type, default=default, metavar=metavar, help=meaning.replace("%", "%%")
        )
    return parser


def instantiate(settings: dict[str, Setting]) -> Config:
    parser = build_parser()
    given = {name: setting.value for name, setting in settings.items()}
    try:
        parsed = parser.parse_object(given)
    except jsonargparse.ArgumentError as error:
        found = re.search(r'Parser key "([\w.]+)"', str(error))
        if not found or found[1] not in settings:
            raise
        raise wrong_type(settings[found[1]]) from error
    sections = {name: cls(**vars(parsed[name])) for name, cls in SECTIONS.items()}
    top = {name: parsed[name] for name in KEYS if "." not in name}
    return Config(**sections, **top)
