//! Attention over the blocks of the KV cache.

use super::{Vector, grain};
use crate::cpu::kernels::{Kernels, Product};
use crate::cpu::pool::{Parts, Scratch};
use crate::cpu::scalar::{AttendInputs, Blocks, Element, Span};
use crate::ops::*;

/// Positions at a time: their keys and values stay in the first-level cache while all query heads
/// that share them pass. A part of a block.
const STEP: usize = 32;
const _: () = assert!((KV_BLOCK as usize).is_multiple_of(STEP));

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
    /// One pass over the context, some positions at a time: weights are relative to the largest
    /// score so far, and what was summed is scaled down when a larger one turns up.
    pub fn attend<E: Cached>(&mut self, op: &Attend, i: &AttendInputs<E>, o: &mut [f32]) {
        let (q_heads, kv_heads, d) =
            (op.q_heads as usize, op.kv_heads as usize, op.head_dim as usize);
        let (tokens, group) = (op.tokens as usize, q_heads / kv_heads);
        let width = (2 * q_heads + 2 * kv_heads) * d;
        let blocks =
            Blocks { table: i.blocks, max_blocks: op.max_blocks as usize, kv_heads, head_dim: d };
        let kernels = self.kernels;
        let o = Parts::new(o);
        // An item is some query heads of a token that share keys and values: all of them, unless
        // threads would have nothing to do.
        let mut each = group;
        while each > 1 && tokens * kv_heads * group.div_ceil(each) < 2 * self.pool.threads() {
            each = each.div_ceil(2);
        }
        let per_token = kv_heads * group.div_ceil(each);
        let work = 2 * each * d * (op.context as usize).div_ceil(op.spans.max(1) as usize);
        self.pool.split(tokens * per_token, grain(work), |range, scratch| {
            for item in range {
                let (t, share) = (item / per_token, item % per_token);
                let (kv_head, share) = (share % kv_heads, share / kv_heads);
                let h = kv_head * group + share * each;
                let n = each.min(group - share * each);
                // SAFETY: one thread has these heads of this token.
                let o = unsafe { o.slice((t * q_heads + h) * d, n * d) };
                let p = &i.p[t * width + 2 * h * d..][..2 * n * d];
                let span = Span::of(i.span, i.span_of[t] as usize);
                let context = span.position + t - span.first + 1;
                let cached = (0..context).step_by(STEP).map(|pos| {
                    let (at, len) = (blocks.at(span.slot, kv_head, pos), STEP.min(context - pos));
                    [&i.k_cache[at..][..len * d], &i.v_cache[at..][..len * d]]
                });
                heads(kernels, d, p, cached, o, scratch);
            }
        });
    }
}

/// The query heads of one token that share `cached` keys and values.
fn heads<'c, E: Cached>(
    kernels: &Kernels,
    d: usize,
    p: &[f32],
    cached: impl Iterator<Item = [&'c [E]; 2]>,
    o: &mut [f32],
    scratch: &mut Scratch,
) {
    let (matvec, combine) = (E::matvec(kernels), E::combine(kernels));
    let n = o.len() / d;
    scratch.clear();
    scratch.resize(n * (d + 2) + d + STEP, 0.0);
    let (queries, rest) = scratch.split_at_mut(n * d);
    let (of_step, rest) = rest.split_at_mut(d);
    let (weights, rest) = rest.split_at_mut(STEP);
    let (most, total) = rest.split_at_mut(n);
    for (q, p) in queries.chunks_exact_mut(d).zip(p.chunks_exact(2 * d)) {
        for (q, p) in q.iter_mut().zip(p) {
            *q = p / (d as f32).sqrt();
        }
    }
    most.fill(f32::NEG_INFINITY);
    o.fill(0.0);
    for [k, v] in cached {
        let weights = &mut weights[..k.len() / d];
        for (h, o) in o.chunks_exact_mut(d).enumerate() {
            matvec(k, &queries[h * d..][..d], weights);
            let largest = weights.iter().fold(most[h], |a, b| a.max(*b));
            (kernels.exp)(weights, largest);
            of_step.fill(0.0);
            combine(v, weights, of_step);
            let shrink = (most[h] - largest).exp();
            most[h] = largest;
            total[h] = total[h] * shrink + weights.iter().sum::<f32>();
            for (o, of_step) in o.iter_mut().zip(of_step.iter()) {
                *o = *o * shrink + of_step;
            }
        }
    }
    for (h, o) in o.chunks_exact_mut(d).enumerate() {
        // What the last step added is in `o`: its memory serves the gate.
        of_step.copy_from_slice(&p[(2 * h + 1) * d..][..d]);
        (kernels.sigmoid)(of_step);
        for (o, open) in o.iter_mut().zip(of_step.iter()) {
            *o = *o / total[h] * open;
        }
    }
}
