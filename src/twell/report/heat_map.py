"""The heat map: the sample's text, and under each token a stripe per layer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from .._html import escaped, visible
from .document import HeatMap

LEVELS = 9  # colours --h0 to --h8 of the style sheet
_LEADING = 8  # tokens of a sequence that wake far more neurons than all others: no first example


def heat_map(block: HeatMap) -> str:
    sample = block.sample
    most = max((count for layer in sample.nnz for count in layer), default=0)
    stripe = max(3, min(7, 84 // max(len(sample.nnz), 1)))
    tokens, begun = [], False  # begun: whether there is something on the line already
    for place, text in enumerate(sample.text):
        tokens.append(_token(text, [layer[place] for layer in sample.nnz], most, place))
        # A line break ends the line here, too: text is easier to read as it was set, without empty lines.
        if text.endswith("\n") and begun:
            tokens.append("<br>")
            begun = False
        else:
            begun = True
    first = min(_LEADING, len(sample.tokens) - 1)
    return (
        f'<div class="heat" data-first="{first}" style="--stripes:{stripe * len(sample.nnz)}px">'
        f"{_legend(most)}"
        f'<div class="tokens" role="group" aria-label="tokens of the sample">{"".join(tokens)}</div>'
        '<aside class="woken" aria-live="polite"></aside>'
        f'<script type="application/json">{_json(block)}</script></div>'
    )


def level(count: int, most: int) -> int:
    """0 for nothing, then evenly on a logarithmic scale: few tokens wake many times what others do."""
    if count == 0 or most == 0:
        return 0
    return 1 + min(int((LEVELS - 1) * math.log1p(count) / math.log1p(most)), LEVELS - 2)


def _token(text: str, counts: Sequence[int], most: int, place: int) -> str:
    height = 100 / len(counts)
    stops = []
    for layer, count in enumerate(counts):
        tone = f"var(--h{level(count, most)})"
        stops.append(f"{tone} {height * layer:.4g}% {height * (layer + 1):.4g}%")
    mean = sum(counts) / len(counts)
    words = escaped(
        f"{visible(text)}: {mean:.0f} active neurons per layer; by layer {', '.join(map(str, counts))}"
    )
    return (
        f'<button type="button" tabindex="{0 if place == 0 else -1}" aria-pressed="false" title="{words}">'
        f"<bdi>{escaped(visible(text))}</bdi>"
        f'<i style="background:linear-gradient({",".join(stops)})"></i></button>'
    )


def _legend(most: int) -> str:
    swatches = "".join(f'<i style="background:var(--h{number})"></i>' for number in range(LEVELS))
    return (
        '<div class="legend"><span class="scale">0'
        f"<span>{swatches}</span>{most:,}</span>"
        "<span>active neurons of a layer, on a logarithmic scale</span></div>"
    )


def _json(block: HeatMap) -> str:
    sample = block.sample
    content = {
        "tokens": sample.tokens,
        "sizes": list(block.neurons),
        "nnz": sample.nnz,
        "neurons": sample.neurons,
        "values": [[[_rounded(v) for v in token] for token in layer] for layer in sample.values],
    }
    # "</script>" and "<!--" would end or change the element; JSON may write "<" in another way.
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def _rounded(value: float) -> float:
    return float(f"{value:.3g}") if math.isfinite(value) else 0.0
