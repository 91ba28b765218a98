"""Compiles the C++ kernels at install. Everything else is in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# By its path: the dependencies that importing lean needs are missing where wheels are built.
_SPEC = importlib.util.spec_from_file_location("lean_cpu_build", Path(__file__).parent / "lean/kernels/cpu/build.py")
build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build)


class BuildKernels(build_ext):
    """The library is no Python module, so its name and its compilation are lean's own."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], build.library_name()))

    def build_extension(self, ext: Extension) -> None:
        try:
            build.build(Path(self.get_ext_fullpath(ext.name)).parent)
        except build.BuildError as error:
            self.extensions = []  # nothing to copy or to list
            self.warn(f"{error}: lean will run on its torch reference, many times slower ({build.HOW} builds it later)")


setup(ext_modules=[Extension("lean.kernels.cpu.library", [])], cmdclass={"build_ext": BuildKernels})
