"""How a model's neurons behave on a text: `twell profile`, and what it writes.

profile = profile_model(model, tokenizer, text_windows(model, tokenizer, documents))
profile.save(Path("profile.json"))             a schema of its own, see docs/profile.md
read_profile("profile.json").layers[0].nnz
"""

from .run import profile_model
from .schema import Profile, read_profile

__all__ = ["Profile", "profile_model", "read_profile"]
