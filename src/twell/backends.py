"""The registry of implementations that a plan can choose from.

A backend says what it cannot run and why, computes the forward, and may bring a backward of its own.
New kernels join with `register_backend`; nothing else in the library names them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import reject
from .kernels import cpu_training
from .kernels.args import RUN, FfnArgs, FfnOutput, Gradients, Saved, Skip
from .kernels.cpu import cpu_forward
from .kernels.cpu_choice import sparse_can_pay
from .kernels.cpu_weights import CpuSite, site_of
from .kernels.csr import SAMPLED_DOT_AVAILABLE
from .kernels.dense import dense_backward, dense_forward
from .kernels.gpu.sizes import list_sizes

PATHS = ("auto", "dense", "row", "block")
_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is known of a call before it runs: everything a backend may refuse.

    tokens:    a power of two at or above the number of tokens; None where a trace leaves it open.
    training:  whether gradients will be asked for.
    """

    device_type: str
    dtype: torch.dtype
    tokens: int | None
    hidden: int
    neurons: int
    gated: bool
    training: bool


Forward = Callable[[FfnArgs, str, int, bool], FfnOutput]
Backward = Callable[[FfnArgs, Tensor, Tensor | None, FfnArgs], Gradients]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training kernels whose backward takes over something from the forward.

    forward:   (args, path, block_rows, record) -> FfnOutput and what the backward wants saved.
    backward:  (args, saved, block_rows, grad_y, grad_l1, needed) -> gradients of the seven tensor arguments.
    sizes:     (tokens, neurons, block_rows) -> sizes of the two saved tensors.
    skip:      (args, hooked) -> whether an automatic plan should leave this step, and how many more of its
               kind, to dense PyTorch and its autograd. hooked: whether hooks watch what is saved, as those of
               a checkpoint do; the answer must then be the same when the step is computed again.
    path:      what an automatic plan runs if not; with hooks, "auto".
    adds:      whether `backward` takes an `Existing` more, and gives None where it has added to that.
    """

    forward: Callable[[FfnArgs, str, int, bool], tuple[FfnOutput, Saved]]
    backward: Callable[..., Gradients]
    sizes: Callable[[int, int, int], tuple[int, int]]
    skip: Callable[[FfnArgs, bool], Skip]
    path: str = "auto"
    adds: bool = False


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of the feed-forward block.

    name:        how plans and logs call it.
    paths:       the plan paths it implements, of "auto", "dense", "row", "block".
    refusal:     Site -> why it cannot run there, or None if it can.
    worthwhile:  Site -> whether an automatic plan should try it (it may still finish densely).
    forward:     (args, path, block_rows, record) -> FfnOutput; block_rows 0 means its default.
    skip:        FfnArgs -> whether an automatic plan should leave this call, and how many more of its kind,
                 to dense PyTorch. Asked before eager calls: what costs less than running the op to find out.
    backward:    (args, grad_y, grad_l1, needed) -> gradients of the seven tensor arguments; None means the
                 dense backward.
    training:    kernels for training that do more than that; None if there are none.
    """

    name: str
    paths: frozenset[str]
    refusal: Callable[[Site], str | None]
    forward: Forward
    worthwhile: Callable[[Site], bool] = lambda site: True
    skip: Callable[[FfnArgs], Skip] | None = None
    backward: Backward | None = None
    training: Training | None = None

    @property
    def trains(self) -> bool:
        """Whether it has a backward of its own."""
        return self.backward is not None or self.training is not None

    def refuses(self, site: Site, path: str) -> str | None:
        """Why this backend cannot run `path` at `site`, or None."""
        if path not in self.paths:
            return f"it has no {path!r} path"
        return self.refusal(site)


_BACKENDS: dict[str, Backend] = {}
_version = 0


def register_backend(backend: Backend) -> None:
    """Add a backend; automatic plans try later registrations first, so specialised ones win."""
    if backend.name in _BACKENDS:
        reject("backend.name", repr(backend.name), f"a new name, not one of {backend_names()}")
    unknown = backend.paths - set(PATHS)
    if unknown:
        reject("backend.paths", sorted(unknown), f"names from {PATHS}")
    _BACKENDS[backend.name] = backend
    _bump_version()


def unregister_backend(name: str) -> None:
    """Remove a backend that `register_backend` added."""
    del _BACKENDS[get_backend(name).name]
    _bump_version()


def registry_version() -> int:
    """A number that changes with every registration, for caches of decisions."""
    return _version


def _bump_version() -> None:
    global _version
    _version += 1


def get_backend(name: str) -> Backend:
    if name not in _BACKENDS:
        reject("backend", repr(name), " | ".join(map(repr, backend_names())))
    return _BACKENDS[name]


def backend_names() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def candidates() -> tuple[Backend, ...]:
    """Sparse backends in the order in which automatic plans try them."""
    return tuple(b for b in reversed(_BACKENDS.values()) if b.name != "dense")


def _cpu_refusal(site: Site) -> str | None:
    if site.device_type != "cpu":
        return f"the tensors are on {site.device_type!r}, not on the CPU"
    if not SAMPLED_DOT_AVAILABLE:
        return "this torch build has no sampled matrix product for CSR tensors on the CPU"
    return None


def _cpu_worthwhile(site: Site) -> bool:
    if site.tokens is None:
        return True
    return sparse_can_pay(
        CpuSite(
            tokens=site.tokens,
            hidden=site.hidden,
            neurons=site.neurons,
            dtype=site.dtype,
            gated=site.gated,
            neuron_major_down=True,  # does not matter here
            threads=torch.get_num_threads(),
        )
    )


def _cpu_skip(args: FfnArgs) -> Skip:
    """For the very number of tokens, of which `_cpu_worthwhile` knows the power of two above."""
    if sparse_can_pay(site_of(args)):
        return RUN
    return Skip(True, 255, lambda calls: None)


def _gpu_refusal(site: Site) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if site.device_type != "cuda":
        return f"the tensors are on {site.device_type!r}, not on a CUDA device"
    if torch.version.hip is not None:
        return "its kernels are written for NVIDIA GPUs"
    if site.dtype not in _GPU_DTYPES:
        return f"its kernels take {', '.join(map(str, _GPU_DTYPES))}, not {site.dtype}"
    if site.hidden % 8 or site.neurons % 8:
        return f"D and H must be multiples of 8, not {site.hidden} and {site.neurons}"
    return None


def _gpu_skip(args: FfnArgs) -> Skip:
    from .kernels.gpu.choice import skips_eager_calls

    return skips_eager_calls(args)


def _gpu_forward(args: FfnArgs, path: str, block_rows: int, record: bool) -> FfnOutput:
    # Imported with the first call: Triton takes half a second, and may not be there.
    from .kernels.gpu.forward import gpu_forward

    return gpu_forward(args, path, block_rows, record)


def _gpu_train_forward(args: FfnArgs, path: str, block_rows: int, record: bool) -> tuple[FfnOutput, Saved]:
    from .kernels.gpu.training import train_forward

    return train_forward(args, path, block_rows, record)


def _gpu_train_backward(*arguments) -> Gradients:
    from .kernels.gpu.training import train_backward

    return train_backward(*arguments)


def _gpu_train_skip(args: FfnArgs, hooked: bool) -> Skip:
    from .kernels.gpu.training import skips_step

    return skips_step(args, hooked)


register_backend(
    Backend(
        name="dense",
        paths=frozenset({"dense"}),
        refusal=lambda site: None,
        forward=lambda args, path, block_rows, record: dense_forward(args, record),
        backward=dense_backward,
    )
)
register_backend(
    Backend(
        name="cpu",
        paths=frozenset(PATHS),
        refusal=_cpu_refusal,
        worthwhile=_cpu_worthwhile,
        forward=cpu_forward,
        skip=_cpu_skip,
        training=Training(
            forward=cpu_training.train_forward,
            backward=cpu_training.train_backward,
            sizes=cpu_training.sizes,
            skip=cpu_training.skips_step,
        ),
    )
)
register_backend(
    Backend(
        name="gpu",
        paths=frozenset(PATHS),
        refusal=_gpu_refusal,
        # float32 products run on tensor cores at reduced precision or not at all: dense is as good.
        worthwhile=lambda site: site.device_type == "cuda" and site.dtype != torch.float32,
        forward=_gpu_forward,
        skip=_gpu_skip,
        training=Training(
            forward=_gpu_train_forward,
            backward=_gpu_train_backward,
            sizes=list_sizes,
            skip=_gpu_train_skip,
            path="block",
            adds=True,
        ),
    )
)
