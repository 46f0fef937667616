"""The text of `--help`, made of the dataclasses."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from titan.config.convert import type_name
from titan.config.fields import Setting, all_settings, sections
from titan.config.toml_text import shown

_WIDTH = 100

_HEAD = """\
usage: {program} [--job.config_file FILE] [--section.field VALUE] ...

Every setting has a default; a TOML file overrides the defaults, the command line overrides the file.

  --section.field VALUE    or --section.field=VALUE; - and _ are the same in names
  --section.flag           true; also --section.flag=true, --section.flag true
  --section.no_flag        false; also --section.flag=false, --section.flag false
  --section.field=         leaves an optional setting unset
  lists                    a,b or ["a", "b"]"""


def help_text() -> str:
    """Every setting with its type, default and meaning, by section."""
    blocks = [_HEAD.format(program=Path(sys.argv[0]).name or "train.py")]
    for section in sections():
        lines = [_entry(setting) for setting in all_settings().values() if setting.section == section]
        blocks.append(f"[{section}]\n" + "\n".join(lines))
    return "\n\n".join(blocks)


def _entry(setting: Setting) -> str:
    head = f"  --{setting.key} {type_name(setting.hint)} (default: {shown(setting.default)}{_bounds(setting)})"
    return head + "\n" + textwrap.fill(setting.meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _bounds(setting: Setting) -> str:
    bounds = [
        f"{sign} {bound:g}" for sign, bound in ((">=", setting.minimum), ("<=", setting.maximum)) if bound is not None
    ]
    return "".join(f"; {bound}" for bound in bounds) + "".join(f" or {value}" for value in setting.also)
