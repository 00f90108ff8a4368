"""Engines run in this process, so that tests see which paths ran; vLLM's caches stay out of the home."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
if "VLLM_CACHE_ROOT" not in os.environ:
    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp(prefix="twell-vllm-")
    atexit.register(shutil.rmtree, os.environ["VLLM_CACHE_ROOT"], ignore_errors=True)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A folder with tiny models, by name, and their tokenizer."""
    from ..serving.models import save_all

    root = tmp_path_factory.mktemp("models")
    save_all(root)
    return root
