//! The delta net: convolution and gates, and the recurrence in its two forms.

use super::{Span, dot, sigmoid, silu, softplus};
use crate::cpu::memory::Operands;
use crate::ops::*;

/// Tokens of one block of the chunked delta rule.
pub const CHUNK: usize = 64;

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

impl<'a> DeltaConvInputs<'a> {
    pub fn of(o: &Operands<'a>) -> DeltaConvInputs<'a> {
        DeltaConvInputs {
            p: o.read("p"),
            w: o.read("w"),
            a_log: o.read("a_log"),
            dt_bias: o.read("dt_bias"),
            conv: o.read("conv"),
            span_of: o.read("span_of"),
            span: o.read("span"),
        }
    }
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
        normalise_heads(op, out);
        delta_gates(op, p, i, &mut gates[t * 2 * v_heads..][..2 * v_heads]);
    }
}

/// q = c_q / |c_q| / sqrt(head_dim),  k = c_k / |c_k|, of one row.
pub fn normalise_heads(op: &DeltaConv, qkv: &mut [f32]) {
    let (k_heads, head_dim) = (op.k_heads as usize, op.head_dim as usize);
    for (head, c) in qkv[..2 * k_heads * head_dim].chunks_exact_mut(head_dim).enumerate() {
        let mut scale = 1.0 / (dot(c, c) + 1e-6).sqrt();
        if head < k_heads {
            scale /= (head_dim as f64).sqrt();
        }
        for c in c {
            *c = (f64::from(*c) * scale) as f32;
        }
    }
}

/// [g | beta] of one row of p.
pub fn delta_gates(op: &DeltaConv, p: &[f32], i: &DeltaConvInputs, gates: &mut [f32]) {
    let v_heads = op.v_heads as usize;
    let (b, a) = p[p.len() - 2 * v_heads..].split_at(v_heads);
    let (g, beta) = gates.split_at_mut(v_heads);
    for j in 0..v_heads {
        let dt = softplus(f64::from(a[j]) + f64::from(i.dt_bias[j]));
        g[j] = (-f64::from(i.a_log[j]).exp() * dt) as f32;
        beta[j] = sigmoid(f64::from(b[j])) as f32;
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
    pub fn of(k_heads: u32, v_heads: u32, head_dim: u32) -> DeltaShape {
        let [k_heads, v_heads, head_dim] = [k_heads, v_heads, head_dim].map(|n| n as usize);
        DeltaShape { k_heads, v_heads, head_dim }
    }

    /// Elements of [q | k | v].
    pub fn channels(&self) -> usize {
        (2 * self.k_heads + self.v_heads) * self.head_dim
    }

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
    [qkv, gates]: [&[f32]; 2],
    span: &[u32],
    state: &mut [f32],
    o: &mut [f32],
) {
    let shape = DeltaShape::of(op.k_heads, op.v_heads, op.head_dim);
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
    [qkv, gates]: [&[f32]; 2],
    span: &[u32],
    state: &mut [f32],
    o: &mut [f32],
) {
    let shape = DeltaShape::of(op.k_heads, op.v_heads, op.head_dim);
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
