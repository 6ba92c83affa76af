#!/usr/bin/env python3
"""Plots benchmark results against the size of the tensors, as SVG.

The input files are CSV files from hvdbench (--format csv) or from the programs in bench/peers. Results that differ only
in size form one line of the plot, and the legend shows in which attributes the lines differ. If a line has several
results of the same size, the plot shows their median.
"""

import argparse
import csv
import itertools
import math
import statistics
import sys
from html import escape

HARNESS = ["peer", "op", "np", "bytes", "iters", "median_us", "min_us", "algbw_GBps", "busbw_GBps"]
# Maps the column names of bench/peers to those of hvdbench.
SAME = {"op": "collective", "np": "ranks", "median_us": "p50_us"}
ATTRIBUTES = ["peer", "collective", "ranks", "path", "memory", "touch", "type", "redop", "root", "placement"]
NUMBERS = ["bytes", "ranks", "p50_us", "algbw_GBps", "busbw_GBps"]
METRICS = {  # column, label, whether the axis is logarithmic
    "busbw": ("busbw_GBps", "bus bandwidth in GB/s", False),
    "algbw": ("algbw_GBps", "algorithm bandwidth (algbw) in GB/s", False),
    "time": ("p50_us", "median time in µs", True),
}


class InputError(Exception):
    """An error in the input files. The text names the file and, if possible, the line."""


def read_results(name, lines, first=1):
    """Returns the rows of a CSV file as dictionaries with hvdbench's column names. A file without a header is from
    bench/peers. first is the number of the first line in the file.
    """
    rows, columns = [], HARNESS
    for number, text in enumerate(lines, first):
        if not text.strip() or text.startswith("#"):
            continue
        fields = next(csv.reader([text.strip()]))
        if fields == HARNESS or fields[0] == "collective":
            columns = fields
            continue
        if len(fields) != len(columns):
            raise InputError(f"{name}, line {number}: {len(fields)} columns, want {len(columns)}")
        row = {SAME.get(column, column): field for column, field in zip(columns, fields)}
        try:
            row |= {column: float(row[column]) for column in NUMBERS}
        except ValueError as err:
            raise InputError(f"{name}, line {number}: {err}") from err
        rows.append(row | {"bytes": int(row["bytes"]), "ranks": int(row["ranks"])})
    return rows


def describe(attribute, row):
    """Returns the text in the legend for the value of an attribute."""
    value = row.get(attribute, "")
    words = {"ranks": f"{value} ranks", "root": f"root {value}", "touch": "touched" if value == "true" else "untouched"}
    return words.get(attribute, value) if attribute in row else ""


def make_series(rows, column):
    """Returns the lines of the plot as a list of pairs (name, points). Each point is a pair (bytes, value)."""
    rows = [row for row in rows if row["bytes"] > 0 and 0 < row[column] < math.inf]
    varying = [a for a in ATTRIBUTES if len({row.get(a) for row in rows}) > 1]
    if len({row["file"] for row in rows}) > 1:
        varying.append("file")
    series = {}
    for row in rows:
        name = " ".join(filter(None, (describe(a, row) for a in varying if a != "file" or "peer" not in row)))
        series.setdefault(name, {}).setdefault(row["bytes"], []).append(row[column])
    return [(name, [(size, statistics.median(values)) for size, values in sorted(by_size.items())]) for name, by_size in series.items()]


WIDTH, HEIGHT = 860, 480
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 72, 52, 540, 364
BOTTOM, RIGHT = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH
LEGEND_ROW = 22
# These colours can be distinguished with any colour vision (Okabe and Ito, Color universal design, 2008). Their yellow
# is left out.
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#333333"]
DASHES = ["", ' stroke-dasharray="7 4"', ' stroke-dasharray="2 3"']


def plain(value):
    """Formats a number without an exponent and without trailing zeros."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


def size_label(size):
    for unit, n in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= n and size % n == 0:
            return f"{size // n} {unit}"
    return f"{size} B"


def size_axis(sizes):
    """Returns the position of a size, and [(position, label)]."""
    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    if low == high:
        low, high = low - 1, high + 1
    step = next(step for step in (1, 2, 4, 10, 20) if (high - low) / step <= 9 or step == 20)

    def at(size):
        return LEFT + (math.log2(size) - low) / (high - low) * PLOT_WIDTH

    return at, [(at(2**e), size_label(2**e) if e >= 0 else plain(2**e) + " B") for e in range(-(-low // step) * step, high + 1, step)]


def value_axis(values, logarithmic):
    """Returns the position of a value, and [(position, label)]."""
    if logarithmic:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        high += low == high

        def at(value):
            return BOTTOM - (math.log10(value) - low) / (high - low) * PLOT_HEIGHT

        return at, [(at(10**e), plain(10**e)) for e in range(low, high + 1)]
    power = 10 ** math.floor(math.log10(max(values) / 6))
    unit = next(f * power for f in (1, 2, 5, 10) if f * power >= max(values) / 6)
    count = math.ceil(max(values) / unit)
    return (lambda value: BOTTOM - value / (count * unit) * PLOT_HEIGHT), [(BOTTOM - i / count * PLOT_HEIGHT, plain(i * unit)) for i in range(count + 1)]


def draw(title, label, logarithmic, series):
    """Returns the SVG of the lines in series, as returned by make_series. The image is high enough for the legend."""
    x, x_ticks = size_axis([size for _, points in series for size, _ in points])
    y, y_ticks = value_axis([value for _, points in series for _, value in points], logarithmic)
    height = max(HEIGHT, TOP + 10 + LEGEND_ROW * len(series))
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
        '<g stroke="#dddddd" stroke-width="1">',
        *(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{RIGHT}" y2="{at:.1f}"/>' for at, _ in y_ticks),
        *(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{BOTTOM}"/>' for at, _ in x_ticks),
        "</g>",
        f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="#444444"/>',
        *(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>' for at, text in y_ticks),
        *(f'<text x="{at:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{text}</text>' for at, text in x_ticks),
        f'<text x="{LEFT + PLOT_WIDTH // 2}" y="{BOTTOM + 44}" text-anchor="middle">size in bytes</text>',
        f'<text transform="translate(20 {TOP + PLOT_HEIGHT // 2}) rotate(-90)" text-anchor="middle">{escape(label)}</text>',
    ]
    for i, (name, points) in enumerate(series):
        color = COLORS[i % len(COLORS)]
        style = f'stroke="{color}" stroke-width="2.2" stroke-linejoin="round"{DASHES[i // len(COLORS) % len(DASHES)]}'
        svg.append(f'<polyline fill="none" {style} points="{" ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in points)}"/>')
        for size, value in points:
            told = f"{escape(name)}: {size_label(size)}, {value:.4g}"
            svg.append(f'<circle cx="{x(size):.1f}" cy="{y(value):.1f}" r="3" fill="{color}"><title>{told}</title></circle>')
        if name:
            row = TOP + 10 + LEGEND_ROW * i
            svg.append(f'<line x1="{RIGHT + 20}" y1="{row}" x2="{RIGHT + 46}" y2="{row}" {style}/>')
            svg.append(f'<text x="{RIGHT + 54}" y="{row + 4}">{escape(name)}</text>')
    return "\n".join([*svg, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.csv")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.svg")
    parser.add_argument("--op", help="draw only this operation")
    parser.add_argument("--ranks", type=int, help="draw only results of this number of ranks")
    parser.add_argument("--metric", choices=METRICS, help="busbw if not given, or algbw for one rank, which has no other")
    parser.add_argument("--title")
    args = parser.parse_args()
    rows = []
    for name in args.files:
        with open(name, encoding="utf-8") as lines:
            rows += [row | {"file": name.rsplit("/", 1)[-1].removesuffix(".csv")} for row in read_results(name, lines)]
    rows = [row for row in rows if args.op in (None, row["collective"]) and args.ranks in (None, row["ranks"])]
    for metric in [args.metric] if args.metric else ["busbw", "algbw"]:
        column, label, logarithmic = METRICS[metric]
        series = make_series(rows, column)
        if series:
            break
    else:
        raise InputError("there is no result with a size to draw")
    # The default title has the attributes that all results have in common.
    common = [describe(a, rows[0]) for a in ("collective", "ranks", "path", "memory", "type", "redop", "placement") if len({row.get(a) for row in rows}) == 1]
    svg = draw(args.title or ", ".join(filter(None, common)), label, logarithmic, series)
    with open(args.output, "w", encoding="utf-8") as out:
        out.write(svg)


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as err:
        sys.exit(f"plot.py: {err}")
