# The compiled module is made by cffi from native/include/shmcache.h: its names are that header's.
from typing import Any

ffi: Any
lib: Any
