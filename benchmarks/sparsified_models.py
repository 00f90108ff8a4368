"""Stock transformers models, sparsified in place; writes benchmarks/results/sparsified_models.jsonl.

Models are built from configs, with random weights whose selectors are set so that every layer's neurons fire
at given rates on the layer's real input: "skewed" as a model trained with L1 has them (log-normal rates, 30%
dead), "even" as published ReLU models (all neurons alike, none dead).

    prefill   a forward pass of 4 x 2,048 tokens, layers compiled, over stock layers compiled
    eager     the same without a compiler
    decode    one step of the blocks alone, of all layers in one CUDA graph: 1 and 8 tokens

Outputs are compared with stock in the same run. On an idle GPU:

    python benchmarks/sparsified_models.py [--only NAME ...] [--commit HASH] [--out FILE]

--device cpu measures a 4-layer OPT of D 1024, H 4096 with 1 and 512 tokens, eager, float32.
--device cpu --tiny --out FILE tries the script with small shapes.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import twell
from _ffn import console, save
from twell.measure import Record, compare, make_record
from twell.sparsify.blocks import named_blocks
from twell.sparsify.twin import BlockTwin
from twell.synthetic import firing_rates

RESULTS = Path(__file__).parent / "results" / "sparsified_models.jsonl"
CPU_RESULTS = RESULTS.with_name("sparsified_models_cpu.jsonl")
CONSTANT = 8.0  # feature 0 of every embedding, which no layer changes
VOCABULARY = 32_000


@dataclass(frozen=True)
class Shape:
    """A stock family, its sizes, and the rates to measure: (share of active neurons, skewed)."""

    family: str
    hidden: int
    neurons: int
    layers: int
    heads: int
    rates: tuple[tuple[float, bool], ...]


RATES = ((0.01, True), (0.1, False), (0.3, False))
SHAPES = {
    "OPT-1.3B": Shape("opt", 2048, 8192, 24, 32, RATES),
    "Nemotron-4B": Shape("nemotron", 3072, 9216, 32, 24, RATES),
    "Llama-7B": Shape("llama", 4096, 11008, 32, 32, RATES),
}
CPU_SHAPES = {"OPT, 4 layers": Shape("opt", 1024, 4096, 4, 16, ((0.01, True),))}
TINY = {
    "OPT": Shape("opt", 64, 256, 2, 4, ((0.05, True),)),
    "Nemotron": Shape("nemotron", 64, 256, 2, 4, ((0.05, False),)),
    "Llama": Shape("llama", 64, 256, 2, 4, ((0.05, False),)),
}


def build(shape: Shape, device: str, dtype: torch.dtype, vocabulary: int) -> nn.Module:
    """The stock backbone."""
    from transformers import AutoModel, LlamaConfig, NemotronConfig, OPTConfig

    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": 4096,
    }
    configs = {
        "opt": lambda: OPTConfig(**sizes, ffn_dim=shape.neurons, word_embed_proj_dim=shape.hidden),
        "nemotron": lambda: NemotronConfig(
            **sizes, intermediate_size=shape.neurons, num_key_value_heads=max(shape.heads // 3, 1)
        ),
        "llama": lambda: LlamaConfig(
            **sizes, intermediate_size=shape.neurons, num_key_value_heads=shape.heads, hidden_act="relu"
        ),
    }
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModel.from_config(configs[shape.family](), dtype=dtype).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()[:, 0] = CONSTANT
        for name, weight in model.named_parameters():
            # What writes into the residual stream leaves feature 0 alone.
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight")):
                weight.mul_(0.1)[0] = 0
    return model


@torch.no_grad()
def calibrate(model: nn.Module, ids: Tensor, share: float, skewed: bool) -> float:
    """Set each neuron's rate on `ids`, layer by layer; returns the mean number of active neurons per token.

    A neuron's threshold is a weight of feature 0, or its bias.
    """
    generator = torch.Generator().manual_seed(1)
    counted: list[float] = []

    def set_rates(block: BlockTwin, inputs: tuple[Tensor]) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
        weight, bias = (block.roles.gate or block.roles.up).weight_and_bias()
        neurons = weight.shape[0]
        options = {"sigma": 2.0, "dead": 0.3} if skewed else {"sigma": 0.0, "dead": 0.0}
        rates = firing_rates(neurons, share * neurons, **options, generator=generator).to(x.device)
        weight.normal_(std=weight.shape[1] ** -0.5)[:, 0] = 0
        if bias is not None:
            bias.zero_()
        pre = (x @ weight.float().mT).sort(0, descending=True).values
        place = (rates * len(pre)).round().long().clamp(max=len(pre) - 1)
        threshold = pre.gather(0, place.unsqueeze(0)).squeeze(0)
        threshold = torch.where(rates == 0, pre[0] + 4 * pre.std(), threshold)
        if bias is not None:
            bias.copy_(-threshold)
        else:
            weight[:, 0] = -threshold / x[:, 0].mean()
        bias = None if bias is None else bias.float()
        counted.append(
            (nn.functional.linear(x[:1024], weight.float(), bias) > 0).sum().item() / len(x[:1024])
        )

    hooks = [block.register_forward_pre_hook(set_rates) for _, block in named_blocks(model)]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return sum(counted) / len(counted)


class Bench:
    def __init__(self, device: str, dtype: torch.dtype, repetitions: int) -> None:
        self.device, self.dtype, self.repetitions = device, dtype, repetitions
        self.records: list[Record] = []

    def compare(
        self, what: str, baseline: str, runs: dict[str, Callable[[], object]], shape: dict, nnz: float, error
    ) -> None:
        timings = compare(runs, device=self.device, warmup=4, repetitions=self.repetitions)
        stock, ours = timings["stock"], timings["ours"]
        record = make_record(
            f"sparsified/{what}",
            ours,
            unit="s",
            baseline=baseline,
            baseline_timing=stock,
            shape=shape,
            sparsity={"nnz": nnz},
            error=error,
            device=self.device,
        )
        self.records.append(record)
        gain = stock.median / ours.median
        console.print(
            f"{what:10} {shape['model']:14} M {shape['M']:6} nnz {nnz:7.1f}: {stock.median * 1e3:9.3f} -> "
            f"{ours.median * 1e3:9.3f} ms  {gain:.2f}x  difference {error:.1e}",
            highlight=False,
        )


@torch.no_grad()
def measure(bench: Bench, name: str, shape: Shape, batches: list[tuple[int, int]], vocabulary: int) -> None:
    stock = build(shape, bench.device, bench.dtype, vocabulary)
    many = torch.randint(vocabulary, (1, 2048), device=bench.device)
    cuda = bench.device == "cuda"
    for share, skewed in shape.rates:
        sparse = copy.deepcopy(stock)  # another model: layers remember how active they were
        report = twell.sparsify_(sparse)
        if len(report.blocks) != shape.layers:
            raise SystemExit(f"{name}: {report}")
        nnz = calibrate(sparse, many, share, skewed)
        stock.load_state_dict(sparse.state_dict())
        for batch, length in batches:
            ids = torch.randint(vocabulary, (batch, length), device=bench.device)
            described = {
                "model": name,
                "M": batch * length,
                "D": shape.hidden,
                "H": shape.neurons,
                "layers": shape.layers,
                "dtype": str(bench.dtype).removeprefix("torch."),
                "skewed": skewed,
            }
            runs = {
                "stock": lambda ids=ids: stock(ids, use_cache=False),
                "ours": lambda ids=ids, model=sparse: model(ids, use_cache=False),
            }
            for _ in range(8):  # until the layers know how active they are
                found = runs["ours"]().last_hidden_state
            explained = twell.explain(sparse, {"input_ids": ids, "use_cache": False})
            described["union"] = f"{sum(layer.union for layer in explained) / len(explained):.2f}"
            paths = Counter(layer.forward for layer in explained)
            described["paths"] = ", ".join(f"{count} {path}" for path, count in paths.items())
            console.print(f"union {described['union']}, ran {described['paths']}", highlight=False)
            wanted = runs["stock"]().last_hidden_state
            error = (found.float() - wanted.float()).norm().item() / wanted.float().norm().item()
            bench.compare("eager", "stock, eager", runs, described, nnz, error)
            if cuda:
                for model in (stock, sparse):
                    for layer in layers_of(model):
                        layer.compile()
                found = runs["ours"]().last_hidden_state
                wanted = runs["stock"]().last_hidden_state
                error = (found.float() - wanted.float()).norm().item() / wanted.float().norm().item()
                bench.compare("prefill", "stock, layers compiled", runs, described, nnz, error)
                for model in (stock, sparse):
                    for layer in layers_of(model):
                        layer._compiled_call_impl = None
        if cuda:
            decode(bench, name, shape, sparse, nnz, skewed)
        del sparse, runs
        gc.collect()


def layers_of(model: nn.Module) -> nn.ModuleList:
    return model.decoder.layers if hasattr(model, "decoder") else model.layers


def decode(bench: Bench, name: str, shape: Shape, model: nn.Module, nnz: float, skewed: bool) -> None:
    """The blocks of all layers, each on its own real input, in one CUDA graph."""
    from ffn_inference import graphed

    blocks = [block for _, block in named_blocks(model)]
    for tokens in (1, 8):
        ids = torch.randint(VOCABULARY, (1, tokens), device=bench.device)
        inputs = inputs_of(model, ids, blocks)

        def dense(block: BlockTwin, x: Tensor) -> Tensor:
            up, down, gate, up_bias, down_bias, gate_bias = block._plain_weights()
            hidden = nn.functional.linear(x, up, up_bias)
            if gate is None:
                return nn.functional.linear(block.activation(hidden), down, down_bias)
            factor = block.activation.factor(hidden)
            hidden = block.activation(nn.functional.linear(x, gate, gate_bias)) * factor
            return nn.functional.linear(hidden, down, down_bias)

        pairs = list(zip(blocks, inputs, strict=True))
        for block, x in pairs:
            for _ in range(8):
                block(x)
        torch.cuda.synchronize()
        theirs, wanted = graphed([lambda b=block, x=x: dense(b, x) for block, x in pairs])
        ours, found = graphed([lambda b=block, x=x: b(x) for block, x in pairs])
        ours()
        theirs()
        error = (found.float() - wanted.float()).norm().item() / max(wanted.float().norm().item(), 1e-30)
        described = {
            "model": name,
            "M": tokens,
            "D": shape.hidden,
            "H": shape.neurons,
            "layers": shape.layers,
            "dtype": str(bench.dtype).removeprefix("torch."),
            "skewed": skewed,
        }
        bench.compare(
            "decode", "stock blocks, CUDA graph", {"stock": theirs, "ours": ours}, described, nnz, error
        )


def inputs_of(model: nn.Module, ids: Tensor, blocks: list[BlockTwin]) -> list[Tensor]:
    inputs: list[Tensor] = []

    def keep(block: BlockTwin, given: tuple[Tensor]) -> None:
        inputs.append(given[0].clone())

    hooks = [block.register_forward_pre_hook(keep) for block in blocks]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return inputs


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(SHAPES), help="models to measure")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--commit", default=None, help="what to record where git cannot say")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    cpu = options.device == "cpu"
    bench = Bench(options.device, torch.float32 if cpu else torch.bfloat16, 15 if cpu else 12)
    shapes = TINY if options.tiny else CPU_SHAPES if cpu else SHAPES
    batches = [(1, 1), (1, 64 if options.tiny else 512)] if cpu else [(4, 2048)]
    out = options.out or (CPU_RESULTS if cpu else RESULTS)
    for name, shape in shapes.items():
        if not options.only or name in options.only:
            measure(bench, name, shape, batches, 1000 if cpu else VOCABULARY)
            save(bench.records, out, options.commit)
            gc.collect()
            if not cpu:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
