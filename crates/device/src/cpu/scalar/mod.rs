//! The rows of the table as plain formulas: what every faster device is compared with.
//!
//! Single-threaded, no instruction set. Everything between a load and a store is computed in
//! f64, so a result is the formula rounded to f32 once (the delta rule rounds its state once a
//! token, as it is stored). Sums run in order of their index, but long dot products take eight
//! partial sums, element i in sum i mod 8, added in order at the end. Every output depends on
//! its own row, span and weights alone: what else is in the batch changes no bit.

mod attention;
mod delta;
mod linear;

use super::memory::Operands;
use crate::ops::*;
pub use attention::{AttendInputs, Blocks, Element};
pub use delta::{CHUNK, DeltaConvInputs, DeltaShape, delta_gates, normalise_heads};

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
pub fn inverse_rms(x: &[f32], eps: f32) -> f64 {
    1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()
}

/// Runs one operation with its operands.
pub fn run(op: &Op, o: &Operands) {
    match op {
        Op::Embed(op) => linear::embed(op, o.read("ids"), o.q4("table"), o.write("x")),
        Op::RmsNorm(op) => rms_norm(op, o.read("x"), o.read("w"), o.write("y")),
        Op::AddRmsNorm(op) => {
            add_rms_norm(op, o.write("x"), o.read("d"), o.read("w"), o.write("y"))
        }
        Op::OutputNorm(op) => {
            output_norm(op, [o.read("x"), o.read("d"), o.read("w")], o.read("rows"), o.write("y"))
        }
        Op::LinearQ4(op) => linear::linear_q4(op, o.q4("w"), o.read("x"), o.write("y")),
        Op::LinearQ8(op) => linear::linear_q8(op, o.q8("w"), o.read("x"), o.write("y")),
        Op::DeltaConv(op) => {
            delta::delta_conv(op, &DeltaConvInputs::of(o), o.write("qkv"), o.write("gates"))
        }
        Op::ConvState(op) => delta::conv_state(op, o.read("p"), o.read("span"), o.write("conv")),
        Op::DeltaStep(op) => {
            let inputs = [o.read("qkv"), o.read("gates")];
            delta::delta_step(op, inputs, o.read("span"), o.write("state"), o.write("o"))
        }
        Op::DeltaChunk(op) => {
            let inputs = [o.read("qkv"), o.read("gates")];
            delta::delta_chunk(op, inputs, o.read("span"), o.write("state"), o.write("o"))
        }
        Op::GatedNorm(op) => gated_norm(op, o.read("p"), o.read("w"), o.write("o")),
        Op::QkRope(op) => match op.kv_bytes {
            2 => qk_rope::<u16>(op, o),
            4 => qk_rope::<f32>(op, o),
            n => panic!("qk_rope: kv_bytes {n}, not 2 or 4"),
        },
        Op::Attend(op) => match op.kv_bytes {
            2 => attention::attend(op, &AttendInputs::<u16>::of(o), o.write("o")),
            4 => attention::attend(op, &AttendInputs::<f32>::of(o), o.write("o")),
            n => panic!("attend: kv_bytes {n}, not 2 or 4"),
        },
        Op::Route(op) => route(op, o.read("logits"), o.write("ids"), o.write("weights")),
        Op::ExpertUp(op) => {
            linear::expert_up(op, o.q4("w"), o.read("x"), o.read("ids"), o.write("h"))
        }
        Op::ExpertDown(op) => linear::expert_down(
            op,
            o.q4("w"),
            o.read("h"),
            (o.read("ids"), o.read("weights")),
            o.write("y"),
        ),
        Op::Zero(_) => o.write::<u32>("y").fill(0),
    }
}

fn qk_rope<E: Element>(op: &QkRope, o: &Operands) {
    let inputs = attention::QkRopeInputs::of(o);
    attention::qk_rope::<E>(op, &inputs, o.write("p"), o.write("k_cache"), o.write("v_cache"));
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

fn output_norm(op: &OutputNorm, [x, d, w]: [&[f32]; 3], rows: &[u32], y: &mut [f32]) {
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

fn gated_norm(op: &GatedNorm, p: &[f32], w: &[f32], o: &mut [f32]) {
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
