//! The delta net: convolution, and the recurrence in its two forms.

use super::{Vector, grain};
use crate::cpu::kernels::{DeltaToken, Kernels};
use crate::cpu::memory::Operands;
use crate::cpu::pool::{Parts, Scratch};
use crate::cpu::scalar::{CHUNK, DeltaConvInputs, DeltaShape, Span, delta_gates, normalise_heads};
use crate::ops::*;

/// The delta rule's sizes, and the operands it reads.
pub struct Rule<'a> {
    shape: DeltaShape,
    qkv: &'a [f32],
    gates: &'a [f32],
    span: &'a [u32],
}

impl<'a> Rule<'a> {
    /// Sizes are key heads, value heads and their length.
    pub fn of((k_heads, v_heads, head_dim): (u32, u32, u32), o: &Operands<'a>) -> Rule<'a> {
        let shape = DeltaShape::of(k_heads, v_heads, head_dim);
        Rule { shape, qkv: o.read("qkv"), gates: o.read("gates"), span: o.read("span") }
    }
}

/// Log decays below this count as total: no f32 sum keeps a share of 9e-27, and what it multiplies
/// would be subnormal numbers, on which processors take a hundred times as long.
const FORGOTTEN: f64 = -60.0;

/// exp(g) for a log decay that may be total.
fn decay(g: f64) -> f32 {
    if g < FORGOTTEN { 0.0 } else { g.exp() as f32 }
}

/// What [`Kernels::exp`] makes [`decay`] of.
fn exponent(g: f64) -> f32 {
    if g < FORGOTTEN { f32::NEG_INFINITY } else { g as f32 }
}

/// `n` floats from the front of `rest`, which keeps the others.
fn take<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (taken, left) = std::mem::take(rest).split_at_mut(n);
    *rest = left;
    taken
}

impl Vector {
    pub fn delta_conv(
        &mut self,
        op: &DeltaConv,
        i: &DeltaConvInputs,
        qkv: &mut [f32],
        gates: &mut [f32],
    ) {
        let shape = DeltaShape::of(op.k_heads, op.v_heads, op.head_dim);
        let (channels, v_heads) = (shape.channels(), shape.v_heads);
        let width = channels + v_heads * shape.head_dim + 2 * v_heads;
        let kept = TAPS as usize - 1;
        let kernels = self.kernels;
        let (qkv, gates) = (Parts::new(qkv), Parts::new(gates));
        let w = i.w.as_chunks::<{ TAPS as usize }>().0;
        self.pool.split(op.tokens as usize, grain(12 * channels), |range, _| {
            for t in range {
                // SAFETY: one thread has token t.
                let (qkv, gates) = unsafe {
                    (qkv.slice(t * channels, channels), gates.slice(t * 2 * v_heads, 2 * v_heads))
                };
                let span = Span::of(i.span, i.span_of[t] as usize);
                let mut x = [[].as_slice(); TAPS as usize];
                for (tap, x) in x.iter_mut().enumerate() {
                    // Row of the span, shifted by the rows that the state holds.
                    let row = t - span.first + tap;
                    *x = if row < kept {
                        &i.conv[(span.slot * kept + row) * channels..][..channels]
                    } else {
                        &i.p[(span.first + row - kept) * width..][..channels]
                    };
                }
                (kernels.conv)(x, w, qkv);
                normalise_heads(op, qkv);
                delta_gates(op, &i.p[t * width..][..width], i, gates);
            }
        });
    }

    pub fn delta_step(&mut self, rule: &Rule, state: &mut [f32], o: &mut [f32]) {
        self.delta_rule(rule, state, o, 3, |kernels, head, scratch| {
            let d = head.rule.shape.head_dim;
            scratch.resize(d, 0.0);
            for t in head.span.first..head.span.first + head.span.rows {
                let [q, k, v] = head.rule.shape.qkv(head.rule.qkv, t, head.j);
                let (g, beta) = head.rule.shape.gates(head.rule.gates, t, head.j);
                (kernels.matvec)(head.state, k, scratch);
                let step = DeltaToken { decay: decay(f64::from(g)), beta, q, k, v };
                (kernels.delta)(&step, scratch, head.state, head.o(t));
            }
        });
    }

    /// As [`crate::cpu::scalar::delta_chunk`], with products of vectors and matrices. Exponents
    /// are subtracted in f64: behind strong decay, f32 would lose what a small difference is.
    pub fn delta_chunk(&mut self, rule: &Rule, state: &mut [f32], o: &mut [f32]) {
        self.delta_rule(rule, state, o, 4, |kernels, head, scratch| {
            let d = head.rule.shape.head_dim;
            scratch.resize((2 * d + 2) * CHUNK + d, 0.0);
            let mut rest = scratch.as_mut_slice();
            let (keys, u) = (take(&mut rest, CHUNK * d), take(&mut rest, CHUNK * d));
            let (known, since, row) = (take(&mut rest, d), take(&mut rest, CHUNK), rest);
            for start in (0..head.span.rows).step_by(CHUNK) {
                let n = CHUNK.min(head.span.rows - start);
                let first = head.span.first + start;
                let mut c = [0.0f64; CHUNK];
                let mut total = 0.0;
                for (i, (c, key)) in c[..n].iter_mut().zip(keys.chunks_exact_mut(d)).enumerate() {
                    total += f64::from(head.rule.shape.gates(head.rule.gates, first + i, head.j).0);
                    *c = total;
                    key.copy_from_slice(head.rule.shape.qkv(head.rule.qkv, first + i, head.j)[1]);
                }
                for i in 0..n {
                    let t = first + i;
                    let [q, k, v] = head.rule.shape.qkv(head.rule.qkv, t, head.j);
                    let beta = head.rule.shape.gates(head.rule.gates, t, head.j).1;
                    let from_start = decay(c[i]);
                    let since = &mut since[..=i];
                    for (since, c_m) in since.iter_mut().zip(&c) {
                        *since = exponent(c[i] - c_m);
                    }
                    (kernels.exp)(since, 0.0);

                    (kernels.matvec)(head.state, k, known);
                    let (solved, u_i) = u[..(i + 1) * d].split_at_mut(i * d);
                    for ((u, v), known) in u_i.iter_mut().zip(v).zip(known.iter()) {
                        *u = beta * (v - from_start * known);
                    }
                    let a = &mut row[..i];
                    (kernels.matvec)(&keys[..i * d], k, a);
                    for (a, since) in a.iter_mut().zip(since.iter()) {
                        *a *= -beta * since;
                    }
                    (kernels.combine)(solved, a, u_i);

                    let o = head.o(t);
                    (kernels.matvec)(head.state, q, o);
                    for o in o.iter_mut() {
                        *o *= from_start;
                    }
                    let a = &mut row[..=i];
                    (kernels.matvec)(&keys[..(i + 1) * d], q, a);
                    for (a, since) in a.iter_mut().zip(since.iter()) {
                        *a *= since;
                    }
                    (kernels.combine)(&u[..(i + 1) * d], a, o);
                }
                let last = c[n - 1];
                let to_end = &mut since[..n];
                for (to_end, c) in to_end.iter_mut().zip(&c) {
                    *to_end = exponent(last - c);
                }
                (kernels.exp)(to_end, 0.0);
                let (through, a) = (decay(last), &mut row[..n]);
                for (r, state) in head.state.chunks_exact_mut(d).enumerate() {
                    for s in state.iter_mut() {
                        *s *= through;
                    }
                    for ((a, to_end), u) in a.iter_mut().zip(to_end.iter()).zip(u.chunks_exact(d)) {
                        *a = to_end * u[r];
                    }
                    (kernels.combine)(&keys[..n * d], a, state);
                }
            }
        });
    }

    /// Runs `head` for every value head of every span; `work` is in passes over a state a token.
    fn delta_rule(
        &mut self,
        rule: &Rule,
        state: &mut [f32],
        o: &mut [f32],
        work: usize,
        head: impl Fn(&Kernels, &mut Head, &mut Scratch) + Sync,
    ) {
        let (d, v_heads) = (rule.shape.head_dim, rule.shape.v_heads);
        let spans = rule.span.len() / 4;
        let rows: usize = Span::all(rule.span).map(|span| span.rows).sum();
        assert_disjoint(rule.span);
        let kernels = self.kernels;
        let (state, o) = (Parts::new(state), Parts::new(o));
        let work = work * d * d * rows.div_ceil(spans.max(1));
        self.pool.split(spans * v_heads, grain(work), |range, scratch| {
            for item in range {
                let (span, j) = (Span::of(rule.span, item / v_heads), item % v_heads);
                // SAFETY: one thread has head j of this span, and no other span has its slot:
                // `assert_disjoint` saw to it.
                let state = unsafe { state.slice((span.slot * v_heads + j) * d * d, d * d) };
                head(kernels, &mut Head { rule, span, j, state, o: &o }, scratch);
            }
        });
    }
}

/// Panics if two spans share a slot or a row.
fn assert_disjoint(spans: &[u32]) {
    let mut slots: Vec<_> = Span::all(spans).map(|span| span.slot).collect();
    slots.sort_unstable();
    assert!(slots.is_sorted_by(|a, b| a < b), "two spans share a slot: {slots:?}");
    let mut rows: Vec<_> = Span::all(spans).map(|span| (span.first, span.rows)).collect();
    rows.sort_unstable();
    let apart = rows.is_sorted_by(|a, b| a.0 + a.1 <= b.0);
    assert!(apart, "two spans share a row: {rows:?}");
}

/// One value head of one span.
struct Head<'a> {
    rule: &'a Rule<'a>,
    span: Span,
    j: usize,
    state: &'a mut [f32],
    o: &'a Parts<'a, f32>,
}

impl<'a> Head<'a> {
    /// The output of token `t`, which is one of the span's.
    fn o(&self, t: usize) -> &'a mut [f32] {
        let DeltaShape { v_heads, head_dim, .. } = self.rule.shape;
        // SAFETY: one thread has this head of this span, no other span has this token, and the
        // thread uses one output at a time.
        unsafe { self.o.slice((t * v_heads + self.j) * head_dim, head_dim) }
    }
}
