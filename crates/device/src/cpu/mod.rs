//! The CPU as a device: operations run at once, in the call that enqueues them.
//!
//! [`scalar`] defines every row of the table; this file knows buffers and binds operands.

pub mod isa;
mod memory;
mod scalar;

use crate::device::{Device, Error, HostBytes, Ticket, View};
use crate::ops::Op;
pub use isa::Isa;
use memory::{Buffer, Operands};
use std::ops::Range;

/// What to run on; what is left out is chosen from the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The instruction set, or the best one the machine has.
    pub isa: Option<Isa>,
    /// Threads, or as many as there are cores for us.
    pub threads: Option<usize>,
}

/// The processor, with memory of the host.
pub struct Cpu {
    isa: Isa,
    buffers: Vec<Buffer>,
    /// Tickets given out.
    commits: u64,
}

impl Cpu {
    /// The CPU device under `options`. Errs when the machine lacks the instruction set asked for.
    pub fn new(options: Options) -> Result<Cpu, Error> {
        let isa = isa::choose(options.isa)?;
        Ok(Cpu { isa, buffers: Vec::new(), commits: 0 })
    }

    fn push(&mut self, buffer: Buffer, bytes: u64) -> View {
        let index = u32::try_from(self.buffers.len()).expect("fewer than 2^32 buffers");
        self.buffers.push(buffer);
        View { buffer: index, offset: 0, bytes }
    }

    fn zeroed(&self, bytes: u64, label: &str) -> Result<Buffer, Error> {
        Buffer::zeroed(bytes).ok_or_else(|| Error::OutOfMemory {
            device: "cpu".into(),
            label: label.into(),
            bytes,
        })
    }
}

impl Device for Cpu {
    fn describe(&self) -> String {
        format!("cpu: {}, 1 thread", self.isa)
    }

    fn alloc(&mut self, bytes: u64, label: &str) -> Result<View, Error> {
        let buffer = self.zeroed(bytes, label)?;
        Ok(self.push(buffer, bytes))
    }

    /// In place where the part starts at a multiple of 16 bytes.
    fn adopt(&mut self, bytes: HostBytes, range: Range<usize>, label: &str) -> Result<View, Error> {
        let part = &(*bytes).as_ref()[range.clone()];
        let len = part.len() as u64;
        let buffer = if part.as_ptr().addr().is_multiple_of(16) {
            Buffer::adopted(bytes, range)
        } else {
            let mut copy = self.zeroed(len, label)?;
            copy.bytes_mut(View { buffer: 0, offset: 0, bytes: len }).copy_from_slice(part);
            copy
        };
        Ok(self.push(buffer, len))
    }

    fn write(&mut self, to: View, data: &[u8]) {
        let to = to.slice(0, data.len() as u64);
        self.buffers[to.buffer as usize].bytes_mut(to).copy_from_slice(data);
    }

    fn enqueue(&mut self, op: Op) {
        let o = Operands::new(&mut self.buffers, &op);
        match &op {
            Op::Embed(op) => scalar::embed(op, o.read("ids"), o.q4("table"), o.write("x")),
            Op::RmsNorm(op) => scalar::rms_norm(op, o.read("x"), o.read("w"), o.write("y")),
            Op::AddRmsNorm(op) => {
                scalar::add_rms_norm(op, o.write("x"), o.read("d"), o.read("w"), o.write("y"))
            }
            Op::OutputNorm(op) => scalar::output_norm(
                op,
                o.read("x"),
                o.read("d"),
                o.read("rows"),
                o.read("w"),
                o.write("y"),
            ),
            Op::LinearQ4(op) => scalar::linear_q4(op, o.q4("w"), o.read("x"), o.write("y")),
            Op::LinearQ8(op) => scalar::linear_q8(op, o.q8("w"), o.read("x"), o.write("y")),
            Op::DeltaConv(op) => {
                let inputs = scalar::DeltaConvInputs {
                    p: o.read("p"),
                    w: o.read("w"),
                    a_log: o.read("a_log"),
                    dt_bias: o.read("dt_bias"),
                    conv: o.read("conv"),
                    span_of: o.read("span_of"),
                    span: o.read("span"),
                };
                scalar::delta_conv(op, &inputs, o.write("qkv"), o.write("gates"))
            }
            Op::ConvState(op) => {
                scalar::conv_state(op, o.read("p"), o.read("span"), o.write("conv"))
            }
            Op::DeltaStep(op) => scalar::delta_step(
                op,
                o.read("qkv"),
                o.read("gates"),
                o.read("span"),
                o.write("state"),
                o.write("o"),
            ),
            Op::DeltaChunk(op) => scalar::delta_chunk(
                op,
                o.read("qkv"),
                o.read("gates"),
                o.read("span"),
                o.write("state"),
                o.write("o"),
            ),
            Op::GatedNorm(op) => scalar::gated_norm(op, o.read("p"), o.read("w"), o.write("o")),
            Op::QkRope(op) => {
                let inputs = scalar::QkRopeInputs {
                    q_norm: o.read("q_norm"),
                    k_norm: o.read("k_norm"),
                    rope: o.read("rope"),
                    span_of: o.read("span_of"),
                    span: o.read("span"),
                    blocks: o.read("blocks"),
                };
                let p = o.write("p");
                match op.kv_bytes {
                    2 => scalar::qk_rope::<u16>(
                        op,
                        &inputs,
                        p,
                        o.write("k_cache"),
                        o.write("v_cache"),
                    ),
                    4 => scalar::qk_rope::<f32>(
                        op,
                        &inputs,
                        p,
                        o.write("k_cache"),
                        o.write("v_cache"),
                    ),
                    n => panic!("qk_rope: kv_bytes {n}, not 2 or 4"),
                }
            }
            Op::Attend(op) => match op.kv_bytes {
                2 => scalar::attend(op, &attend_inputs::<u16>(&o), o.write("o")),
                4 => scalar::attend(op, &attend_inputs::<f32>(&o), o.write("o")),
                n => panic!("attend: kv_bytes {n}, not 2 or 4"),
            },
            Op::Route(op) => {
                scalar::route(op, o.read("logits"), o.write("ids"), o.write("weights"))
            }
            Op::ExpertUp(op) => {
                scalar::expert_up(op, o.q4("w"), o.read("x"), o.read("ids"), o.write("h"))
            }
            Op::ExpertDown(op) => scalar::expert_down(
                op,
                o.q4("w"),
                o.read("h"),
                o.read("ids"),
                o.read("weights"),
                o.write("y"),
            ),
            Op::Zero(_) => scalar::zero(o.write("y")),
        }
    }

    fn commit(&mut self) -> Ticket {
        self.commits += 1;
        Ticket(self.commits)
    }

    fn wait(&mut self, _: Ticket) -> Result<(), Error> {
        Ok(())
    }

    fn read(&mut self, from: View, into: &mut [u8]) -> Result<(), Error> {
        let from = from.slice(0, into.len() as u64);
        into.copy_from_slice(self.buffers[from.buffer as usize].bytes(from));
        Ok(())
    }
}

fn attend_inputs<'a, E: scalar::Element>(o: &Operands<'a>) -> scalar::AttendInputs<'a, E> {
    scalar::AttendInputs {
        p: o.read("p"),
        k_cache: o.read("k_cache"),
        v_cache: o.read("v_cache"),
        span_of: o.read("span_of"),
        span: o.read("span"),
        blocks: o.read("blocks"),
    }
}
