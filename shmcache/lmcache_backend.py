"""The plug-in for LMCache under the module name of the first recipe; see `integrations.lmcache`."""

from __future__ import annotations

from .integrations.lmcache import ShmLocalCPUBackend

__all__ = ["ShmLocalCPUBackend"]
