//! Attention over the blocks of the KV cache.

use super::{Vector, grain};
use crate::cpu::kernels::{Kernels, Product};
use crate::cpu::pool::Parts;
use crate::cpu::scalar::{AttendInputs, Blocks, Element, Span};
use crate::ops::*;

const BLOCK: usize = KV_BLOCK as usize;

/// Elements of a cache, with their kernels.
pub trait Cached: Element {
    fn matvec(kernels: &Kernels) -> Product<Self>;
    fn combine(kernels: &Kernels) -> Product<Self>;
}

impl Cached for f32 {
    fn matvec(kernels: &Kernels) -> Product<f32> {
        kernels.matvec
    }
    fn combine(kernels: &Kernels) -> Product<f32> {
        kernels.combine
    }
}

impl Cached for u16 {
    fn matvec(kernels: &Kernels) -> Product<u16> {
        kernels.matvec_bf16
    }
    fn combine(kernels: &Kernels) -> Product<u16> {
        kernels.combine_bf16
    }
}

impl Vector {
    /// One pass over the context, block by block: weights are relative to the largest score so
    /// far, and what was summed is scaled down when a larger one turns up.
    pub fn attend<E: Cached>(&mut self, op: &Attend, i: &AttendInputs<E>, o: &mut [f32]) {
        let (q_heads, kv_heads, d) =
            (op.q_heads as usize, op.kv_heads as usize, op.head_dim as usize);
        let width = (2 * q_heads + 2 * kv_heads) * d;
        let blocks =
            Blocks { table: i.blocks, max_blocks: op.max_blocks as usize, kv_heads, head_dim: d };
        let (matvec, combine) = (E::matvec(self.kernels), E::combine(self.kernels));
        let kernels = self.kernels;
        let o = Parts::new(o);
        // Neighbouring items share keys and values, or at least a token.
        let work = 2 * d * (op.context as usize).div_ceil(op.spans.max(1) as usize);
        self.pool.split(op.tokens as usize * q_heads, grain(work), |range, scratch| {
            scratch.resize(2 * d + BLOCK, 0.0);
            let (q, rest) = scratch.split_at_mut(d);
            let (of_block, weights) = rest.split_at_mut(d);
            for item in range {
                let (t, h) = (item / q_heads, item % q_heads);
                let kv_head = h / (q_heads / kv_heads);
                let (query, gate) = i.p[t * width + 2 * h * d..][..2 * d].split_at(d);
                for (q, x) in q.iter_mut().zip(query) {
                    *q = x / (d as f32).sqrt();
                }
                // SAFETY: one thread has this head of this token.
                let o = unsafe { o.slice(item * d, d) };
                o.fill(0.0);
                let (mut most, mut total) = (f32::NEG_INFINITY, 0.0f64);
                let span = Span::of(i.span, i.span_of[t] as usize);
                let context = span.position + t - span.first + 1;
                for pos in (0..context).step_by(BLOCK) {
                    let n = BLOCK.min(context - pos);
                    let at = blocks.at(span.slot, kv_head, pos);
                    let weights = &mut weights[..n];
                    matvec(&i.k_cache[at..][..n * d], q, weights);
                    let before = most;
                    most = weights.iter().fold(most, |a, b| a.max(*b));
                    (kernels.exp)(weights, most);
                    of_block.fill(0.0);
                    combine(&i.v_cache[at..][..n * d], weights, of_block);
                    let shrink = (before - most).exp();
                    total = total * f64::from(shrink)
                        + weights.iter().map(|w| f64::from(*w)).sum::<f64>();
                    for (o, of_block) in o.iter_mut().zip(of_block.iter()) {
                        *o = *o * shrink + of_block;
                    }
                }
                // The block's sum is added: its memory serves the gate.
                of_block.copy_from_slice(gate);
                (kernels.sigmoid)(of_block);
                for (o, open) in o.iter_mut().zip(of_block.iter()) {
                    *o = *o / total as f32 * open;
                }
            }
        });
    }
}
