"""LMCache's settings and metadata, as far as the CPU backend reads them.

LMCache's own objects work in their place. Settings come from code, a YAML file, and `LMCACHE_*`
variables, read by pydantic-settings; the first that says something wins.
"""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from ._sizes import parse_size
from .policies import check_policy

if TYPE_CHECKING:
    import torch

__all__ = ["EngineConfig", "EngineMetadata", "LayerGroup"]

_GIB = 1 << 30
_log = logging.getLogger("shmcache")


def _gib(value: Any) -> Any:
    """A number is GiB; a str may say its unit."""
    if isinstance(value, str) and not value.replace(".", "", 1).strip().isdigit():
        return parse_size(value, "size") / _GIB
    return value


class EngineConfig(BaseSettings):
    """The keys are LMCache's; keys of its other parts are accepted and ignored.

    `max_local_cpu_size` and `reserve_local_cpu_size` are GiB, or a str with a unit. pydantic's
    ValidationError, a ValueError, says which key is wrong and what it takes.
    """

    model_config = SettingsConfigDict(env_prefix="LMCACHE_", extra="ignore", validate_assignment=True)

    chunk_size: int = Field(256, gt=0)  # tokens
    local_cpu: bool = True
    max_local_cpu_size: float = Field(5.0, ge=0, allow_inf_nan=False)  # GiB for each rank; 0: what the segment has
    reserve_local_cpu_size: float = Field(0.0, ge=0, allow_inf_nan=False)
    local_cpu_use_hugepages: bool = False
    cache_policy: str = "LRU"
    numa_mode: Literal["manual", "auto"] | None = None
    use_layerwise: bool = False
    enable_blending: bool = False
    save_unfull_chunk: bool = False
    enable_async_loading: bool = False
    enable_p2p: bool = False
    lmcache_instance_id: str = Field(default_factory=lambda: f"lmcache_{uuid.uuid4().hex}")
    enable_controller: bool = False
    pin_timeout_sec: float = Field(300, gt=0)
    pin_check_interval_sec: float = Field(30, gt=0)  # not needed: leases end by themselves
    enable_lazy_memory_allocator: bool = False  # not needed: regions are always committed as needed
    blocking_timeout_secs: float = Field(10, ge=0)
    extra_config: dict[str, Any] | None = None

    @field_validator("max_local_cpu_size", "reserve_local_cpu_size", mode="before")
    @classmethod
    def _sizes(cls, value: Any) -> Any:
        return _gib(value)

    @field_validator("cache_policy")
    @classmethod
    def _policy(cls, value: str) -> str:
        check_policy(value)
        return value

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        """Code only: `from_file` and `from_env` add their source themselves."""
        return (init_settings,)

    @classmethod
    def from_defaults(cls, **settings: Any) -> EngineConfig:
        """Defaults, changed by the arguments."""
        return cls(**settings)

    @classmethod
    def from_env(cls) -> EngineConfig:
        """`LMCACHE_<KEY>` for each key, `LMCACHE_EXTRA_CONFIG` as JSON."""
        return cls(**EnvSettingsSource(cls)())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str] | None = None) -> EngineConfig:
        """A YAML file, by default the one that `LMCACHE_CONFIG_FILE` names; variables win over it.

        FileNotFoundError when it is not there, ValueError when it is not a mapping.
        """
        where = Path(path if path is not None else os.environ.get("LMCACHE_CONFIG_FILE", ""))
        if not where.is_file():
            raise FileNotFoundError(f"no configuration file at {str(where)!r}: give a path, or set LMCACHE_CONFIG_FILE")
        try:
            there = YamlConfigSettingsSource(cls, yaml_file=where)()
        except OSError:
            raise
        except Exception as e:  # what a YAML parser raises is no ValueError
            raise ValueError(f"{where} is not a YAML mapping of settings: {e}") from e
        unknown = sorted(set(there) - set(cls.model_fields))
        if unknown:
            _log.info("%s: settings of other parts, ignored here: %s", where, ", ".join(unknown))
        return cls(**{**there, **EnvSettingsSource(cls)()})

    def get_extra_config_value(self, key: str, default_value: Any = None) -> Any:
        """A value of `extra_config`, or the default."""
        return (self.extra_config or {}).get(key, default_value)


@dataclass
class LayerGroup:
    """Layers whose KV looks alike: hybrid models have several groups."""

    num_layers: int
    hidden_dim_size: int  # heads * head size
    dtype: torch.dtype
    kv_size: int = 2  # 1 for MLA


@dataclass
class EngineMetadata:
    """Which rank of which model a process is.

    `kv_shape` is (layers, 2 or 1, chunk size, heads, head size); `layer_groups` wins over it.
    """

    model_name: str
    world_size: int
    local_world_size: int  # ranks of this host
    worker_id: int
    local_worker_id: int
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int]
    use_mla: bool = False
    role: str | None = None
    chunk_size: int = 256
    layer_groups: list[LayerGroup] | None = None
    first_rank: int = 0
    served_model_name: str | None = None

    def is_first_rank(self) -> bool:
        """Whether this is the rank that saves for all under MLA."""
        return self.worker_id == self.first_rank

    def _groups(self) -> list[LayerGroup]:
        if self.layer_groups:
            return self.layer_groups
        layers, kv, _, heads, head = self.kv_shape
        return [LayerGroup(layers, heads * head, self.kv_dtype, kv)]

    def get_shapes(self, num_tokens: int | None = None) -> list[torch.Size]:
        """[kv, layers, tokens, hidden] of each group, for a full chunk or for `num_tokens`."""
        import torch

        tokens = self.chunk_size if num_tokens is None else num_tokens
        return [torch.Size((g.kv_size, g.num_layers, tokens, g.hidden_dim_size)) for g in self._groups()]

    def get_dtypes(self) -> list[torch.dtype]:
        """The dtype of each group."""
        return [g.dtype for g in self._groups()]

    def get_num_groups(self) -> int:
        """How many groups there are."""
        return len(self._groups())
