"""Where metrics go besides the run's folder: transformers' integrations."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from .._checks import reject

# Those that transformers does not list, although it has them: name -> the module that they need.
_UNLISTED = {"flyte": "flytekit", "azure_ml": "azureml"}


def check_reporters(names: Sequence[str]) -> None:
    """Refuse what is unknown or not installed. Transformers would find out once the text is tokenised."""
    if tuple(names) in ((), ("none",), ("all",)):  # all: of those installed
        return
    known = ", ".join(INTEGRATION_TO_CALLBACK)
    installed = set(get_available_reporting_integrations())
    installed |= {name for name, module in _UNLISTED.items() if find_spec(module) is not None}
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            reject("train.report", repr(name), f"any of {known}")
        if name not in installed:
            here = ", ".join(sorted(installed)) or "none"
            reject(
                "train.report",
                f"{name!r}, whose package is not installed",
                f"what is installed here ({here}), or install it first",
            )
