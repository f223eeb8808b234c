//! Attention: rotation, the paged cache, and softmax over it.

use super::{Span, inverse_rms, sigmoid};
use crate::cpu::memory::{Operands, Plain};
use crate::ops::*;
use half::bf16;

/// Where the keys and the values of a slot lie.
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

/// Elements of a cache: rounded when they are stored.
pub trait Element: Plain {
    fn load(self) -> f32;
    fn store(x: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
    fn store(x: f32) -> f32 {
        x
    }
}

/// bf16, as its bits.
impl Element for u16 {
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
    fn store(x: f32) -> u16 {
        bf16::from_f32(x).to_bits()
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

impl<'a> QkRopeInputs<'a> {
    pub fn of(o: &Operands<'a>) -> QkRopeInputs<'a> {
        QkRopeInputs {
            q_norm: o.read("q_norm"),
            k_norm: o.read("k_norm"),
            rope: o.read("rope"),
            span_of: o.read("span_of"),
            span: o.read("span"),
            blocks: o.read("blocks"),
        }
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

impl<'a, E: Element> AttendInputs<'a, E> {
    pub fn of(o: &Operands<'a>) -> AttendInputs<'a, E> {
        AttendInputs {
            p: o.read("p"),
            k_cache: o.read("k_cache"),
            v_cache: o.read("v_cache"),
            span_of: o.read("span_of"),
            span: o.read("span"),
            blocks: o.read("blocks"),
        }
    }
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
