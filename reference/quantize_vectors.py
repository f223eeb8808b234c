#!/usr/bin/env python3
"""Makes golden/quantize.safetensors: what MLX itself makes of nine kinds of data.

Needs the PyPI package `mlx[cpu]` (made with 0.32.4 on Linux, x86-64); not needed otherwise. For
each kind, `KIND.input` is bf16 (rows, cols), and `KIND.q4.weight`, `.scales`, `.biases` and the
same for `q8` are what `mx.quantize(group_size=64)` gives on the CPU.
"""

import os

import mlx.core as mx
import numpy as np

from golden import HERE, normal, uniform
from model import bf16_bits, write_safetensors

ROWS, COLS = 3, 128


def inputs():
    shape = (ROWS, COLS)
    outlier = normal("outlier", shape) * 0.02
    outlier[:, ::50] *= 200
    return {
        "normal": normal("normal", shape) * 0.02,
        "uniform": uniform("uniform", shape) * 2 - 1,
        "positive": uniform("positive", shape) + 0.5,
        "negative": -uniform("negative", shape) - 0.5,
        "zero": np.zeros(shape),
        "constant": np.full(shape, 0.37),
        "tiny": normal("tiny", shape) * 1e-7,
        "outlier": outlier,
        # Few distinct values: many stand exactly half way between two steps of the grid.
        "ties": np.rint(normal("ties", shape) * 8) / 64,
    }


def as_numpy(array):
    """bf16 as bit patterns, which is how write_safetensors takes it."""
    if array.dtype == mx.bfloat16:
        return "BF16", np.array(array.view(mx.uint16))
    return "U32", np.array(array)


def main():
    mx.set_default_device(mx.cpu)
    tensors = {}
    for kind, values in inputs().items():
        bits = bf16_bits(values)
        tensors[f"{kind}.input"] = "BF16", bits
        w = mx.array(bits).view(mx.bfloat16)
        for width in (4, 8):
            parts = mx.quantize(w, group_size=64, bits=width)
            for name, part in zip(("weight", "scales", "biases"), parts):
                tensors[f"{kind}.q{width}.{name}"] = as_numpy(part)
    write_safetensors(os.path.join(HERE, "golden", "quantize.safetensors"), tensors)


if __name__ == "__main__":
    main()
