"""Print the page of DeepSpeed's keys: `python -m tests.compat.deepspeed_page > docs/compat_deepspeed.md`."""

from accordion.compat.deepspeed.reading import KEYS, PARTS


def render() -> str:
    """Return the table as Markdown."""
    lines = [
        "# DeepSpeed's configuration, key by key",
        "",
        "Written by `python -m tests.compat.deepspeed_page > docs/compat_deepspeed.md`; a test compares. How to use a",
        "file: [compat.md](compat.md). `batch`, `clip`, `optimizer`, `scaler` and `scheduler` are attributes of the",
        "`Settings` that `read` returns. Strategies, `Precision`, `Offload` and `reduce_op` are in its `sharding`.",
        "",
        "A key that is not in these tables is refused, and the error names the nearest one. `name.*` stands for all",
        "keys of that section. A key that is not supported is accepted if its value asks for nothing: `false`, `null`,",
        '`"enabled": false`, or the value in brackets.',
    ]
    for title, part in PARTS.items():
        lines += ["", f"## {title}", "", "| key | | how it is used, or why not |", "|---|---|---|"]
        for names, key in part.items():
            off = f" ({', '.join(str(value).lower() for value in key.off)})" if key.off else ""
            use = "used" if key.used else "not needed" if key.not_needed else "not supported"
            why = key.used or key.not_needed or key.refused
            lines.append(f"| {', '.join(f'`{n}`' for n in names.split())} | {use}{off} | {why} |")
    lines += ["", '## `"auto"`', "", "| key | becomes |", "|---|---|"]
    for name, key in KEYS.items():
        becomes = [f"`{key.asked}` in `accordion train`, else the value in `read(auto=)`"] if key.asked else []
        becomes += [f"{'else ' if key.asked else ''}`{key.auto}`"] if key.auto is not None else []
        becomes += [key.follows] if key.follows else []
        lines += [f"| `{name}` | {', '.join(becomes)} |"] if becomes else []
    lines += ["", 'Keys that are not needed may be `"auto"` too. Every other `"auto"` is refused.', ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(render(), end="")
