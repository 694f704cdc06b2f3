"""The methods of a cache's default namespace, on the cache itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from .namespace import Namespace

P = ParamSpec("P")
R = TypeVar("R")


def _of_default(method: Callable[Concatenate[Namespace, P], R]) -> Callable[Concatenate[DefaultMethods, P], R]:
    @functools.wraps(method)
    def call(self: DefaultMethods, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self._default or self.default, *args, **kwargs)

    return cast("Callable[Concatenate[DefaultMethods, P], R]", call)


class DefaultMethods:
    """Part of `SharedCache`: `cache.put(...)` is `cache.default.put(...)`, and so on."""

    _default: Namespace | None

    @property
    def default(self) -> Namespace:
        """The namespace "default", of one part unless somebody made it otherwise."""
        raise NotImplementedError

    allocate = _of_default(Namespace.allocate)
    allocate_many = _of_default(Namespace.allocate_many)
    put = _of_default(Namespace.put)
    put_many = _of_default(Namespace.put_many)
    get = _of_default(Namespace.get)
    get_many = _of_default(Namespace.get_many)
    contains = _of_default(Namespace.contains)
    contains_many = _of_default(Namespace.contains_many)
    lookup = _of_default(Namespace.lookup)
    pin = _of_default(Namespace.pin)
    pin_many = _of_default(Namespace.pin_many)
    unpin = _of_default(Namespace.unpin)
    unpin_many = _of_default(Namespace.unpin_many)
    touch = _of_default(Namespace.touch)
    remove = _of_default(Namespace.remove)
    remove_many = _of_default(Namespace.remove_many)
    clear = _of_default(Namespace.clear)
    keys = _of_default(Namespace.keys)
    bump = _of_default(Namespace.bump)
    put_tensor = _of_default(Namespace.put_tensor)
    get_tensor = _of_default(Namespace.get_tensor)
    reserve = _of_default(Namespace.reserve)
