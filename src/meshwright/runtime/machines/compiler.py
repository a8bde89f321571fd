"""Whether this machine has what `train.compile` needs. No torch here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import ConfigError, refusal
from meshwright.spec.training import TrainSpec


def lacks_compiler(device: str, environ: Mapping[str, str]) -> str | None:
    """Return what compiling lacks here for "cpu" or "cuda", in words; None for nothing.

    On a CPU, it needs a C++ compiler, as torch looks for it (`cpp.cxx` of
    torch/_inductor/config.py), and Python's headers; on CUDA Triton, a C compiler for its kernel
    launchers, and the headers.
    """
    if device == "cuda" and not importlib.util.find_spec("triton"):
        return "triton is not installed"
    word, language, names = "CC", "C", ["gcc", "clang"]
    if device != "cuda":
        word, language, names = "CXX", "C++", ["clang++" if sys.platform == "darwin" else "g++"]
    if environ.get(word):
        names = [environ[word]]
    path = environ.get("PATH", os.defpath)
    if not any(shutil.which(name, path=path) for name in names):
        missing = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not on the PATH"
        return f"there is no {language} compiler: {missing} ({word} names another)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return f"Python's headers are not installed, which the {language} compiler needs"
    return None


def check_compiler(train: TrainSpec, lacks: str | None) -> None:
    """Refuse `train.compile = true` if something that it needs is missing."""
    if train.is_compiled and lacks is not None:
        rule = f"train.compile = true, but {lacks}"
        raise ConfigError(refusal(rule, legal=["train.compile = false", 'train.compile = "auto"']))
