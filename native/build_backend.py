"""The PEP 517 backend: setuptools, told about the cffi module.

Setuptools can only be told so from a setup() call, and there is no setup.py: everything else
is declared in pyproject.toml. So this backend runs that one call where setup.py would have run.
"""

import sysconfig

from setuptools import setup
from setuptools.build_meta import _BuildMetaBackend


class _Backend(_BuildMetaBackend):
    def run_setup(self, setup_script: str = "setup.py") -> None:
        options = {}
        if not sysconfig.get_config_var("Py_GIL_DISABLED"):
            # One wheel for all versions; free-threaded builds have no stable ABI.
            options["bdist_wheel"] = {"py_limited_api": "cp310"}
        setup(cffi_modules=["native/build_shmcore.py:make_ffi"], options=options)


_backend = _Backend()

get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_editable = _backend.get_requires_for_build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
build_wheel = _backend.build_wheel
build_sdist = _backend.build_sdist
build_editable = _backend.build_editable
