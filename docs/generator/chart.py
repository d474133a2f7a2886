"""Draws the README's chart as plain SVG: one panel of horizontal bars per study, in a light and a dark version."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from generator.results import duration

_WIDTH, _PANEL_WIDTH, _GAP = 880, 424, 32
_LABEL_WIDTH, _VALUE_WIDTH, _BAR_HEIGHT, _ROW_HEIGHT = 146, 66, 18, 28
_TOP = 58
_FONT = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one version of the chart; the background is transparent."""

    text: str
    muted: str
    bar: str
    highlight: str


LIGHT = Theme(text="#1f2328", muted="#59636e", bar="#afb8c1", highlight="#1a7f37")
DARK = Theme(text="#f0f6fc", muted="#9198a1", bar="#57606a", highlight="#3fb950")


@dataclass(frozen=True, slots=True)
class Bar:
    """A contender and its latency."""

    label: str
    value_ms: float
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """A group of bars on a common scale."""

    title: str
    subtitle: str
    bars: tuple[Bar, ...]


def draw(panels: list[Panel], theme: Theme) -> str:
    """Return the chart as an SVG document."""
    height = _TOP + _ROW_HEIGHT * max(len(panel.bars) for panel in panels) + 6
    description = "; ".join(describe(panel) for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" font-family="{_FONT}" font-size="14">',
        f"<title>{escape(description)}</title>",
    ]
    for index, panel in enumerate(panels):
        lines += _draw_panel(panel, index * (_PANEL_WIDTH + _GAP), theme)
    return "\n".join([*lines, "</svg>", ""])


def describe(panel: Panel) -> str:
    """Return a panel in words, for readers who do not see it."""
    return f"{panel.title}: " + ", ".join(f"{bar.label} {duration(bar.value_ms)}" for bar in panel.bars)


def _draw_panel(panel: Panel, left: int, theme: Theme) -> list[str]:
    lines = [
        _text(left, 18, panel.title, theme.text, 'font-weight="600" font-size="16"'),
        _text(left, 38, panel.subtitle, theme.muted, 'font-size="12.5"'),
    ]
    scale = (_PANEL_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / max(bar.value_ms for bar in panel.bars)
    for index, bar in enumerate(panel.bars):
        top = _TOP + index * _ROW_HEIGHT
        baseline = top + 14
        width = max(2.0, bar.value_ms * scale)
        start = left + _LABEL_WIDTH
        weight = 'font-weight="600"' if bar.is_ours else ""
        color = theme.highlight if bar.is_ours else theme.bar
        lines += [
            _text(start - 10, baseline, bar.label, theme.text, f'text-anchor="end" {weight}'),
            f'<rect x="{start}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}" rx="2" fill="{color}"/>',
            _text(start + width + 7, baseline, duration(bar.value_ms), theme.text, weight),
        ]
    return lines


def _text(x: float, y: float, content: str, color: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{color}" {attributes}>{escape(content)}</text>'
