"""Facts about the names of `mmcv._ext`: all 112 are known, and each is supplied with the parameters of mmcv 2.1.

Versions 2.0 and 2.2 have the same 112 with the same parameters.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import triops.compat.mmcv
from triops.compat.mmcv import FUNCTIONS

# one line per function, as its binding declares it: name(parameter, parameter, ...)
LINES = (Path(__file__).parent / "mmcv_signatures.txt").read_text().splitlines()
SIGNATURES = {line.partition("(")[0]: line.partition("(")[2].rstrip(")").split(", ") for line in LINES}

# Those that may still raise NotImplementedError when they are called.
MISSING: list[str] = []


def test_mmcv_has_112_names():
    assert len(LINES) == len(SIGNATURES) == 112


def test_what_is_supplied_is_what_mmcv_has():
    assert set(FUNCTIONS) - set(SIGNATURES) == set()


@pytest.mark.parametrize("name", [n for n in SIGNATURES if n in FUNCTIONS or n not in MISSING])
def test_every_name_is_there_and_takes_the_parameters_of_mmcv(name):
    function = getattr(triops.compat.mmcv.extension("mmcv._ext"), name)
    parameters = [parameter for parameter in SIGNATURES[name] if parameter]
    signature = inspect.signature(function)
    signature.bind(*parameters)
    signature.bind(**dict.fromkeys(parameters))
    declared = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert declared == parameters[: len(declared)]
    if parameters:
        with pytest.raises(TypeError, match="argument"):  # a missing operator raises NotImplementedError
            function()
