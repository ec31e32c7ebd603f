"""Write the tables of settings in docs/configuration.md from the settings' dataclasses.

python tools/settings_table.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.cli.flags.table import ENGINE_GROUPS, POOL_GROUPS, SERVER_GROUPS
from octavo.core.flag import Flag

BEGIN = "<!-- tables: python tools/settings_table.py -->"
END = "<!-- end of tables -->"
DOCS = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


def tables() -> str:
    lines = []
    for title, flags in (ENGINE_GROUPS | SERVER_GROUPS | POOL_GROUPS).items():
        lines += [f"### {title[0].upper()}{title[1:]}", "", "| flag | default | what it does |", "| --- | --- | --- |"]
        lines += [f"| {spelled(flag)} | {flag.default} | {about(flag)} |" for flag in flags]
        lines.append("")
    return "\n".join(lines)


def spelled(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.spelled())
    return f"{names}, `--no-{flag.name}`" if flag.switch else names


def about(flag: Flag) -> str:
    parts = [flag.help.replace("|", "\\|")]
    if flag.choices:
        parts.append("one of " + ", ".join(f"`{choice}`" for choice in flag.choices))
    if flag.env:
        parts.append(f"also `{flag.env}`")
    return "; ".join(parts)


def rewrite(text: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
