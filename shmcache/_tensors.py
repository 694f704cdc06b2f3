"""Copies of tensors into and out of memory objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .memory import MemoryObj
    from .namespace import Namespace


def _bytes_of(t: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 where that keeps the shape: some types of one byte have no copy kernel."""
    import torch

    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def copy_in(namespace: Namespace, t: Any, fmt: Any, evict: bool, timeout: float | None) -> MemoryObj | None:
    """An unpublished object with the values of `t`; None when there is no memory.

    ValueError for tensors without plain strided memory (sparse, quantized, meta).
    """
    import torch

    t = t.detach() if isinstance(t, torch.Tensor) else torch.as_tensor(t)
    if t.layout is not torch.strided or t.is_quantized or t.is_meta:
        raise ValueError(f"put_tensor: a {t.dtype} tensor of layout {t.layout} on {t.device} has no plain memory")
    obj = namespace.allocate(tuple(t.shape), t.dtype, fmt=fmt, evict=evict, timeout=timeout)
    if obj is None:
        return None
    try:
        to = obj.tensor
        assert to is not None  # just allocated; None only when the cache is being closed beside us
        _bytes_of(to).copy_(_bytes_of(t.resolve_conj().resolve_neg()))
    except BaseException:
        obj.release()
        raise
    return obj


def copy_out(obj: MemoryObj, out: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of the values, in `out` when given."""
    t = obj.tensor
    if t is None:
        return None
    if out is None:
        import torch

        return t.reshape(-1).view(torch.uint8).clone().view(t.dtype).view(t.shape)
    if out.dtype is t.dtype:
        _bytes_of(out).copy_(_bytes_of(t))
        return out
    return out.copy_(t)
