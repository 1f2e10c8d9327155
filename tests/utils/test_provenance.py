"""What a file of results says of where it came from."""

from __future__ import annotations

import pytest

from softplus_attention.utils import provenance


def test_a_command_has_no_folder_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/home/me/tool.py", "--output", "/tmp/of mine/x.json", "--data", "corpus/train", "--steps", "3"]
    monkeypatch.setattr("sys.argv", words)
    expected = "python benchmarks/tool.py --output x.json --data corpus/train --steps 3"
    assert provenance.command("benchmarks/tool.py") == expected
