"""`python -m twell.hf serve FOLDER ...` is `transformers serve FOLDER ...`, which then knows our models.

transformers' server takes a model's class from its own package, by name.
"""

from __future__ import annotations

import transformers

from .families import FAMILIES

if __name__ == "__main__":
    from transformers.cli.transformers import main

    for family in FAMILIES.values():
        setattr(transformers, family.sparse_class.__name__, family.sparse_class)
    main()
