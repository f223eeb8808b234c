//! Products with quantised matrices: embedding, linear, experts.

use super::{dot, silu};
use crate::cpu::memory::{Quantised, scale_and_bias};
use crate::ops::*;

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
    (ids, weights): (&[u32], &[f32]),
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
