"""Draw docs/step.svg, the picture of one training step of four units on three streams."""

from pathlib import Path

UNITS = ["root", "block 1", "block 2", "block 3"]
COLOURS = ["#5b6b8c", "#3b82a0", "#4f9d69", "#c2803a"]
STREAMS = ["gather", "compute", "reduce"]
LEFT, TOP, ROW, STEP = 92, 66, 56, 62


def bar(stream: int, start: float, length: float, unit: int, faint: bool = False) -> str:
    x, y, width = LEFT + start * STEP, TOP + stream * ROW, length * STEP - 3
    opacity = 0.45 if faint else 1
    name = UNITS[unit].replace("block ", "b")
    return (
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="32" rx="5" fill="{COLOURS[unit]}" opacity="{opacity}"/>'
        f'<text x="{x + width / 2:.0f}" y="{y + 21}" class="in">{name}</text>'
    )


def picture() -> str:
    """Forward: each unit is gathered while the one before it computes. Backward: the same, and reduces run under it."""
    parts = [bar(0, 0, 1, 0), bar(0, 1, 1, 1), bar(0, 2, 1, 2), bar(0, 3, 1, 3)]
    parts += [bar(1, 1, 1, 0), bar(1, 2, 1, 1), bar(1, 3, 1, 2), bar(1, 4, 1, 3)]
    parts += [bar(0, 5.3, 1, 2), bar(0, 7.1, 1, 1)]
    parts += [bar(1, 5.3, 1.8, 3), bar(1, 7.1, 1.8, 2), bar(1, 8.9, 1.8, 1), bar(1, 10.7, 1.2, 0)]
    parts += [bar(2, 7.1, 1, 3), bar(2, 8.9, 1, 2), bar(2, 10.7, 1, 1), bar(2, 11.9, 1, 0)]
    width, height = LEFT + 13 * STEP + 10, TOP + 3 * ROW + 40
    names = "".join(
        f'<text x="{LEFT - 14}" y="{TOP + i * ROW + 21}" class="stream">{stream}</text>' for i, stream in enumerate(STREAMS)
    )
    split = LEFT + 5.15 * STEP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="One step: gathers run ahead of compute, reduces run under the backward of the unit before">'
        "<style>text{font:14px system-ui,sans-serif;fill:#333}.in{fill:#fff;text-anchor:middle}.stream{text-anchor:end}"
        ".head{font-weight:600}.note{fill:#666;font-size:13px}</style>"
        f'<rect width="{width}" height="{height}" fill="#fff"/>{names}'
        f'<text x="{LEFT}" y="34" class="head">forward</text><text x="{split + 10:.0f}" y="34" class="head">backward</text>'
        f'<line x1="{split:.0f}" y1="16" x2="{split:.0f}" y2="{height - 34}" stroke="#bbb" stroke-dasharray="4 4"/>'
        + "".join(parts)
        + f'<text x="{LEFT}" y="{height - 12}" class="note">A unit stands in full only while it computes and one ahead of it; '
        "the last unit and the root stay from forward to backward.</text></svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("step.svg").write_text(picture())
