"""Train a small sparse Llama, remove the neurons that never fire, and let it write (two minutes on a CPU).

    python examples/train_prune_generate.py [--steps 300]

The text is Python's own standard library, so nothing is downloaded. `twell train`, `twell prune` and
`twell generate` do the same with checkpoints, resuming and evaluation.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

import twell
from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM

LENGTH, BATCH = 64, 16


def text() -> Tensor:
    """Bytes of some modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    joined = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-d]*.py")))
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def batch(data: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([data[start : start + LENGTH] for start in starts.tolist()]).long()


def main() -> None:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = text()
    config = SparseLlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        sparsity_l1_coeff=3e-3,
    )
    model = SparseLlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = batch(data, generator)
        output = model(ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            entropy, active = output.ce_loss.item(), output.l0.mean().item()
            print(f"step {step:4}: cross-entropy {entropy:.2f}, {active:5.1f} of 512 neurons active")

    model.eval()
    batches = [batch(data, generator) for _ in range(40)]
    with torch.no_grad():
        before = torch.stack([model(ids, labels=ids).ce_loss for ids in batches]).mean()
    print(twell.prune_(model, data=batches))
    with torch.no_grad():
        after = torch.stack([model(ids, labels=ids).ce_loss for ids in batches]).mean()
    print(f"cross-entropy {before:.4f} -> {after:.4f} on the text that was counted")

    prompt = torch.tensor([list(b"def main(")])
    written = model.generate(prompt, max_new_tokens=60, do_sample=False, pad_token_id=0)[0]
    print(bytes(written.tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
