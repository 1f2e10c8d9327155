"""Every page whose tables are made from data agrees with its files; the study's, with its figures, is tested apart."""

from __future__ import annotations

import pytest
from study_cases import PAGES, imported

SCRIPTS = sorted(path.stem for path in PAGES.glob("*_page.py") if path.stem != "study_page")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_agrees_with_its_files(script: str) -> None:
    with imported(script) as page:
        assert page.main(["--check"]) == 0
