"""The cases of the operators of the normalisations and positions: see cases.py."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Options = dict[str, list[dict[str, Any]]]

OPTIONS: Options = {}
LARGE: Options = {}
TEETH: Options = {}
DRAWS: dict[str, st.SearchStrategy[dict[str, Any]]] = {}
