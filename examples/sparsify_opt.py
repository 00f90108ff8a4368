"""Run a stock OPT on the active neurons: sparsify it, see what it gains, save it as stock.

python examples/sparsify_opt.py                      a small one with random weights, on the CPU
python examples/sparsify_opt.py facebook/opt-1.3b    a real one, from the Hub or a folder
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

import twell


def small_opt() -> OPTForCausalLM:
    """Biases far below zero keep most neurons silent, as training with L1 does."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=1000,
        hidden_size=256,
        ffn_dim=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=256,
    )
    model = OPTForCausalLM(config)
    for layer in model.model.decoder.layers:
        torch.nn.init.normal_(layer.fc1.weight, std=256**-0.5)
        torch.nn.init.constant_(layer.fc1.bias, -2.0)
    return model


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else None
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_opt() if name is None else AutoModelForCausalLM.from_pretrained(name)
    model = model.to(place).eval().requires_grad_(False)
    ids = torch.randint(10, 1000, (1, 512), device=place)
    wanted = model(ids).logits

    print(twell.sparsify_(model))
    found = model(ids).logits
    print(f"\nlogits differ by {(found - wanted).abs().max() / wanted.abs().max():.1e} of the largest\n")
    print(twell.explain(model, ids))

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stock = AutoModelForCausalLM.from_pretrained(folder).to(place).eval()
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))
    print(f"\nsaved and loaded as a stock {type(stock).__name__}: {'the same' if same else 'OTHER'} weights")


if __name__ == "__main__":
    main()
