#!/usr/bin/env python3
"""The model in NumPy: what every device must compute.

Reads a checkpoint in the MLX layout (affine 4-bit, groups of 64) and gives logits. It is written
for the reader, in the order of MODEL.md, with one deviation: matrices are dequantised when they
are used and forgotten again, so that layers of full width fit in memory. It knows no tokenizer,
no batches and no speed.

    model.py DIR --ids 1,2,3 --out A.safetensors   forward pass; tensor `logits` f32 (T, vocab)
    model.py compare A.safetensors B.safetensors   how far two such files are apart

Shapes: T tokens of this pass, n positions in the cache, H heads; weights are (out, in), y = x W^T.
"""

import argparse
import json
import mmap
import os
import sys

import numpy as np

GROUP = 64  # elements that share one scale and one bias
TAPS = 4  # of the causal convolution
CHUNK = 64  # tokens the chunked delta rule takes at once

# ------------------------------------------------------------------------------------- numbers


def bf16_bits(x):
    """The bit patterns of x rounded to bf16 (to nearest, ties to even), as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits):
    """f32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(x):
    """x rounded to bf16, in the dtype x has."""
    return bf16_values(bf16_bits(x)).astype(x.dtype)


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x, w, eps):
    """x / rms(x) * w over the last axis. The checkpoint's weights already hold 1 + w."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * w


# ------------------------------------------------------------------------------- quantised data


def dequantize(words, scales, biases):
    """scale * q + bias for u32 words (.., out, words), in the dtype of scales and biases.

    The number of bits follows from the shapes. Element e of a row stands in word e // per at bit
    (e % per) * bits, least significant first: in bytes, the even element is the low nibble.
    """
    bits = words.shape[-1] * 32 // (scales.shape[-1] * GROUP)
    q = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        q = np.stack([q & 15, q >> 4], -1)
    q = q.reshape(*scales.shape, GROUP)
    return (q * scales[..., None] + biases[..., None]).reshape(*words.shape[:-1], -1)


def quantize(w, bits):
    """Affine quantisation of w (.., out, in), by the rule of MLX's CPU backend.

    Returns words u32, scales and biases as bf16 bit patterns. In each group the value of larger
    magnitude becomes the bias exactly, and 0 stays on the grid; the scale is negative where that
    value is the maximum. All in f32; q is found with the scale and bias before they are rounded.
    """
    groups = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, GROUP)
    low, high = groups.min(-1), groups.max(-1)
    most = np.float32(2**bits - 1)
    low_is_edge = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / most, np.float32(1e-7))
    scale = np.where(low_is_edge, scale, -scale)
    edge = np.where(low_is_edge, low, high)
    steps = np.rint(edge / scale)
    on_grid = steps != 0
    scale = np.where(on_grid, edge / np.where(on_grid, steps, 1), scale)
    bias = np.where(on_grid, edge, np.float32(0))
    q = np.clip(np.rint((groups - bias[..., None]) / scale[..., None]), 0, most).astype(np.uint8)
    if bits == 4:
        q = q[..., 0::2] | q[..., 1::2] << 4
    words = np.ascontiguousarray(q.reshape(*w.shape[:-1], -1)).view(np.uint32)
    return words, bf16_bits(scale), bf16_bits(bias)


# ----------------------------------------------------------------------------------- safetensors

DTYPES = {"F32": "<f4", "I32": "<i4", "U32": "<u4", "BF16": "<u2"}


def read_safetensors(path):
    """name -> (dtype, array). The arrays are views of the mapped file, at any alignment."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            dtype = np.dtype(DTYPES[entry["dtype"]])
            array = np.frombuffer(data, dtype, (end - start) // dtype.itemsize, start)
            tensors[name] = entry["dtype"], array.reshape(entry["shape"])
    return tensors


def write_safetensors(path, tensors, metadata=None, odd=False):
    """Writes name -> (dtype, array). `odd` makes the data start at an odd byte of the file."""
    header, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name, (dtype, array) in tensors.items():
        end = offset + array.size * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(header, separators=(",", ":")).encode()
    if odd and len(header) % 2 == 0:
        header += b" "
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for dtype, array in tensors.values():
            file.write(np.ascontiguousarray(array, DTYPES[dtype]).tobytes())


class Checkpoint:
    """A checkpoint directory: config.json, and model.safetensors or an index with its shards."""

    def __init__(self, path):
        with open(os.path.join(path, "config.json")) as file:
            self.config = json.load(file)["text_config"]
        index, files = os.path.join(path, "model.safetensors.index.json"), ["model.safetensors"]
        if os.path.exists(index):
            with open(index) as file:
                files = sorted(set(json.load(file)["weight_map"].values()))
        self.tensors = {}
        for file in files:
            for name, (dtype, array) in read_safetensors(os.path.join(path, file)).items():
                self.tensors[name.removeprefix("language_model.")] = dtype, array

    def vector(self, name, real):
        """A tensor that is stored as bf16, in dtype `real`."""
        dtype, array = self.tensors[name]
        assert dtype == "BF16", f"{name} is {dtype}, not BF16"
        return bf16_values(array).astype(real)

    def matrix(self, name, part, real):
        """Rows of the quantised matrix `name`, dequantised; `part` indexes its first axis."""
        words = self.tensors[name + ".weight"][1][part]
        scales, biases = (self.tensors[name + x][1][part] for x in (".scales", ".biases"))
        return dequantize(words, bf16_values(scales).astype(real), bf16_values(biases).astype(real))


# ------------------------------------------------------------------------------- the forward pass


class State:
    """What one sequence keeps between passes: its position, and a dict for each layer."""

    def __init__(self, layers):
        self.pos = 0
        self.layers = [{} for _ in range(layers)]


class Model:
    """The forward pass on one checkpoint.

    `activations` "bf16" rounds the residual stream and all inputs of matrix products to bf16, keys
    and values among them, as an engine with bf16 activations would; gates, routing and the delta
    state stay as they are. What that costs on given weights is the yardstick beside which every
    faster path is judged. `kv` "bf16" rounds only the keys and values that the cache keeps. `real`
    is the dtype of the arithmetic; results in float64 are the same on every machine once they are
    rounded to float32.

    `trace`, where it is a dict, receives the intermediate results. Their names are those of the
    operations and operands in the device crate's table: `layers.0.delta_conv.qkv`.
    """

    def __init__(self, checkpoint, activations="f32", kv="f32", chunked=False, real=np.float32,
                 trace=None):
        self.checkpoint, self.config, self.real = checkpoint, checkpoint.config, real
        self.round = round_bf16 if activations == "bf16" else lambda x: x
        self.round_kv = round_bf16 if "bf16" in (activations, kv) else lambda x: x
        self.delta_rule = delta_rule_chunked if chunked else delta_rule
        self.trace, self.at = trace, ""

    def start(self):
        return State(self.config["num_hidden_layers"])

    def forward(self, ids, state):
        """Logits (T, vocab) after each of `ids`, which continue the sequence of `state`."""
        x = self.round(self.checkpoint.matrix("model.embed_tokens", np.asarray(ids), self.real))
        self.note("embed.x", x)
        for layer, kept in enumerate(state.layers):
            self.at, at = f"layers.{layer}.", f"model.layers.{layer}."
            y = self.norm(at + "input_layernorm", x)
            self.note("rms_norm.y", y)
            if (layer + 1) % self.config["full_attention_interval"] == 0:
                d = self.attention(at + "self_attn.", y, kept, state.pos)
            else:
                d = self.delta_net(at + "linear_attn.", y, kept)
            self.note("linear_q4.d", d)
            x = self.round(x + d)
            y = self.norm(at + "post_attention_layernorm", x)
            self.note("add_rms_norm.x", x)
            self.note("add_rms_norm.y", y)
            x = self.round(x + self.moe(at + "mlp.", y))
        state.pos += len(ids)
        self.at = ""
        y = self.norm("model.norm", x)
        self.note("output_norm.y", y)
        return self.linear("lm_head", y)

    def attention(self, at, y, kept, pos):
        """Causal attention with grouped keys, rotary positions and an output gate."""
        c, tokens = self.config, len(y)
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        p = [self.linear(at + x, y) for x in ("q_proj", "k_proj", "v_proj")]
        self.note("linear_q4.p", np.concatenate(p, -1))
        qg, k, v = (x.reshape(tokens, n, -1) for x, n in zip(p, (heads, kv_heads, kv_heads)))
        q, gate = qg[..., :dim], qg[..., dim:]  # of each head: its query, then its gate

        q = self.rope(self.norm(at + "q_norm", q), pos)
        k = self.rope(self.norm(at + "k_norm", k), pos)
        for name, rows in (("k", k), ("v", v)):
            past = kept.get(name, np.zeros((0, kv_heads, dim), self.real))
            kept[name] = np.concatenate([past, self.round_kv(rows)])
            self.note(f"qk_rope.{name}_cache", kept[name])
        self.note("qk_rope.q", q)

        future = np.arange(len(kept["k"])) > pos + np.arange(tokens)[:, None]
        o = np.empty_like(q)
        for h in range(heads):
            keys, values = (kept[x][:, h // (heads // kv_heads)] for x in "kv")
            scores = self.round(q[:, h]) @ keys.T * self.real(dim**-0.5)
            o[:, h] = self.round(softmax(np.where(future, -np.inf, scores))) @ values
        o = (o * sigmoid(gate)).reshape(tokens, -1)
        self.note("attend.o", o)
        return self.linear(at + "o_proj", o)

    def rope(self, x, pos):
        """Rotates the first R elements of each head by their position; j and j + R/2 are a pair."""
        rope, dim = self.config["rope_parameters"], self.config["head_dim"]
        rotary = int(dim * rope["partial_rotary_factor"])
        rate = float(rope["rope_theta"]) ** (-np.arange(0, rotary, 2) / rotary)
        angle = (pos + np.arange(len(x)))[:, None, None] * rate
        cos, sin = np.cos(angle).astype(self.real), np.sin(angle).astype(self.real)
        a, b, rest = np.split(x, [rotary // 2, rotary], -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def delta_net(self, at, y, kept):
        """Gated delta net: a short convolution, then a linear recurrence with a matrix state."""
        c, tokens = self.config, len(y)
        k_heads, v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        k_dim, v_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]
        m, z, b, a = p = [self.linear(at + "in_proj_" + x, y) for x in ("qkv", "z", "b", "a")]
        self.note("linear_q4.p", np.concatenate(p, -1))

        past = kept.get("conv", np.zeros((TAPS - 1, m.shape[1]), self.real))
        m = np.concatenate([past, m])
        kept["conv"] = m[-(TAPS - 1) :]  # raw: before the taps and before SiLU
        w = self.checkpoint.vector(at + "conv1d.weight", self.real)[..., 0]
        conv = silu(sum(m[j : j + tokens] * w[:, j] for j in range(TAPS)))  # the last tap is now
        q, k, v = np.split(conv, [k_heads * k_dim, 2 * k_heads * k_dim], -1)
        q, k = (x.reshape(tokens, k_heads, k_dim) for x in (q, k))
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + self.real(1e-6)) for x in (q, k))
        q = q * self.real(k_dim**-0.5)
        a_log, dt_bias = (self.checkpoint.vector(at + x, self.real) for x in ("A_log", "dt_bias"))
        g = -np.exp(a_log) * softplus(a + dt_bias)
        beta = sigmoid(b)
        qkv = np.concatenate([x.reshape(tokens, -1) for x in (q, k, v)], -1)
        self.note("delta_conv.conv", past)
        self.note("delta_conv.qkv", qkv)
        self.note("delta_conv.gates", np.concatenate([g, beta], -1))
        self.note("conv_state.conv", kept["conv"])

        state = kept.get("delta", np.zeros((v_heads, v_dim, k_dim), self.real))
        q, k = (np.repeat(x, v_heads // k_heads, axis=1) for x in (q, k))  # neighbours share a key
        v = v.reshape(tokens, v_heads, v_dim)
        o, kept["delta"] = self.delta_rule(q, k, v, g, beta, state)
        self.note("delta_step.state_before", state)
        self.note("delta_step.state", kept["delta"])
        self.note("delta_step.o", o.reshape(tokens, -1))

        o = (self.norm(at + "norm", o) * silu(z.reshape(o.shape))).reshape(tokens, -1)
        self.note("gated_norm.o", o)
        return self.linear(at + "out_proj", o)

    def moe(self, at, y):
        """The chosen experts, weighted, and the shared expert behind its own gate."""
        tokens, top = len(y), self.config["num_experts_per_tok"]
        logits = self.linear(at + "gate", y)
        p = softmax(logits)
        ids = np.argsort(-p, axis=-1, kind="stable")[:, :top]  # ties to the lower id
        chosen = np.take_along_axis(p, ids, -1)
        weights = chosen / chosen.sum(-1, keepdims=True)
        shared_logit = self.linear(at + "shared_expert_gate", y)
        shared = sigmoid(shared_logit)
        shared_id = np.full((tokens, 1), logits.shape[1])  # stands behind the routed ones
        self.note("linear_q8.logits", np.concatenate([logits, shared_logit], -1))
        self.note("route.ids", np.concatenate([ids, shared_id], -1))
        self.note("route.weights", np.concatenate([weights, shared], -1))

        h = np.empty((tokens, top + 1, self.config["moe_intermediate_size"]), self.real)
        gate, up = (self.linear(at + f"shared_expert.{x}_proj", y) for x in ("gate", "up"))
        h[:, top] = silu(gate) * up
        d = shared * self.linear(at + "shared_expert.down_proj", h[:, top])
        for e in np.unique(ids):
            t, i = np.nonzero(ids == e)
            gate, up = (self.linear(at + f"switch_mlp.{x}_proj", y[t], e) for x in ("gate", "up"))
            h[t, i] = silu(gate) * up
            d[t] += weights[t, i, None] * self.linear(at + "switch_mlp.down_proj", h[t, i], e)
        self.note("expert_up.h", h)
        self.note("expert_down.y", d)
        return d

    def norm(self, name, x):
        w = self.checkpoint.vector(name + ".weight", self.real)
        return rms_norm(x, w, self.config["rms_norm_eps"])

    def linear(self, name, x, expert=None):
        """x W^T for the quantised matrix `name`, or for one expert's part of it."""
        x = self.round(x)
        if expert is not None:
            return x @ self.checkpoint.matrix(name, expert, self.real).T
        rows, some = len(self.checkpoint.tensors[name + ".weight"][1]), 16384  # at a time
        parts = (slice(r, r + some) for r in range(0, rows, some))
        return np.concatenate([x @ self.checkpoint.matrix(name, r, self.real).T for r in parts], -1)

    def note(self, name, value):
        if self.trace is not None:
            self.trace[self.at + name] = value


def delta_rule(q, k, v, g, beta, state):
    """The definition: one token after another. q, k (T, H, K), v (T, H, V), g and beta (T, H).

    The state (H, V, K) decays, is corrected by what it gets wrong about v, and is then read.
    Returns o (T, H, V) and the new state.
    """
    o = np.empty_like(v)
    for t in range(len(v)):
        state = state * np.exp(g[t])[:, None, None]
        wrong = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
        state = state + wrong[:, :, None] * k[t][:, None, :]
        o[t] = np.einsum("hvk,hk->hv", state, q[t])
    return o, state


def delta_rule_chunked(q, k, v, g, beta, state):
    """The same function as matrix products over chunks (the WY form).

    The corrections of a chunk's tokens solve a unit lower triangular system, here by forward
    substitution. Decay between two tokens is the exp of a difference that is never positive: exp
    of the sum alone would overflow where decay is strong.
    """
    o = np.empty_like(v)
    for start in range(0, len(v), CHUNK):
        part = slice(start, start + CHUNK)
        Q, K, V = (x[part].transpose(1, 0, 2) for x in (q, k, v))  # (H, C, ..)
        G, B = np.cumsum(g[part], axis=0).T, beta[part].T  # (H, C)
        S = state.transpose(0, 2, 1)  # (H, K, V)
        decay = np.exp(np.tril(G[:, :, None] - G[:, None, :])) * np.tri(G.shape[1], dtype=v.dtype)
        A = np.tril(B[:, :, None] * (K @ K.transpose(0, 2, 1)) * decay, -1)
        wrong = B[:, :, None] * (V - np.exp(G)[:, :, None] * (K @ S))
        for i in range(1, wrong.shape[1]):
            wrong[:, i] -= (A[:, i : i + 1, :i] @ wrong[:, :i])[:, 0]
        read = np.exp(G)[:, :, None] * (Q @ S) + (Q @ K.transpose(0, 2, 1) * decay) @ wrong
        o[part] = read.transpose(1, 0, 2)
        last = G[:, -1:]
        K = np.exp(last - G)[:, :, None] * K
        S = np.exp(last)[:, :, None] * S + K.transpose(0, 2, 1) @ wrong
        state = S.transpose(0, 2, 1)
    return o, state


# ------------------------------------------------------------------------------- the command line


def logits_of(model, ids, split=()):
    """Logits of `ids` in one pass, or cut after the given numbers of tokens."""
    state, out, start = model.start(), [], 0
    for n in [*split, len(ids) - sum(split)]:
        if n:
            out.append(model.forward(ids[start : start + n], state))
            start += n
    return np.concatenate(out)


def compare(a, b):
    """How far logits b are from a: KL(a || b) is in nats, top1 the share of equal argmax."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    log_p, log_q = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (a, b))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return {
        "max_abs": float(np.abs(a - b).max()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1": float((a.argmax(-1) == b.argmax(-1)).mean()),
    }


def parse_ids(text):
    if text.startswith("@"):
        with open(text[1:]) as file:
            text = file.read()
    return [int(x) for x in text.replace(",", " ").strip(" []\n").split()]


def main(args):
    if args[:1] == ["compare"]:
        if len(args) != 3:
            sys.exit("usage: model.py compare A.safetensors B.safetensors")
        a, b = (read_safetensors(path)["logits"][1] for path in args[1:])
        if a.shape != b.shape:
            sys.exit(f"{args[1]} has logits {a.shape}, {args[2]} has {b.shape}")
        r = compare(a, b)
        print("max |difference| {max_abs:.3e}  KL mean {kl_mean:.3e} max {kl_max:.3e}  "
              "top-1 {top1:.4f}".format(**r))
        return
    parser = argparse.ArgumentParser(description="Logits of the reference model.")
    parser.add_argument("dir", help="checkpoint directory in the MLX layout")
    parser.add_argument("--ids", required=True, type=parse_ids, help="1,2,3 or @FILE")
    parser.add_argument("--split", default=[], type=parse_ids, help="70,3: 70, 3 and the rest")
    parser.add_argument("--chunked", action="store_true", help="run the delta rule in chunks")
    parser.add_argument("--activations", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--kv", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--f64", action="store_true", help="compute in float64")
    parser.add_argument("--out", required=True, help="safetensors file to write")
    a = parser.parse_args(args)
    checkpoint = Checkpoint(a.dir)
    vocab = checkpoint.config["vocab_size"]
    if not a.ids or min(a.ids) < 0 or max(a.ids) >= vocab:
        sys.exit(f"--ids: expected one or more ids from 0 to {vocab - 1}")
    if min(a.split, default=1) < 1 or sum(a.split) > len(a.ids):
        sys.exit(f"--split: expected positive lengths that sum to {len(a.ids)} at most")
    real = np.float64 if a.f64 else np.float32
    model = Model(checkpoint, a.activations, a.kv, a.chunked, real)
    write_safetensors(a.out, {"logits": ("F32", logits_of(model, a.ids, a.split))})


if __name__ == "__main__":
    main(sys.argv[1:])
