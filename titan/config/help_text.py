"""The text of `--help`, made of the dataclasses."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path

from titan.config.convert import type_name
from titan.config.fields import Setting, all_settings, keys_of, sections, table_of
from titan.config.toml_text import shown

_WIDTH = 100

_HEAD = """\
usage: {program} [--job.config_file FILE] [--section.field VALUE] ...

Every setting has a default; a TOML file overrides the defaults, the command line overrides the file.

  --section.field VALUE    or --section.field=VALUE; - and _ are the same in names
  --section.flag           true; also --section.flag=true, --section.flag true
  --section.no_flag        false; also --section.flag=false, --section.flag false
  --section.field=         leaves an optional setting unset
  lists                    a,b or ["a", "b"]
  lists of tables          [{{"key": "value"}}], or [[section.field]] in a file"""


def help_text() -> str:
    """Every setting with its type, default and meaning, by section."""
    blocks = [_HEAD.format(program=Path(sys.argv[0]).name or "train.py")]
    for section in sections():
        lines = [_entry(setting) for setting in all_settings().values() if setting.section == section]
        blocks.append(f"[{section}]\n" + "\n".join(lines))
    return "\n\n".join(blocks)


def _entry(setting: Setting) -> str:
    head = f"  --{setting.key} {type_name(setting.hint)} (default: {shown(setting.default)}{_bounds(setting)})"
    return "\n".join([head, _filled(setting.meaning, 6), *_keys(setting)])


def _keys(setting: Setting) -> Iterator[str]:
    """The keys of each table, for a setting that is a list of tables."""
    table = table_of(setting.hint)
    for key in keys_of(table).values() if table else ():
        default = "needed" if key.default is MISSING else f"default: {shown(key.default)}"
        yield _filled(f"{key.name} {type_name(key.hint)} ({default}{_bounds(key)}): {key.meaning}", 8)


def _filled(text: str, indent: int) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)


def _bounds(setting: Setting) -> str:
    bounds = [
        f"{sign} {bound:g}" for sign, bound in ((">=", setting.minimum), ("<=", setting.maximum)) if bound is not None
    ]
    return "".join(f"; {bound}" for bound in bounds) + "".join(f" or {value}" for value in setting.also)
