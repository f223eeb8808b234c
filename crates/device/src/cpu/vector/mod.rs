//! The rows of the table on vector kernels and threads: the fast form of [`super::scalar`].
//!
//! What gains nothing from vectors runs as the scalar row, over threads where there are many
//! tokens. Work is shared so that every result is computed by one thread in one order: neither
//! the number of threads nor the batch changes a bit.

mod attention;
mod delta;
mod linear;

use super::kernels::Kernels;
use super::memory::Operands;
use super::pool::{Parts, Pool};
use super::scalar::{self, inverse_rms};
use crate::ops::*;

/// Work, in multiplications, below which a thread is not worth waking: some microseconds.
const GRAIN: usize = 64 << 10;

/// How many items make a part, when each takes `work` multiplications.
fn grain(work: usize) -> usize {
    GRAIN.div_ceil(work.max(1))
}

/// Vector kernels, and the threads that run them.
pub struct Vector {
    kernels: &'static Kernels,
    pool: Pool,
    /// Activations in the order that 4-bit kernels read.
    transposed: Vec<f32>,
    experts: linear::Experts,
}

impl Vector {
    pub fn new(kernels: &'static Kernels, threads: usize) -> Vector {
        let pool = Pool::new(threads);
        Vector { kernels, pool, transposed: Vec::new(), experts: Default::default() }
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Runs one operation with its operands.
    pub fn run(&mut self, op: &Op, o: &Operands) {
        match op {
            Op::RmsNorm(op) => self.rms_norm(op, o.read("x"), o.read("w"), o.write("y")),
            Op::AddRmsNorm(op) => {
                self.add_rms_norm(op, o.write("x"), o.read("d"), o.read("w"), o.write("y"))
            }
            Op::GatedNorm(op) => self.gated_norm(op, o.read("p"), o.read("w"), o.write("o")),
            Op::Route(op) => self.route(op, o.read("logits"), o.write("ids"), o.write("weights")),
            Op::LinearQ4(op) => self.linear_q4(op, o.q4("w"), o.read("x"), o.write("y")),
            Op::LinearQ8(op) => self.linear_q8(op, o.q8("w"), o.read("x"), o.write("y")),
            Op::ExpertUp(op) => {
                self.expert_up(op, o.q4("w"), o.read("x"), o.read("ids"), o.write("h"))
            }
            Op::ExpertDown(op) => self.expert_down(
                op,
                o.q4("w"),
                o.read("h"),
                o.read("ids"),
                o.read("weights"),
                o.write("y"),
            ),
            Op::DeltaConv(op) => {
                let inputs = scalar::DeltaConvInputs::of(o);
                self.delta_conv(op, &inputs, o.write("qkv"), o.write("gates"))
            }
            Op::DeltaStep(op) => {
                let rule = delta::Rule::of((op.k_heads, op.v_heads, op.head_dim), o);
                self.delta_step(&rule, o.write("state"), o.write("o"))
            }
            Op::DeltaChunk(op) => {
                let rule = delta::Rule::of((op.k_heads, op.v_heads, op.head_dim), o);
                self.delta_chunk(&rule, o.write("state"), o.write("o"))
            }
            Op::Attend(op) => match op.kv_bytes {
                2 => self.attend(op, &scalar::AttendInputs::<u16>::of(o), o.write("o")),
                4 => self.attend(op, &scalar::AttendInputs::<f32>::of(o), o.write("o")),
                n => panic!("attend: kv_bytes {n}, not 2 or 4"),
            },
            Op::Embed(_) | Op::OutputNorm(_) | Op::ConvState(_) | Op::QkRope(_) | Op::Zero(_) => {
                scalar::run(op, o)
            }
        }
    }

    fn rms_norm(&mut self, op: &RmsNorm, x: &[f32], w: &[f32], y: &mut [f32]) {
        let dim = op.dim as usize;
        let y = Parts::new(y);
        self.pool.split(op.tokens as usize, grain(4 * dim), |range, _| {
            let (start, len) = (range.start * dim, range.len() * dim);
            // SAFETY: ranges do not overlap.
            let y = unsafe { y.slice(start, len) };
            scalar::rms_norm(op, &x[start..][..len], w, y);
        });
    }

    fn add_rms_norm(
        &mut self,
        op: &AddRmsNorm,
        x: &mut [f32],
        d: &[f32],
        w: &[f32],
        y: &mut [f32],
    ) {
        let dim = op.dim as usize;
        let (x, y) = (Parts::new(x), Parts::new(y));
        self.pool.split(op.tokens as usize, grain(4 * dim), |range, _| {
            let (start, len) = (range.start * dim, range.len() * dim);
            // SAFETY: ranges do not overlap.
            let (x, y) = unsafe { (x.slice(start, len), y.slice(start, len)) };
            scalar::add_rms_norm(op, x, &d[start..][..len], w, y);
        });
    }

    fn gated_norm(&mut self, op: &GatedNorm, p: &[f32], w: &[f32], o: &mut [f32]) {
        let (d, width) = (op.head_dim as usize, op.width as usize);
        let inner = op.heads as usize * d;
        let kernels = self.kernels;
        let o = Parts::new(o);
        self.pool.split(op.tokens as usize, grain(8 * inner), |range, gate| {
            for t in range {
                // SAFETY: one thread has token t.
                let o = unsafe { o.slice(t * inner, inner) };
                gate.clear();
                gate.extend_from_slice(&p[t * width + op.z_at as usize..][..inner]);
                (kernels.silu)(gate);
                for (o, gate) in o.chunks_exact_mut(d).zip(gate.chunks_exact(d)) {
                    let scale = inverse_rms(o, op.eps) as f32;
                    for ((o, w), gate) in o.iter_mut().zip(w).zip(gate) {
                        *o *= scale * w * gate;
                    }
                }
            }
        });
    }

    fn route(&mut self, op: &Route, logits: &[f32], ids: &mut [u32], weights: &mut [f32]) {
        let (experts, chosen) = (op.experts as usize, op.top as usize + 1);
        let (ids, weights) = (Parts::new(ids), Parts::new(weights));
        self.pool.split(op.tokens as usize, grain(chosen * experts), |range, _| {
            let (start, len) = (range.start * chosen, range.len() * chosen);
            // SAFETY: ranges do not overlap.
            let (ids, weights) = unsafe { (ids.slice(start, len), weights.slice(start, len)) };
            let logits = &logits[range.start * (experts + 1)..range.end * (experts + 1)];
            scalar::route(op, logits, ids, weights);
        });
    }
}
