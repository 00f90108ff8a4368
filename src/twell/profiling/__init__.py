"""How a model's neurons behave on a text: `twell profile`, and what it writes.

profile = profile_model(model, tokenizer, text_windows(model, tokenizer, documents))
profile.save(Path("profile.json"))             a schema of its own, see docs/profile.md
read_profile("profile.json").layers[0].nnz
"""

from typing import TYPE_CHECKING, Any

from .schema import Profile, read_profile

if TYPE_CHECKING:
    from .run import profile_model

__all__ = ["Profile", "profile_model", "read_profile"]


def __getattr__(name: str) -> Any:
    """`profile_model` at first use: it brings transformers, which readers of a profile need not wait for."""
    if name != "profile_model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .run import profile_model

    return profile_model
