from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_docs_list_every_setting_as_it_is(tmp_path: Path) -> None:
    docs = REPOSITORY / "docs" / "configuration.md"
    copy = tmp_path / "configuration.md"
    copy.write_text(docs.read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([sys.executable, str(REPOSITORY / "tools" / "settings_table.py"), str(copy)], check=True)
    assert copy.read_text(encoding="utf-8") == docs.read_text(encoding="utf-8"), "run python tools/settings_table.py"
