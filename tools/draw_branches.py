#!/usr/bin/env python3
"""Draws docs/images/branches.svg: what one query sees through each of the three branches, and how they are joined.

With --check it writes nothing; the exit code is 1 where the file is not what it would draw.
"""

import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs" / "images" / "branches.svg"
COMPRESSED, SELECTED, WINDOW = "#e0a030", "#0b6e99", "#7a9e7e"
GREY, LINE, INK = "#eceff1", "#b0bec5", "#263238"
WIDTH, HEIGHT = 900, 400
TOKENS, CELL, LEFT = 48, 11, 150  # tokens of the text, their width, where they begin
BLOCK = 4  # tokens of a selection block; of as many a compressed key is made, for the picture's sake
CHOSEN = (0, 3, 6, 10, 11)  # blocks: the first and the last two are forced
IMPORTANCE = (0.55, 0.2, 0.3, 0.95, 0.15, 0.25, 0.8, 0.3, 0.2, 0.35, 0.5, 0.6)
SEEN = 8  # tokens of the window


def rectangle(x, y, width, height, fill, stroke=LINE):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'


def text(x, y, words, size=13, anchor="start", fill=INK, weight="normal"):
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def line(x1, y1, x2, y2, stroke=LINE, width=1, arrow=False):
    head = ' marker-end="url(#arrow)"' if arrow else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="{width}"{head}/>'


def tokens(y, colour_of):
    return [rectangle(LEFT + CELL * i, y, CELL, 18, colour_of(i)) for i in range(TOKENS)]


def branch(y, name, explanation, colour):
    right = LEFT + CELL * TOKENS
    return [
        text(12, y + 15, name, weight="bold", fill=colour),
        text(12, y + 30, explanation, size=11),
        line(right + 8, y + 9, right + 66, y + 9, colour, 1.5, arrow=True),
        text(right + 34, y + 1, "&#215; gate", size=11, anchor="middle"),
    ]


def compressed(y):
    parts = tokens(y - 52, lambda i: GREY)
    for block in range(TOKENS // BLOCK):
        left = LEFT + CELL * BLOCK * block
        middle = left + CELL * BLOCK / 2
        parts += [line(left, y - 34, middle - 8, y - 4), line(left + CELL * BLOCK, y - 34, middle + 8, y - 4)]
        parts += [rectangle(middle - 8, y - 4, 16, 22, COMPRESSED)]
    parts += [text(LEFT + CELL * TOKENS + 8, y - 39, "φ per block", size=11)]
    return parts


def selected(y):
    parts = []
    for block, height in enumerate(IMPORTANCE):
        x = LEFT + CELL * BLOCK * block + CELL * BLOCK / 2 - 7
        parts += [rectangle(x, y - 10 - 26 * height, 14, 26 * height, COMPRESSED, COMPRESSED)]
    parts += [
        text(12, y - 14, "importance of each block,", size=11),
        text(12, y - 2, "from the compressed scores", size=11),
    ]
    return parts + tokens(y, lambda i: SELECTED if i // BLOCK in CHOSEN else GREY)


def draw():
    rows = {"compressed": 112, "selected": 218, "window": 286}
    right = LEFT + CELL * TOKENS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f'<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
        rectangle(0, 0, WIDTH, HEIGHT, "white", "white"),
        text(LEFT, 30, "keys and values of the text so far"),
        text(right - 4, 30, "query t", anchor="end", weight="bold"),
        line(right - 6, 36, right - 6, 56, INK, 1.5, arrow=True),
        *compressed(rows["compressed"]),
        *branch(rows["compressed"], "compressed", "all blocks, coarse", COMPRESSED),
        *selected(rows["selected"]),
        *branch(rows["selected"], "selected", "the best blocks, exact", SELECTED),
        *tokens(rows["window"], lambda i: WINDOW if i >= TOKENS - SEEN else GREY),
        *branch(rows["window"], "sliding window", "the last tokens, exact", WINDOW),
    ]
    join, top, bottom = right + 82, rows["compressed"] + 9, rows["window"] + 9
    middle = (top + bottom) / 2
    parts += [
        line(join - 14, top, join + 20, middle - 10, INK, 1, arrow=True),
        line(join - 14, rows["selected"] + 9, join + 16, middle + 1, INK, 1, arrow=True),
        line(join - 14, bottom, join + 20, middle + 12, INK, 1, arrow=True),
        f'<circle cx="{join + 30:g}" cy="{middle:g}" r="13" fill="white" stroke="{INK}"/>',
        text(join + 30, middle + 6, "+", size=18, anchor="middle"),
        line(join + 43, middle, join + 78, middle, INK, 1.5, arrow=True),
        text(join + 84, middle + 5, "o", size=16, weight="bold"),
        text(
            LEFT,
            340,
            "Each branch is softmax attention of the query to its own keys and values; the gates come from the",
        ),
        text(
            LEFT, 358, "layer's input. The query looks at a small, bounded share of the tokens one by one, so the cost"
        ),
        text(LEFT, 376, "per query grows only with the number of compressed blocks."),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main():
    if sys.argv[1:] == ["--check"]:
        current = FILE.exists() and FILE.read_text(encoding="utf-8") == draw()
        return 0 if current else f"{FILE}: not what tools/draw_branches.py draws: run it"
    FILE.write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
