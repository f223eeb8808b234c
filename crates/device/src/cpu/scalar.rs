//! The rows of the table as plain formulas: what every faster device is compared with.
//!
//! Single-threaded, no instruction set. Everything between a load and a store is computed in
//! f64, so a result is the formula rounded to f32 once (the delta rule rounds its state once a
//! token, as it is stored). Sums run in order of their index, but long dot products take eight
//! partial sums, element i in sum i mod 8, added in order at the end. Every output depends on
//! its own row, span and weights alone: what else is in the batch changes no bit.

use super::memory::{Quantised, scale_and_bias};
use crate::ops::*;
use half::bf16;

/// Tokens of one block of the chunked delta rule.
pub const CHUNK: usize = 64;

/// One entry of the `spans` array.
#[derive(Clone, Copy)]
pub struct Span {
    /// Its first row in the batch.
    pub first: usize,
    /// Its number of rows.
    pub rows: usize,
    /// Its place in the state arrays.
    pub slot: usize,
    /// Where its first row stands in the sequence.
    pub position: usize,
}

impl Span {
    /// The span number `index`.
    pub fn of(spans: &[u32], index: usize) -> Span {
        let s = &spans[4 * index..][..4];
        Span {
            first: s[0] as usize,
            rows: s[1] as usize,
            slot: s[2] as usize,
            position: s[3] as usize,
        }
    }

    /// All spans, in order.
    pub fn all(spans: &[u32]) -> impl Iterator<Item = Span> + '_ {
        (0..spans.len() / 4).map(|i| Span::of(spans, i))
    }
}

/// Elements (or words, for the bytes of a cache: see [`Cache`]) of a slot's keys or values.
#[derive(Clone, Copy)]
pub struct Blocks<'a> {
    pub table: &'a [u32],
    pub max_blocks: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Blocks<'_> {
    /// The first element of the vector of `pos` and `head` in the cache.
    pub fn at(&self, slot: usize, head: usize, pos: usize) -> usize {
        let (in_slot, in_block) = (pos / KV_BLOCK as usize, pos % KV_BLOCK as usize);
        assert!(in_slot < self.max_blocks, "position {pos} is past the blocks of slot {slot}");
        let block = self.table[slot * self.max_blocks + in_slot] as usize;
        ((block * self.kv_heads + head) * KV_BLOCK as usize + in_block) * self.head_dim
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// log(1 + exp(x)), which does not overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0; 8];
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    for (a, b) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    for (i, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[i] += f64::from(*a) * f64::from(*b);
    }
    sums.iter().sum()
}

/// 1 / sqrt(mean(x^2) + eps)
fn inverse_rms(x: &[f32], eps: f32) -> f64 {
    1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()
}

fn dequantise_q4(w: Quantised, out: &mut [f32]) {
    for ((codes, &pair), out) in
        w.codes.chunks_exact(32).zip(w.pairs).zip(out.as_chunks_mut::<64>().0)
    {
        let (scale, bias) = scale_and_bias(pair);
        for (out, code) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            *out = [code & 15, code >> 4].map(|q| scale * f32::from(q) + bias);
        }
    }
}

fn dequantise_q8(w: Quantised, out: &mut [f32]) {
    for ((codes, &pair), out) in
        w.codes.chunks_exact(64).zip(w.pairs).zip(out.as_chunks_mut::<64>().0)
    {
        let (scale, bias) = scale_and_bias(pair);
        for (out, &q) in out.iter_mut().zip(codes) {
            *out = scale * f32::from(q) + bias;
        }
    }
}

pub fn embed(op: &Embed, ids: &[u32], table: Quantised, x: &mut [f32]) {
    let dim = op.dim as usize;
    for (&id, x) in ids.iter().zip(x.chunks_exact_mut(dim)) {
        assert!(id < op.vocab, "token id {id} of {}", op.vocab);
        dequantise_q4(table.part(id as usize * dim, dim), x);
    }
}

fn norm_row(x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) {
    let scale = inverse_rms(x, eps);
    for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
        *y = (f64::from(x) * scale * f64::from(w)) as f32;
    }
}

pub fn rms_norm(op: &RmsNorm, x: &[f32], w: &[f32], y: &mut [f32]) {
    let dim = op.dim as usize;
    for (x, y) in x.chunks_exact(dim).zip(y.chunks_exact_mut(dim)) {
        norm_row(x, w, op.eps, y);
    }
}

pub fn add_rms_norm(op: &AddRmsNorm, x: &mut [f32], d: &[f32], w: &[f32], y: &mut [f32]) {
    let dim = op.dim as usize;
    let rows = x.chunks_exact_mut(dim).zip(d.chunks_exact(dim)).zip(y.chunks_exact_mut(dim));
    for ((x, d), y) in rows {
        for (x, &d) in x.iter_mut().zip(d) {
            *x += d;
        }
        norm_row(x, w, op.eps, y);
    }
}

pub fn output_norm(op: &OutputNorm, x: &[f32], d: &[f32], rows: &[u32], w: &[f32], y: &mut [f32]) {
    let dim = op.dim as usize;
    let mut sum = vec![0.0; dim];
    for (&row, y) in rows.iter().zip(y.chunks_exact_mut(dim)) {
        let at = row as usize * dim;
        for ((sum, x), d) in sum.iter_mut().zip(&x[at..][..dim]).zip(&d[at..][..dim]) {
            *sum = x + d;
        }
        norm_row(&sum, w, op.eps, y);
    }
}

/// y[t,r] = W[r] . x[t], one dequantised row of W after another.
fn linear(
    (rows, cols): (usize, usize),
    w: Quantised,
    dequantise: fn(Quantised, &mut [f32]),
    x: &[f32],
    y: &mut [f32],
) {
    let mut row = vec![0.0; cols];
    for r in 0..rows {
        dequantise(w.part(r * cols, cols), &mut row);
        for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(rows)) {
            y[r] = dot(&row, x) as f32;
        }
    }
}

pub fn linear_q4(op: &LinearQ4, w: Quantised, x: &[f32], y: &mut [f32]) {
    linear((op.rows as usize, op.cols as usize), w, dequantise_q4, x, y);
}

pub fn linear_q8(op: &LinearQ8, w: Quantised, x: &[f32], y: &mut [f32]) {
    linear((op.rows as usize, op.cols as usize), w, dequantise_q8, x, y);
}

/// The operands of `delta_conv` that are read.
pub struct DeltaConvInputs<'a> {
    pub p: &'a [f32],
    pub w: &'a [f32],
    pub a_log: &'a [f32],
    pub dt_bias: &'a [f32],
    pub conv: &'a [f32],
    pub span_of: &'a [u32],
    pub span: &'a [u32],
}

pub fn delta_conv(op: &DeltaConv, i: &DeltaConvInputs, qkv: &mut [f32], gates: &mut [f32]) {
    let (k_heads, v_heads, head_dim) =
        (op.k_heads as usize, op.v_heads as usize, op.head_dim as usize);
    let channels = (2 * k_heads + v_heads) * head_dim;
    let width = channels + v_heads * head_dim + 2 * v_heads;
    let taps = TAPS as usize;
    for t in 0..op.tokens as usize {
        let span = Span::of(i.span, i.span_of[t] as usize);
        let p = &i.p[t * width..][..width];
        let out = &mut qkv[t * channels..][..channels];
        for (channel, out) in out.iter_mut().enumerate() {
            let mut sum = 0.0;
            for tap in 0..taps {
                // Row of the span, shifted by the rows that the state holds.
                let row = t - span.first + tap;
                let c = if row < taps - 1 {
                    i.conv[(span.slot * (taps - 1) + row) * channels + channel]
                } else {
                    i.p[(span.first + row - (taps - 1)) * width + channel]
                };
                sum += f64::from(c) * f64::from(i.w[channel * taps + tap]);
            }
            *out = silu(sum) as f32;
        }
        for (head, c) in out[..2 * k_heads * head_dim].chunks_exact_mut(head_dim).enumerate() {
            let mut scale = 1.0 / (dot(c, c) + 1e-6).sqrt();
            if head < k_heads {
                scale /= (head_dim as f64).sqrt();
            }
            for c in c {
                *c = (f64::from(*c) * scale) as f32;
            }
        }
        let (b, a) = p[width - 2 * v_heads..].split_at(v_heads);
        let (g, beta) = gates[t * 2 * v_heads..][..2 * v_heads].split_at_mut(v_heads);
        for j in 0..v_heads {
            let dt = softplus(f64::from(a[j]) + f64::from(i.dt_bias[j]));
            g[j] = (-f64::from(i.a_log[j]).exp() * dt) as f32;
            beta[j] = sigmoid(f64::from(b[j])) as f32;
        }
    }
}

pub fn conv_state(op: &ConvState, p: &[f32], span: &[u32], conv: &mut [f32]) {
    let (channels, width) = (op.channels as usize, op.width as usize);
    let kept = TAPS as usize - 1;
    for span in Span::all(span) {
        let conv = &mut conv[span.slot * kept * channels..][..kept * channels];
        for row in 0..kept {
            // Row of [conv; p] that becomes this one. It lies behind, so order keeps it intact.
            let from = span.rows + row;
            if from < kept {
                conv.copy_within(from * channels..(from + 1) * channels, row * channels);
            } else {
                let p = &p[(span.first + from - kept) * width..][..channels];
                conv[row * channels..][..channels].copy_from_slice(p);
            }
        }
    }
}

/// The sizes of the delta rule, and where its vectors lie.
#[derive(Clone, Copy)]
pub struct DeltaShape {
    pub k_heads: usize,
    pub v_heads: usize,
    pub head_dim: usize,
}

impl DeltaShape {
    /// q, k and v of token `t` for value head `j`.
    pub fn qkv<'a>(&self, qkv: &'a [f32], t: usize, j: usize) -> [&'a [f32]; 3] {
        let key_head = j / (self.v_heads / self.k_heads);
        let row = t * (2 * self.k_heads + self.v_heads);
        [key_head, self.k_heads + key_head, 2 * self.k_heads + j]
            .map(|head| &qkv[(row + head) * self.head_dim..][..self.head_dim])
    }

    /// g and beta of token `t` for value head `j`.
    pub fn gates(&self, gates: &[f32], t: usize, j: usize) -> (f32, f32) {
        let row = 2 * t * self.v_heads;
        (gates[row + j], gates[row + self.v_heads + j])
    }
}

pub fn delta_step(
    op: &DeltaStep,
    qkv: &[f32],
    gates: &[f32],
    span: &[u32],
    state: &mut [f32],
    o: &mut [f32],
) {
    let shape = DeltaShape {
        k_heads: op.k_heads as usize,
        v_heads: op.v_heads as usize,
        head_dim: op.head_dim as usize,
    };
    let d = shape.head_dim;
    for span in Span::all(span) {
        for j in 0..shape.v_heads {
            let state = &mut state[(span.slot * shape.v_heads + j) * d * d..][..d * d];
            for t in span.first..span.first + span.rows {
                let [q, k, v] = shape.qkv(qkv, t, j);
                let (g, beta) = shape.gates(gates, t, j);
                let decay = f64::from(g).exp();
                let o = &mut o[(t * shape.v_heads + j) * d..][..d];
                for ((row, &v), o) in state.chunks_exact_mut(d).zip(v).zip(o) {
                    let u = f64::from(beta) * (f64::from(v) - decay * dot(row, k));
                    for (s, &k) in row.iter_mut().zip(k) {
                        *s = (decay * f64::from(*s) + u * f64::from(k)) as f32;
                    }
                    *o = dot(row, q) as f32;
                }
            }
        }
    }
}

/// Per chunk, with the state S before it, c = cumulative sum of g and D_ij = exp(c_i - c_j):
/// ```text
/// A_ij = beta_i (k_i . k_j) D_ij            j < i
/// (I + A) u = beta (v - exp(c) S k)         forward substitution
/// o_i = exp(c_i) S q_i + sum over j <= i of (q_i . k_j) D_ij u_j
/// S <- exp(c_last) S + sum over j of exp(c_last - c_j) u_j k_j^T
/// ```
/// Every exponent is <= 0: exp(-c) alone, which overflows under strong decay, never appears.
pub fn delta_chunk(
    op: &DeltaChunk,
    qkv: &[f32],
    gates: &[f32],
    span: &[u32],
    state: &mut [f32],
    o: &mut [f32],
) {
    let shape = DeltaShape {
        k_heads: op.k_heads as usize,
        v_heads: op.v_heads as usize,
        head_dim: op.head_dim as usize,
    };
    let d = shape.head_dim;
    let mut u = vec![0.0f64; CHUNK * d];
    let mut sum = vec![0.0f64; d];
    for span in Span::all(span) {
        for j in 0..shape.v_heads {
            let state = &mut state[(span.slot * shape.v_heads + j) * d * d..][..d * d];
            for start in (0..span.rows).step_by(CHUNK) {
                let n = CHUNK.min(span.rows - start);
                let first = span.first + start;
                let vectors = |i: usize| shape.qkv(qkv, first + i, j);
                let mut c = [0.0; CHUNK];
                let mut total = 0.0;
                for (i, c) in c[..n].iter_mut().enumerate() {
                    total += f64::from(shape.gates(gates, first + i, j).0);
                    *c = total;
                }
                for i in 0..n {
                    let [_, k, v] = vectors(i);
                    let beta = f64::from(shape.gates(gates, first + i, j).1);
                    let (solved, u_i) = u.split_at_mut(i * d);
                    for ((u, row), &v) in u_i.iter_mut().zip(state.chunks_exact(d)).zip(v) {
                        *u = beta * (f64::from(v) - c[i].exp() * dot(row, k));
                    }
                    for (m, u_m) in solved.chunks_exact(d).enumerate() {
                        let a = beta * dot(k, vectors(m)[1]) * (c[i] - c[m]).exp();
                        for (u, u_m) in u_i.iter_mut().zip(u_m) {
                            *u -= a * u_m;
                        }
                    }
                }
                for i in 0..n {
                    let [q, ..] = vectors(i);
                    for (sum, row) in sum.iter_mut().zip(state.chunks_exact(d)) {
                        *sum = c[i].exp() * dot(row, q);
                    }
                    for (m, u_m) in u[..(i + 1) * d].chunks_exact(d).enumerate() {
                        let a = dot(q, vectors(m)[1]) * (c[i] - c[m]).exp();
                        for (sum, u_m) in sum.iter_mut().zip(u_m) {
                            *sum += a * u_m;
                        }
                    }
                    let o = &mut o[((first + i) * shape.v_heads + j) * d..][..d];
                    for (o, &sum) in o.iter_mut().zip(&sum) {
                        *o = sum as f32;
                    }
                }
                let last = c[n - 1];
                for (r, row) in state.chunks_exact_mut(d).enumerate() {
                    for (sum, &s) in sum.iter_mut().zip(row.iter()) {
                        *sum = last.exp() * f64::from(s);
                    }
                    for i in 0..n {
                        let a = (last - c[i]).exp() * u[i * d + r];
                        for (sum, &k) in sum.iter_mut().zip(vectors(i)[1]) {
                            *sum += a * f64::from(k);
                        }
                    }
                    for (s, &sum) in row.iter_mut().zip(&sum) {
                        *s = sum as f32;
                    }
                }
            }
        }
    }
}

pub fn gated_norm(op: &GatedNorm, p: &[f32], w: &[f32], o: &mut [f32]) {
    let (heads, d) = (op.heads as usize, op.head_dim as usize);
    let rows = p.chunks_exact(op.width as usize).zip(o.chunks_exact_mut(heads * d));
    for (p, o) in rows {
        let z = &p[op.z_at as usize..][..heads * d];
        for (o, z) in o.chunks_exact_mut(d).zip(z.chunks_exact(d)) {
            let scale = inverse_rms(o, op.eps);
            for ((o, &w), &z) in o.iter_mut().zip(w).zip(z) {
                *o = (f64::from(*o) * scale * f64::from(w) * silu(f64::from(z))) as f32;
            }
        }
    }
}

/// The operands of `qk_rope` that are read.
pub struct QkRopeInputs<'a> {
    pub q_norm: &'a [f32],
    pub k_norm: &'a [f32],
    pub rope: &'a [f32],
    pub span_of: &'a [u32],
    pub span: &'a [u32],
    pub blocks: &'a [u32],
}

/// Elements of a cache: rounded when they are stored.
pub trait Element: super::memory::Plain {
    fn load(self) -> f32;
    fn store(x: f32) -> Self;
}

impl Element for f32 {
    fn load(self) -> f32 {
        self
    }
    fn store(x: f32) -> f32 {
        x
    }
}

/// bf16, as its bits.
impl Element for u16 {
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
    fn store(x: f32) -> u16 {
        bf16::from_f32(x).to_bits()
    }
}

pub fn qk_rope<E: Element>(
    op: &QkRope,
    i: &QkRopeInputs,
    p: &mut [f32],
    k_cache: &mut [E],
    v_cache: &mut [E],
) {
    let (q_heads, kv_heads, d) = (op.q_heads as usize, op.kv_heads as usize, op.head_dim as usize);
    let rotary = op.rotary as usize;
    assert!(rotary.is_multiple_of(2) && rotary <= d, "rotary {rotary} of {d}");
    let blocks =
        Blocks { table: i.blocks, max_blocks: op.max_blocks as usize, kv_heads, head_dim: d };
    let width = (2 * q_heads + 2 * kv_heads) * d;
    for t in 0..op.tokens as usize {
        let span = Span::of(i.span, i.span_of[t] as usize);
        let pos = span.position + t - span.first;
        let p = &mut p[t * width..][..width];
        let (cos, sin) = i.rope[pos * rotary..][..rotary].split_at(rotary / 2);
        let norm_and_rotate = |x: &mut [f32], w: &[f32]| {
            let scale = inverse_rms(x, op.eps);
            let normed = |x: f32, w: f32| f64::from(x) * scale * f64::from(w);
            for j in 0..rotary / 2 {
                let m = j + rotary / 2;
                let (a, b) = (normed(x[j], w[j]), normed(x[m], w[m]));
                let (cos, sin) = (f64::from(cos[j]), f64::from(sin[j]));
                x[j] = (a * cos - b * sin) as f32;
                x[m] = (b * cos + a * sin) as f32;
            }
            for j in rotary..d {
                x[j] = normed(x[j], w[j]) as f32;
            }
        };
        let (queries, kv) = p.split_at_mut(2 * q_heads * d);
        for q in queries.chunks_exact_mut(2 * d) {
            norm_and_rotate(&mut q[..d], i.q_norm);
        }
        let (k, v) = kv.split_at_mut(kv_heads * d);
        for (head, (k, v)) in k.chunks_exact_mut(d).zip(v.chunks_exact(d)).enumerate() {
            norm_and_rotate(k, i.k_norm);
            let at = blocks.at(span.slot, head, pos);
            for (cache, &k) in k_cache[at..][..d].iter_mut().zip(k.iter()) {
                *cache = E::store(k);
            }
            for (cache, &v) in v_cache[at..][..d].iter_mut().zip(v) {
                *cache = E::store(v);
            }
        }
    }
}

/// The operands of `attend` that are read.
pub struct AttendInputs<'a, E> {
    pub p: &'a [f32],
    pub k_cache: &'a [E],
    pub v_cache: &'a [E],
    pub span_of: &'a [u32],
    pub span: &'a [u32],
    pub blocks: &'a [u32],
}

pub fn attend<E: Element>(op: &Attend, i: &AttendInputs<E>, o: &mut [f32]) {
    let (q_heads, kv_heads, d) = (op.q_heads as usize, op.kv_heads as usize, op.head_dim as usize);
    let blocks =
        Blocks { table: i.blocks, max_blocks: op.max_blocks as usize, kv_heads, head_dim: d };
    let width = (2 * q_heads + 2 * kv_heads) * d;
    let mut weights = Vec::new();
    let mut sum = vec![0.0; d];
    for t in 0..op.tokens as usize {
        let span = Span::of(i.span, i.span_of[t] as usize);
        let context = span.position + t - span.first + 1;
        for h in 0..q_heads {
            let (q, gate) = i.p[t * width + 2 * h * d..][..2 * d].split_at(d);
            let kv_head = h / (q_heads / kv_heads);
            weights.clear();
            weights.extend((0..context).map(|pos| {
                let k = &i.k_cache[blocks.at(span.slot, kv_head, pos)..][..d];
                let products = q.iter().zip(k).map(|(&q, k)| f64::from(q) * f64::from(k.load()));
                products.sum::<f64>() / (d as f64).sqrt()
            }));
            let most = weights.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            let mut total = 0.0;
            sum.fill(0.0);
            for (pos, weight) in weights.iter().enumerate() {
                let weight = (weight - most).exp();
                total += weight;
                let v = &i.v_cache[blocks.at(span.slot, kv_head, pos)..][..d];
                for (sum, v) in sum.iter_mut().zip(v) {
                    *sum += weight * f64::from(v.load());
                }
            }
            let o = &mut o[(t * q_heads + h) * d..][..d];
            for ((o, sum), &gate) in o.iter_mut().zip(&sum).zip(gate) {
                *o = (sum / total * sigmoid(f64::from(gate))) as f32;
            }
        }
    }
}

/// Compares logits, not probabilities: in exact arithmetic the order is the same, and two logits
/// whose probabilities would round to the same number keep it.
pub fn route(op: &Route, logits: &[f32], ids: &mut [u32], weights: &mut [f32]) {
    let (experts, top) = (op.experts as usize, op.top as usize);
    assert!(top <= experts, "top {top} of {experts} experts");
    let rows = logits
        .chunks_exact(experts + 1)
        .zip(ids.chunks_exact_mut(top + 1))
        .zip(weights.chunks_exact_mut(top + 1));
    for ((logits, ids), weights) in rows {
        for i in 0..top {
            let mut best = None;
            for e in 0..experts {
                let better = best.is_none_or(|b: usize| logits[e] > logits[b]);
                if better && !ids[..i].contains(&(e as u32)) {
                    best = Some(e);
                }
            }
            ids[i] = best.expect("top <= experts") as u32;
        }
        let chosen = |i: usize| f64::from(logits[ids[i] as usize]);
        let total: f64 = (0..top).map(|i| (chosen(i) - chosen(0)).exp()).sum();
        for (i, weight) in weights[..top].iter_mut().enumerate() {
            *weight = ((chosen(i) - chosen(0)).exp() / total) as f32;
        }
        ids[top] = op.experts;
        weights[top] = sigmoid(f64::from(logits[experts])) as f32;
    }
}

pub fn expert_up(op: &ExpertUp, w: Quantised, x: &[f32], ids: &[u32], h: &mut [f32]) {
    let (chosen, hidden, dim) = (op.top as usize + 1, op.hidden as usize, op.dim as usize);
    let mut row = vec![0.0; dim];
    for (n, (&e, h)) in ids.iter().zip(h.chunks_exact_mut(hidden)).enumerate() {
        assert!(e <= op.experts, "expert {e} of {}", op.experts + 1);
        let x = &x[n / chosen * dim..][..dim];
        let w = w.part(e as usize * 2 * hidden * dim, 2 * hidden * dim);
        for (r, h) in h.iter_mut().enumerate() {
            let mut product = |r: usize| {
                dequantise_q4(w.part(r * dim, dim), &mut row);
                dot(&row, x)
            };
            let (gate, up) = (product(r), product(hidden + r));
            *h = (silu(gate) * up) as f32;
        }
    }
}

pub fn expert_down(
    op: &ExpertDown,
    w: Quantised,
    h: &[f32],
    ids: &[u32],
    weights: &[f32],
    y: &mut [f32],
) {
    let (chosen, hidden, dim) = (op.top as usize + 1, op.hidden as usize, op.dim as usize);
    let mut row = vec![0.0; hidden];
    for (t, y) in y.chunks_exact_mut(dim).enumerate() {
        for (r, y) in y.iter_mut().enumerate() {
            let mut sum = 0.0;
            for n in t * chosen..(t + 1) * chosen {
                let e = ids[n];
                assert!(e <= op.experts, "expert {e} of {}", op.experts + 1);
                dequantise_q4(w.part((e as usize * dim + r) * hidden, hidden), &mut row);
                sum += f64::from(weights[n]) * dot(&row, &h[n * hidden..][..hidden]);
            }
            *y = sum as f32;
        }
    }
}

pub fn zero(y: &mut [u32]) {
    y.fill(0);
}
