"""How large the backend's memory is, how it is aligned, and on which NUMA nodes it lies.

The rules are those of LMCache's LocalCPUBackend (0.5.6). One differs in what it means: a segment is
bought once, so `max_local_cpu_size`, which LMCache counts for each rank, is multiplied by the ranks of
this host, or by 1 when all of them read one copy (MLA).
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from .errors import ConfigurationError

if TYPE_CHECKING:
    import torch

_GIB = 1 << 30
_log = logging.getLogger("shmcache")


@dataclass
class NUMAMapping:
    """NUMA node of each GPU."""

    gpu_to_numa_mapping: dict[int, int]


def available_memory_gib() -> float:
    """Memory that programs could still get; 0.0, logged, when the system does not say."""
    try:
        return float(psutil.virtual_memory().available) / _GIB
    except Exception as e:
        _log.warning("the available memory is not known: %s", e)
        return 0.0


def numa_mapping(config: Any) -> NUMAMapping | None:
    """What `numa_mode` asks for. None for no placement, and where "auto" cannot find out.

    ConfigurationError for an unknown mode, or "manual" without `gpu_to_numa_mapping`.
    """
    mode = config.numa_mode
    if mode is None:
        return None
    if mode == "manual":
        mapping = (config.extra_config or {}).get("gpu_to_numa_mapping")
        if not mapping:
            raise ConfigurationError(
                "numa_mode is 'manual', but extra_config has no gpu_to_numa_mapping",
                hint="give a node for each GPU, such as {0: 0, 1: 1}",
            )
        return NUMAMapping({int(gpu): int(node) for gpu, node in mapping.items()})  # keys of JSON are str
    if mode == "auto":
        return _of_current_device()
    raise ConfigurationError(f"numa_mode is {mode!r}: 'manual', 'auto' or None")


def _of_current_device() -> NUMAMapping | None:
    import torch

    try:
        device = torch.cuda.current_device()
        p: Any = torch.cuda.get_device_properties(device)
        bus = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        with open(f"/sys/bus/pci/devices/{bus}/numa_node", encoding="ascii") as f:
            node = int(f.read())
    except Exception as e:
        _log.warning("the NUMA node of the GPU is not known: %s", e)
        return None
    return NUMAMapping({device: node}) if node >= 0 else None  # the kernel says -1 for none


def numa_of_segment(config: Any) -> str | list[int] | None:
    """Where a segment's regions go: all ranks use all of it, so over all nodes in question; None: no policy."""
    mapping = numa_mapping(config)
    if config.numa_mode == "auto":
        return "interleave"
    return sorted(set(mapping.gpu_to_numa_mapping.values())) if mapping else None


def is_power_of_two(value: int) -> bool:
    """Whether `value` is 1, 2, 4, ..."""
    return value > 0 and value & (value - 1) == 0


def alignment(config: Any) -> int | None:
    """Alignment that the configuration asks for, in this order; None: the allocator's default.

    1. `local_cpu.pinned_align_bytes`
    2. `rust_raw_block.block_align`, when there is a `device_path` and either io_uring, or O_DIRECT
       without `align_local_cpu_allocator: false`

    ValueError unless it is a power of two.
    """
    extra = config.extra_config or {}
    explicit = extra.get("local_cpu.pinned_align_bytes")
    if explicit is not None:
        return _checked(explicit, "local_cpu.pinned_align_bytes")
    block = "rust_raw_block."
    uring = (
        str(extra.get(block + "io_engine") or "").lower() == "io_uring"
        or bool(extra.get(block + "use_iouring", False))
        or bool(extra.get(block + "use_uring", False))
    )
    direct = extra.get(block + "use_odirect", False) and extra.get(block + "align_local_cpu_allocator", True)
    if not extra.get(block + "device_path") or not (uring or direct):
        return None
    return _checked(extra.get(block + "block_align", 4096), block + "block_align")


def _checked(value: Any, name: str) -> int:
    try:
        found = int(value)
    except (TypeError, ValueError):
        found = 0
    if not is_power_of_two(found):
        raise ValueError(f"extra_config[{name!r}] is {value!r}: it must be a positive power of two")
    return found


def extra_value(config: Any, key: str, default: Any) -> Any:
    """A value of `extra_config`, or the default."""
    return (config.extra_config or {}).get(key, default)


def shapes_of(config: Any, metadata: Any) -> tuple[list[torch.Size], list[torch.dtype]]:
    """Shape and dtype of each group of layers of a full chunk; of `kv_shape`, where the metadata knows no groups."""
    if hasattr(metadata, "get_shapes"):
        return list(metadata.get_shapes()), list(metadata.get_dtypes())
    import torch

    layers, kv, _, heads, head = metadata.kv_shape
    return [torch.Size((kv, layers, config.chunk_size, heads * head))], [metadata.kv_dtype]


def ranks_of_host(config: Any, metadata: Any) -> tuple[int, int]:
    """First worker id of this host, and how many ranks it has.

    From `local_world_size`; `local_worker_id` says nothing, since engines put the number of the GPU there.
    `extra_config["shmcache.first_rank"]` and `["shmcache.local_ranks"]` win, for engines that put the
    world's size into `local_world_size` on several hosts. ConfigurationError when they do not fit the world.
    """
    world = int(metadata.world_size)
    extra = config.extra_config or {}
    n = int(extra.get("shmcache.local_ranks") or getattr(metadata, "local_world_size", None) or world)
    n = max(1, min(n, world))
    first = int(extra.get("shmcache.first_rank", metadata.worker_id // n * n))
    if not 0 <= first < world:
        raise ConfigurationError(f"shmcache.first_rank is {first}: the world has ranks 0 to {world - 1}")
    return first, min(n, world - first)


def kv_digest(config: Any, metadata: Any) -> str:
    """What the bytes of a model's chunks depend on beside its name: shapes, format, and the revision that was given.

    The same for all ranks, so that how many layers there are counts only for a rank that is alone: stages
    of a pipeline have unequal numbers.
    """
    alone = metadata.world_size == 1
    sizes = {
        (int(shape[0]), int(shape[1]) if alone else 0, int(shape[3]), str(dtype))
        for shape, dtype in zip(*shapes_of(config, metadata), strict=True)
    }
    facts = [
        sorted(sizes), bool(config.use_layerwise), bool(config.enable_blending),
        str(extra_value(config, "shmcache.revision", "")),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def one_copy(config: Any, metadata: Any) -> bool:
    """Whether one rank's copy serves all: MLA, unless `save_only_first_rank` is switched off."""
    if metadata is None or not metadata.use_mla:
        return False
    return bool(extra_value(config, "save_only_first_rank", True))


def effective_gib(configured: float, config: Any, metadata: Any) -> float:
    """`configured`, under MLA at most what is available less `reserve_local_cpu_size`.

    ConfigurationError when that leaves nothing.
    """
    if not one_copy(config, metadata):
        return configured
    available = available_memory_gib()
    if available <= 0:
        _log.warning("using the configured size of %.2f GiB", configured)
        return configured
    effective: float = min(configured, max(0.0, available - config.reserve_local_cpu_size))
    if effective <= 0:
        raise ConfigurationError(
            f"reserve_local_cpu_size is {config.reserve_local_cpu_size} GiB and {available:.2f} GiB are available: "
            "nothing is left for the cache"
        )
    if effective < configured:
        _log.info("cache size %.2f GiB instead of %.2f GiB: %.2f GiB are available, %.2f GiB of them reserved",
                  effective, configured, available, config.reserve_local_cpu_size)  # fmt: skip
    return effective


def configured_gib(config: Any, metadata: Any) -> float:
    """What the configuration says: with one copy for all, the host of the first rank may have a size of its own."""
    size = float(config.max_local_cpu_size)
    if one_copy(config, metadata) and _is_first_host(config, metadata):
        size = float(extra_value(config, "first_rank_max_local_cpu_size", size))
    return size


def _is_first_host(config: Any, metadata: Any) -> bool:
    first, n = ranks_of_host(config, metadata)
    return bool(first <= getattr(metadata, "first_rank", 0) < first + n)


def extent_bytes(nbytes: int, align: int) -> int:
    """Bytes that an object really takes: see native/core/extents.h."""
    granules = -(-nbytes // align)
    if granules >= 64:
        step = 1 << granules.bit_length() - 6
        granules = -(-granules // step) * step
    return granules * align
