//! Products with quantised matrices, and the experts'.

use super::{Vector, grain};
use crate::cpu::kernels::{Kernels, Linear, transpose};
use crate::cpu::memory::Quantised;
use crate::cpu::pool::{Parts, Pool, Scratch};
use crate::ops::*;

/// Rows of W that a kernel gets at once.
const ROWS: usize = 32;
/// Tokens that a kernel gets at once, at most: their activations stay in the second-level cache.
const TOKENS: usize = 64;

/// Puts all of `x` in the order of 4-bit kernels.
fn transpose_all<'a>(pool: &mut Pool, x: &[f32], transposed: &'a mut Vec<f32>) -> &'a [f32] {
    transposed.resize(x.len(), 0.0);
    let parts = Parts::new(transposed);
    pool.split(x.len() / 64, grain(64), |range, _| {
        let (start, len) = (range.start * 64, range.len() * 64);
        // SAFETY: ranges do not overlap.
        transpose(&x[start..][..len], unsafe { parts.slice(start, len) });
    });
    transposed
}

/// y[t, r] = W[r] . x[t]
fn linear(
    pool: &mut Pool,
    kernel: Linear,
    (rows, cols): (usize, usize),
    w: Quantised,
    x: &[f32],
    y: &mut [f32],
) {
    let tokens = x.len() / cols;
    let blocks = rows.div_ceil(ROWS);
    let y = Parts::new(y);
    // An item is a block of W's rows times a strip of tokens; blocks of one strip follow each
    // other, so that a thread keeps its activations.
    let strips = tokens.div_ceil(TOKENS);
    let work = ROWS.min(rows) * TOKENS.min(tokens) * cols;
    pool.split(strips * blocks, grain(work), |range, out| {
        for item in range {
            let (strip, block) = (item / blocks, item % blocks);
            let (t, r) = (strip * TOKENS, block * ROWS);
            let (n, m) = (TOKENS.min(tokens - t), ROWS.min(rows - r));
            let w = w.part(r * cols, m * cols);
            let mut strip = [[].as_slice(); TOKENS];
            for (strip, x) in strip.iter_mut().zip(x[t * cols..].chunks_exact(cols)) {
                *strip = x;
            }
            out.resize(m * n, 0.0);
            kernel(w, cols, &strip[..n], out);
            for i in 0..n {
                // SAFETY: one thread has this block of this strip.
                let y = unsafe { y.slice((t + i) * rows + r, m) };
                for (y, out) in y.iter_mut().zip(out[i..].iter().step_by(n)) {
                    *y = *out;
                }
            }
        }
    });
}

/// Which rows want which expert, so that an expert's weights are read once a step.
#[derive(Default)]
pub struct Experts {
    /// Where the next row of each expert goes in `order`.
    next: Vec<usize>,
    /// Numbers t (top + 1) + i, by expert, ascending for each.
    order: Vec<usize>,
    runs: Vec<Run>,
}

/// Up to [`TOKENS`] rows of one expert: a range of `order`.
struct Run {
    expert: usize,
    start: usize,
    len: usize,
}

impl Experts {
    fn sort(&mut self, ids: &[u32], experts: usize) {
        self.next.clear();
        self.next.resize(experts + 1, 0);
        for &e in ids {
            assert!((e as usize) < experts, "expert {e} of {experts}");
            self.next[e as usize + 1] += 1;
        }
        for e in 0..experts {
            self.next[e + 1] += self.next[e];
        }
        self.runs.clear();
        for e in 0..experts {
            let (start, end) = (self.next[e], self.next[e + 1]);
            self.runs.extend((start..end).step_by(TOKENS).map(|start| Run {
                expert: e,
                start,
                len: TOKENS.min(end - start),
            }));
        }
        self.order.resize(ids.len(), 0);
        for (n, &e) in ids.iter().enumerate() {
            let next = &mut self.next[e as usize];
            self.order[*next] = n;
            *next += 1;
        }
    }

    /// The numbers of a run's rows.
    fn rows(&self, run: &Run) -> &[usize] {
        &self.order[run.start..][..run.len]
    }
}

/// out[r, i] = W[r] . x(i) for the rows of one run.
fn product<'x>(
    kernels: &Kernels,
    w: Quantised,
    cols: usize,
    rows: &[usize],
    x: impl Fn(usize) -> &'x [f32],
    out: &mut [f32],
) {
    let mut strip = [[].as_slice(); TOKENS];
    for (strip, &n) in strip.iter_mut().zip(rows) {
        *strip = x(n);
    }
    (kernels.linear_q4)(w, cols, &strip[..rows.len()], out);
}

impl Vector {
    pub fn linear_q4(&mut self, op: &LinearQ4, w: Quantised, x: &[f32], y: &mut [f32]) {
        let x = transpose_all(&mut self.pool, x, &mut self.transposed);
        let size = (op.rows as usize, op.cols as usize);
        linear(&mut self.pool, self.kernels.linear_q4, size, w, x, y);
    }

    pub fn linear_q8(&mut self, op: &LinearQ8, w: Quantised, x: &[f32], y: &mut [f32]) {
        let size = (op.rows as usize, op.cols as usize);
        linear(&mut self.pool, self.kernels.linear_q8, size, w, x, y);
    }

    pub fn expert_up(
        &mut self,
        op: &ExpertUp,
        w: Quantised,
        x: &[f32],
        ids: &[u32],
        h: &mut [f32],
    ) {
        let (chosen, hidden, dim) = (op.top as usize + 1, op.hidden as usize, op.dim as usize);
        let x = transpose_all(&mut self.pool, x, &mut self.transposed);
        self.experts.sort(ids, op.experts as usize + 1);
        let (kernels, experts) = (self.kernels, &self.experts);
        let h = Parts::new(h);
        let blocks = hidden.div_ceil(ROWS);
        let items = experts.runs.len() * blocks;
        let work = 2 * ROWS.min(hidden) * dim * ids.len().div_ceil(experts.runs.len().max(1));
        self.pool.split(items, grain(work), |range, out| {
            for item in range {
                let (run, r) = (&experts.runs[item / blocks], item % blocks * ROWS);
                let (rows, m) = (experts.rows(run), ROWS.min(hidden - r));
                let len = rows.len();
                out.resize(2 * m * len, 0.0);
                let (gate, up) = out.split_at_mut(m * len);
                let x = |n: usize| &x[n / chosen * dim..][..dim];
                let first = run.expert * 2 * hidden + r;
                product(kernels, w.part(first * dim, m * dim), dim, rows, x, gate);
                product(kernels, w.part((first + hidden) * dim, m * dim), dim, rows, x, up);
                (kernels.silu)(gate);
                for (gate, up) in gate.iter_mut().zip(up) {
                    *gate *= *up;
                }
                for (i, &n) in rows.iter().enumerate() {
                    // SAFETY: one thread has this block of row n.
                    let h = unsafe { h.slice(n * hidden + r, m) };
                    for (h, out) in h.iter_mut().zip(gate[i..].iter().step_by(len)) {
                        *h = *out;
                    }
                }
            }
        });
    }

    pub fn expert_down(
        &mut self,
        op: &ExpertDown,
        w: Quantised,
        h: &[f32],
        ids: &[u32],
        weights: &[f32],
        y: &mut [f32],
    ) {
        let (chosen, hidden, dim) = (op.top as usize + 1, op.hidden as usize, op.dim as usize);
        let h = transpose_all(&mut self.pool, h, &mut self.transposed);
        self.experts.sort(ids, op.experts as usize + 1);
        let (kernels, experts) = (self.kernels, &self.experts);
        let y = Parts::new(y);
        let work = ROWS.min(dim) * hidden * ids.len();
        self.pool.split(dim.div_ceil(ROWS), grain(work), |range, scratch: &mut Scratch| {
            for block in range {
                let r = block * ROWS;
                let m = ROWS.min(dim - r);
                // Every expert's share of these columns of y first; then each token's sum, in
                // the order of its experts.
                scratch.resize(m * (ids.len() + TOKENS), 0.0);
                let (shares, out) = scratch.split_at_mut(m * ids.len());
                for run in &experts.runs {
                    let rows = experts.rows(run);
                    let out = &mut out[..m * rows.len()];
                    let h = |n: usize| &h[n * hidden..][..hidden];
                    let w = w.part((run.expert * dim + r) * hidden, m * hidden);
                    product(kernels, w, hidden, rows, h, out);
                    for (i, &n) in rows.iter().enumerate() {
                        let share = shares[n * m..][..m].iter_mut();
                        for (share, out) in share.zip(out[i..].iter().step_by(rows.len())) {
                            *share = weights[n] * out;
                        }
                    }
                }
                for (t, shares) in shares.chunks_exact(m * chosen).enumerate() {
                    // SAFETY: one thread has this block of token t.
                    let y = unsafe { y.slice(t * dim + r, m) };
                    y.fill(0.0);
                    for share in shares.chunks_exact(m) {
                        for (y, share) in y.iter_mut().zip(share) {
                            *y += share;
                        }
                    }
                }
            }
        });
    }
}
