"""`twell generate`: streams text from a model; `app` declares its options."""

from __future__ import annotations

from time import perf_counter

from rich.console import Console

from .._errors import reject


def run_generate(
    *, model: str, prompt: str, tokens: int | None, temperature: float, top_p: float, seed: int, dtype: str
) -> None:
    from ..train.checkpoints import find_model

    find_model(model)
    import torch  # these imports take seconds
    from transformers import TextStreamer

    from .. import recorded_paths
    from ..evaluation import check_ids, load_model
    from ..generation import accelerate_

    loaded, tokenizer = load_model(model, dtype=dtype)
    accelerate_(loaded)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(loaded.device)
    length = inputs.input_ids.shape[1]
    if not length:
        reject("prompt", repr(prompt), "text of at least one token")
    check_ids(inputs.input_ids, loaded)
    positions = loaded.config.max_position_embeddings
    if tokens is None:
        tokens = min(64, positions - length)
    if tokens < 1:
        reject("prompt", f"{length} tokens", f"fewer than the {positions} positions of the model")
    if length + tokens > positions:
        reject("tokens", tokens, f"at most {positions - length}: the model has {positions} positions")
    torch.manual_seed(seed)
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    start = perf_counter()
    with torch.inference_mode(), recorded_paths() as ran:
        output = loaded.generate(
            input_ids=inputs.input_ids,
            attention_mask=torch.ones_like(inputs.input_ids),
            max_new_tokens=tokens,
            pad_token_id=tokenizer.eos_token_id,
            streamer=TextStreamer(tokenizer, skip_special_tokens=True),
            **sampling,
        )
    seconds = perf_counter() - start
    made = output.shape[1] - length
    sparse = sum(piece.path != "dense" for piece in ran)
    shares = f"; {sparse / len(ran):.0%} of the feed-forward calls ran sparse" if ran else ""
    Console(stderr=True).print(
        f"{made} tokens in {seconds:.2f} s, {made / seconds:.1f} tokens/s{shares}",
        highlight=False,
        style="dim",
    )
