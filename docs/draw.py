"""Draw the pictures of the README and docs/concepts.md: `python docs/draw.py`; a test compares them with the files."""

import re
from collections.abc import Callable
from pathlib import Path

COLOURS = ["#5b6b8c", "#3b82a0", "#4f9d69", "#c2803a"]
STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#333}.in{fill:#fff;text-anchor:middle}.right{text-anchor:end}"
    ".middle{text-anchor:middle}.head{font-weight:600}.note{fill:#666;font-size:14px}"
)


def picture(width: int, height: int, label: str, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}"><style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}'
        "</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, words: str = "", empty: bool = False) -> str:
    look = f'fill="none" stroke="{colour}" stroke-dasharray="3 3"' if empty else f'fill="{colour}"'
    area = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" {look}/>'
    return area + (text(x + width / 2, y + height / 2 + 5, words, "in") if words else "")


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow with a head that points down, up or to the right."""
    down = (to_y > y) - (to_y < y)
    tip = (
        f"{to_x - 5},{to_y - 8 * down} {to_x + 5},{to_y - 8 * down}"
        if down
        else f"{to_x - 8},{to_y - 5} {to_x - 8},{to_y + 5}"
    )
    return (
        f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="#666" stroke-width="1.5"/>'
        f'<polygon points="{to_x},{to_y} {tip}" fill="#666"/>'
    )


def step() -> str:
    """One step of a root and three blocks on three streams: the forward above, the backward below."""
    names, left, row, unit_of_time = ["root", "b1", "b2", "b3"], 84, 40, 62
    forward = [(0, i, 1, i) for i in range(4)] + [(1, i + 1, 1, i) for i in range(4)]
    backward = [(0, 0, 1, 2), (0, 1.8, 1, 1), (1, 0, 1.8, 3), (1, 1.8, 1.8, 2), (1, 3.6, 1.8, 1), (1, 5.4, 1.2, 0)]
    backward += [(2, 1.8, 1, 3), (2, 3.6, 1, 2), (2, 5.4, 1, 1), (2, 6.6, 1, 0)]
    parts = []
    for head, top, bars in (("forward", 24, forward), ("backward", 148, backward)):
        streams = ["gather", "compute", "reduce"][: 1 + max(stream for stream, *_ in bars)]
        parts += [text(left, top, head, "head")]
        parts += [text(left - 12, top + 30 + i * row, s, "right") for i, s in enumerate(streams)]
        parts += [
            box(
                left + start * unit_of_time,
                top + 10 + stream * row,
                length * unit_of_time - 3,
                30,
                COLOURS[unit],
                names[unit],
            )
            for stream, start, length, unit in bars
        ]
    parts += [arrow(left, 296, left + 470, 296), text(left + 476, 301, "time", "note")]
    label = "One step: gathers run ahead of compute, reduces run during the backward of the next unit"
    return picture(600, 310, label, parts)


def strategies() -> str:
    """The table of docs/strategies.md: MiB on each of eight ranks, by kind, with the full parameters that come and go."""
    page = Path(__file__).with_name("strategies.md").read_text(encoding="utf-8")
    table = [
        (name, [*map(float, cells.strip(" |").split("|"))])
        for name, cells in re.findall(r"\| `(\w+)` \|((?: [\d.]+ \|?){4})", page)
    ]
    assert len(table) == 6
    kinds, left, parts = ["parameters", "gradients", "optimizer", "full, at most"], 174, []
    for i, kind in enumerate(kinds):
        parts += [box(16 + i * 126, 10, 14, 14, COLOURS[i], empty=i == 3), text(36 + i * 126, 22, kind)]
    for i, (name, mib) in enumerate(table):
        x, top = float(left), 44 + i * 36
        parts.append(text(left - 12, top + 18, name, "right"))
        for kind, size in enumerate(mib):
            parts.append(box(x, top, size * 1.58, 24, COLOURS[kind], empty=kind == 3))
            x += size * 1.58
        parts.append(text(x + 6, top + 18, f"{sum(mib):.0f}", "note"))
    return picture(520, 266, "MiB on each of eight ranks under each strategy", parts)


def rows() -> str:
    """One parameter of four rows on two ranks, from its shards to the shards of its gradient."""
    left, parts = 152, []
    stages = [("shards", 0), ("full parameter", 1), ("full gradients", 2), ("shards of the sum", 3)]
    moves = ["all-gather", "forward, backward", "reduce-scatter"]
    parts += [text(left + 80 + rank * 190, 24, f"rank {rank}", "middle head") for rank in range(2)]
    for name, stage in stages:
        top = 40 + stage * 110
        parts.append(text(left - 14, top + 40, name, "right"))
        for rank in range(2):
            for r in range(4):
                mine, whole = r // 2 == rank, stage in (1, 2)
                colour = COLOURS[3] if stage == 2 else COLOURS[1 + r // 2]
                x, y = left + rank * 190, top + r * 17
                parts.append(box(x, y, 160, 15, colour, empty=not (mine or whole)))
    for stage, move in enumerate(moves):
        y = 40 + stage * 110 + 72
        parts += [arrow(left + 175, y, left + 175, y + 34), text(left - 14, y + 22, move, "right note")]
    return picture(
        520, 450, "A parameter of four rows on two ranks: gathered, used, its gradient summed and cut again", parts
    )


def hybrid() -> str:
    """Two nodes of four GPUs: each node has the whole model, each GPU a quarter of it."""
    parts = []
    for node in range(2):
        top = 34 + node * 110
        parts += [text(84, top + 32, f"node {node}", "right head")]
        parts += [box(100 + gpu * 100, top, 90, 52, COLOURS[gpu], f"quarter {gpu + 1}") for gpu in range(4)]
    parts += [text(295, 20, "gathers: inside a node", "middle note")]
    parts += [arrow(145 + gpu * 100, 90, 145 + gpu * 100, 140) for gpu in range(4)]
    parts += [text(295, 222, "gradients: summed inside the node, then over the nodes", "middle note")]
    return picture(510, 236, "Two nodes: shards inside each, replicas across them", parts)


def tiers() -> str:
    """Where each kind of data is between its uses, and the argument that moves it."""
    tiers, left = [("device", COLOURS[3]), ("host", COLOURS[1]), ("disk", COLOURS[0])], 130
    kinds = [("params", "gather"), ("activations", "backward"), ("grads", "step"), ("optimizer", "step")]
    parts = [text(left - 30, 208, "argument", "right"), text(left - 30, 228, "used in each", "right note")]
    parts += [box(16, 16 + i * 62, 84, 44, colour, name) for i, (name, colour) in enumerate(tiers)]
    for i, (name, use) in enumerate(kinds):
        x = left + 30 + i * 105
        parts += [f'<line x1="{x}" y1="38" x2="{x}" y2="162" stroke="#666" stroke-width="1.5"/>']
        parts += [f'<circle cx="{x}" cy="{38 + t * 62}" r="8" fill="{colour}"/>' for t, (_, colour) in enumerate(tiers)]
        parts += [text(x, 208, name, "middle head"), text(x, 228, use, "middle note")]
    return picture(520, 242, "Each of four kinds of data may be kept on the device, on the host or on disk", parts)


def checkpoint() -> str:
    """Twelve rows saved by two ranks and loaded by three."""
    parts = [
        text(104, y, words, "right") for y, words in ((41, "2 ranks save"), (111, "checkpoint"), (181, "3 ranks load"))
    ]
    for count, top in ((2, 20), (3, 160)):
        width = 396 / count
        parts += [box(116 + r * width, top, width - 4, 32, COLOURS[r + 1], f"rank {r}") for r in range(count)]
    parts += [box(116, 90, 392, 32, COLOURS[0], "12 rows, a checksum of every byte")]
    parts += [arrow(x, 56, x, 86) for x in (215, 413)] + [arrow(x, 126, x, 156) for x in (182, 314, 446)]
    return picture(520, 206, "Rows saved by two ranks are read by three", parts)


PICTURES: dict[str, Callable[[], str]] = {
    "step": step,
    "strategies": strategies,
    "rows": rows,
    "hybrid": hybrid,
    "tiers": tiers,
    "checkpoint": checkpoint,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw(), encoding="utf-8")
