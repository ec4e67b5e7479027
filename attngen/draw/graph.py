"""The graph of a variant: operands above the nodes that read them."""

from __future__ import annotations

import textwrap

import networkx as nx

from attngen.draw.picture import Line, Picture, Rect, Text
from attngen.ir.graph import Contract, Fold, Graph, Input, Mask, Node, Output, RowReduce

WIDE, GAP, DOWN, ROW, CHARS = 354, 24, 44, 15, 49
KINDS: dict[type[Node], str] = {
    Input: "input", Output: "input", Contract: "tensor", Mask: "masked", Fold: "fold", RowReduce: "fold",
}  # fmt: skip
LEGEND = (
    ("tensor", "contraction: tensor cores"), ("map", "a value for each element"), ("masked", "mask"),
    ("fold", "reduction over the keys"), ("input", "input or output"),
)  # fmt: skip


def graph_picture(graph: Graph) -> Picture:
    """Nodes in layers by their longest path from an input; the outputs' own nodes are left out where a node has the
    name already."""
    nodes = {n.id: n for n in graph.nodes}
    layers = [sorted(layer, key=list(nodes).index) for layer in nx.topological_generations(graph.edges)]
    # an input stands directly above its first reader
    at = {n: k for k, layer in enumerate(layers) for n in layer}
    for n in list(at):
        readers = [at[r] for r in graph.edges.successors(n)]
        if isinstance(nodes[n], Input) and readers:
            at[n] = min(readers) - 1
    rows: list[list[str]] = [[n for n in nodes if at[n] == k] for k in range(len(layers))]
    place: dict[str, float] = {}
    for row in rows:  # below the middle of what it reads
        def middle(n: str) -> float:
            above = [place[p] for p in graph.edges.predecessors(n) if p in place]
            return sum(above) / len(above) if above else 1e6

        row.sort(key=lambda n: (middle(n), list(nodes).index(n)))
        place.update({n: float(k - (len(row) - 1) / 2) for k, n in enumerate(row)})
    most = max(len(r) for r in rows)
    width = most * WIDE + (most - 1) * GAP
    rects: list[Rect] = []
    texts: list[Text] = []
    box: dict[str, tuple[float, float, float]] = {}  # middle, top, bottom
    y = 0.0
    for row in rows:
        heights = [28 + ROW * len(_lines(nodes[n])) for n in row]
        for n, height in zip(row, heights, strict=True):
            x = width / 2 + place[n] * (WIDE + GAP) - WIDE / 2
            rects.append(Rect(x, y, WIDE, height, KINDS.get(type(nodes[n]), "map"), nodes[n].text()))
            axes = ", ".join(a.value for a in nodes[n].axes)
            texts.append(Text(x + 10, y + 17, n, "strong"))
            texts.append(Text(x + WIDE - 10, y + 17, f"[{axes}]" if axes else "", "small", "end"))
            texts += [Text(x + 10, y + 33 + ROW * k, line, "code") for k, line in enumerate(_lines(nodes[n]))]
            box[n] = x + WIDE / 2, y, y + height
        y += max(heights) + DOWN
    lines = []
    for a, b in graph.edges.edges:
        (xa, _, below), (xb, above, _) = box[a], box[b]
        lines.append(Line(((xa, below), (xb, above)), "edge", smooth=True))
    return Picture(f"graph {graph.name}", width, y - DOWN, tuple(rects), tuple(lines), tuple(texts))


def _lines(node: Node) -> list[str]:
    if isinstance(node, Input):
        return []
    parts = [part.strip() for part in node.text().split("\n")]
    return [line for part in parts for line in textwrap.wrap(part, CHARS, subsequent_indent="  ")]
