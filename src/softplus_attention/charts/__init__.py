"""Chart data (`model`) and drawing with matplotlib (`draw`); the report page draws the same data in JavaScript."""

from __future__ import annotations

from typing import TYPE_CHECKING

from softplus_attention.utils.lazy import lazy_names

if TYPE_CHECKING:
    from softplus_attention.charts.draw import picture
    from softplus_attention.charts.model import AttentionMaps, BarChart, HeatMap, HeatMaps, LineChart, Series, Table

__all__ = ["AttentionMaps", "BarChart", "HeatMap", "HeatMaps", "LineChart", "Series", "Table", "picture"]

__getattr__, __dir__ = lazy_names(__name__, {"picture": "draw"} | dict.fromkeys(__all__[:-1], "model"))
