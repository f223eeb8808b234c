#!/usr/bin/env python3
"""Golden vectors: a tiny random model of our own, and what the reference makes of it.

    golden.py            compares what it computes with golden/; fails where they differ
    golden.py --write    writes golden/ anew, after it has said what changes

Everything is computed in float64 and stored as float32, and the random numbers are plain integer
arithmetic, so every machine and every NumPy computes the same files. See README.md for the names.
"""

import json
import os
import shutil
import sys
import tempfile
import zlib

import numpy as np

from model import Checkpoint, Model, bf16_bits, bf16_values, compare, logits_of, quantize
from model import read_safetensors, write_safetensors

HERE = os.path.dirname(os.path.abspath(__file__))
PREFIX = "language_model."

# Two layers of each kind, so that a layer's state can be taken for another's. No two sizes that
# could be confused are equal, three query heads share a key head and three value heads a key, and
# rows of out_proj, o_proj and the experts' down_proj have several groups.
TEXT = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
    "max_position_embeddings": 1024,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
TOKENS = 70  # more than one chunk of the delta rule
STEP = (6, 2)  # the operations are recorded for 2 tokens, less than the taps, that follow on 6

# ---------------------------------------------------------------------------------- random model


def uniform(name, shape):
    """Numbers in [0, 1) that depend on `name` alone (splitmix64 over a counter)."""
    with np.errstate(over="ignore"):
        z = np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
        z = (z + np.arange(np.prod(shape), dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(11)) * 2.0**-53).reshape(shape)


def normal(name, shape):
    """Mean 0, variance 1, bell-shaped: sums of four uniforms."""
    return (uniform(name, (*shape, 4)).sum(-1) - 2) * np.sqrt(3.0)


def random_model():
    """name -> (dtype, array): every text tensor of TEXT's sizes, as the MLX layout stores it.

    Some rows are a thousand times smaller than the others: what is made of them has a norm near
    the square root of epsilon, so that an epsilon in the wrong place shows.
    """
    tensors = {}

    def plain(name, values):
        tensors[PREFIX + name] = "BF16", bf16_bits(values)

    def linear(name, *shape, gain=1.0, bits=4, small=slice(0)):
        w = normal(name, shape) * gain / np.sqrt(shape[-1])
        w[small] *= 1e-3
        words, scales, biases = quantize(bf16_values(bf16_bits(w)), bits)
        tensors[f"{PREFIX}{name}.weight"] = "U32", words
        tensors[f"{PREFIX}{name}.scales"] = "BF16", scales
        tensors[f"{PREFIX}{name}.biases"] = "BF16", biases

    def norm(name, size):
        plain(name + ".weight", 0.5 + uniform(name, (size,)))

    c = TEXT
    dim, hidden, experts = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    heads, kv_heads, head = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    k_heads, v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    d_head = c["linear_key_head_dim"]
    channels = (2 * k_heads + v_heads) * d_head
    linear("model.embed_tokens", c["vocab_size"], dim, gain=np.sqrt(dim), small=slice(0, None, 7))
    for layer, kind in enumerate(c["layer_types"]):
        at = f"model.layers.{layer}."
        norm(at + "input_layernorm", dim)
        norm(at + "post_attention_layernorm", dim)
        if kind == "linear_attention":
            linear(at + "linear_attn.in_proj_qkv", channels, dim)
            linear(at + "linear_attn.in_proj_z", v_heads * d_head, dim)
            linear(at + "linear_attn.in_proj_b", v_heads, dim, gain=1.5)
            linear(at + "linear_attn.in_proj_a", v_heads, dim, gain=1.5)
            taps = normal(at + "conv1d", (channels, 4, 1)) * 0.6
            for first in range(0, channels, 2 * d_head):  # every other head of q, of k and of v
                taps[first : first + d_head] *= 0.01
            plain(at + "linear_attn.conv1d.weight", taps)
            # Decay by a factor from exp(-0.001) to exp(-30) a token.
            plain(at + "linear_attn.A_log", uniform(at + "A_log", (v_heads,)) * 6 - 3)
            plain(at + "linear_attn.dt_bias", uniform(at + "dt_bias", (v_heads,)) * 6 - 4)
            norm(at + "linear_attn.norm", d_head)
            linear(at + "linear_attn.out_proj", dim, v_heads * d_head)
        else:
            linear(at + "self_attn.q_proj", heads * 2 * head, dim)
            linear(at + "self_attn.k_proj", kv_heads * head, dim, small=slice(head))
            linear(at + "self_attn.v_proj", kv_heads * head, dim)
            norm(at + "self_attn.q_norm", head)
            norm(at + "self_attn.k_norm", head)
            linear(at + "self_attn.o_proj", dim, heads * head, gain=1.5)
        linear(at + "mlp.gate", experts, dim, gain=1.5, bits=8)
        linear(at + "mlp.shared_expert_gate", 1, dim, bits=8)
        for expert, stack in (("shared_expert", ()), ("switch_mlp", (experts,))):
            linear(at + f"mlp.{expert}.gate_proj", *stack, hidden, dim, gain=1.5)
            linear(at + f"mlp.{expert}.up_proj", *stack, hidden, dim)
            linear(at + f"mlp.{expert}.down_proj", *stack, dim, hidden)
    norm("model.norm", dim)
    linear("lm_head", c["vocab_size"], dim, gain=1.5)
    return tensors


def write_model(path):
    """The random model as a checkpoint directory, in one file: data at odd bytes, in no order."""
    os.makedirs(path, exist_ok=True)
    tensors = random_model()
    names = sorted(tensors, key=lambda name: zlib.crc32(name.encode()))
    tensors = {name: tensors[name] for name in names}
    file = os.path.join(path, "model.safetensors")
    write_safetensors(file, tensors, {"format": "mlx"}, odd=True)
    gates = {
        f"{PREFIX}model.layers.{layer}.mlp.{name}": {"group_size": 64, "bits": 8}
        for layer in range(TEXT["num_hidden_layers"])
        for name in ("gate", "shared_expert_gate")
    }
    quantization = {"group_size": 64, "bits": 4, "mode": "affine", **gates}
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "eos_token_id": [2, 1],
        "text_config": TEXT,
        "quantization": quantization,
        "quantization_config": quantization,
        "tie_word_embeddings": False,
    }
    write_json(os.path.join(path, "config.json"), config)


def write_json(path, value):
    with open(path, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


# ------------------------------------------------------------------------------ expected results


def save(path, tensors):
    """Integers as I32, all else as F32."""
    arrays = {name: np.asarray(x) for name, x in tensors.items()}
    kinds = {name: "I32" if x.dtype.kind in "iu" else "F32" for name, x in arrays.items()}
    write_safetensors(path, {name: (kinds[name], x) for name, x in arrays.items()})


def write_expected(path, checkpoint):
    """The logits of a prompt, the operations of a short pass, and what bf16 costs."""

    def run(ids, **options):
        return logits_of(Model(checkpoint, real=np.float64, **options), ids)

    ids = (uniform("prompt", (TOKENS,)) * TEXT["vocab_size"]).astype(np.int32)
    logits = run(ids).astype(np.float32)
    save(os.path.join(path, "logits.safetensors"), {"ids": ids, "logits": logits})

    trace, (past, tokens) = {}, STEP
    recorded = Model(checkpoint, real=np.float64, trace=trace)
    state = recorded.start()
    recorded.forward(ids[:past], state)
    recorded.forward(ids[past : past + tokens], state)  # overwrites the trace of the pass before
    later = ("layers.2.", "layers.3.")
    trace = {name: x for name, x in trace.items() if not name.startswith(later)}
    save(os.path.join(path, "operations.safetensors"), trace)

    yardstick = {
        "bf16 activations": compare(logits, run(ids, activations="bf16")),
        "bf16 keys and values": compare(logits, run(ids, kv="bf16")),
    }
    write_json(os.path.join(path, "yardstick.json"), yardstick)


# ------------------------------------------------------------------------------------ comparison


def differences(old, new):
    """In words, how the files of directory `new` differ from those of `old`; [] where they agree.

    Checkpoints and their configuration agree to the byte, results to 1e-6 of their size (a last
    bit may fall the other way in another libm), the yardstick to one percent.
    """
    found = []
    for root, _, files in os.walk(new):
        for file in sorted(files):
            b = os.path.join(root, file)
            name = os.path.relpath(b, new)
            a = os.path.join(old, name)
            if not os.path.exists(a):
                found.append(f"{name}: missing")
            elif file == "yardstick.json":
                for case, values in json.load(open(b)).items():
                    was = json.load(open(a)).get(case, {})
                    if any(abs(x - was.get(k, 1e9)) > 1e-2 * abs(x) for k, x in values.items()):
                        found.append(f"{name}: {case}: was {was}, is {values}")
            elif name in ("logits.safetensors", "operations.safetensors"):
                found += [f"{name}: {x}" for x in tensor_differences(a, b)]
            elif open(a, "rb").read() != open(b, "rb").read():
                found.append(f"{name}: other bytes")
    return found


def tensor_differences(a, b):
    a, b = read_safetensors(a), read_safetensors(b)
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            yield f"{name}: only in the {'new' if name in b else 'committed'} file"
        elif a[name][1].shape != b[name][1].shape:
            yield f"{name}: shape was {a[name][1].shape}, is {b[name][1].shape}"
        else:
            x, y = (t[name][1].astype(np.float64) for t in (a, b))
            far = np.abs(x - y) / np.maximum(1, np.abs(y))
            if far.max() > 1e-6:
                yield f"{name}: largest relative difference {far.max():.1e}"


def quantizer_differences(path):
    """How `quantize` differs from the vectors that MLX made (quantize_vectors.py)."""
    vectors = read_safetensors(path)
    for name, (_, bits) in vectors.items():
        case, _, kind = name.partition(".")
        if kind == "input":
            for width in (4, 8):
                ours = quantize(bf16_values(bits), width)
                for part, x in zip(("weight", "scales", "biases"), ours):
                    if not np.array_equal(x, vectors[f"{case}.q{width}.{part}"][1]):
                        yield f"{os.path.basename(path)}: {case}.q{width}.{part}: quantize differs"


def main(args):
    if args not in ([], ["--write"]):
        sys.exit("usage: golden.py [--write]")
    golden = os.path.join(HERE, "golden")
    with tempfile.TemporaryDirectory() as new:
        write_model(os.path.join(new, "tiny"))
        write_expected(new, Checkpoint(os.path.join(new, "tiny")))
        changed = differences(golden, new)
        for line in changed:
            print(line)
        if changed and args:
            shutil.copytree(new, golden, dirs_exist_ok=True)
            print(f"wrote {golden}")
            changed = []
    wrong = list(quantizer_differences(os.path.join(golden, "quantize.safetensors")))
    for line in wrong:
        print(line)
    if changed or wrong:
        sys.exit("golden vectors differ; if the change is meant: golden.py --write")
    print("golden vectors agree with the reference")


if __name__ == "__main__":
    main(sys.argv[1:])
