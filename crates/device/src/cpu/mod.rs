//! The CPU as a device: operations run at once, in the call that enqueues them.
//!
//! [`scalar`] defines every row of the table; [`vector`] computes the same on the instruction set
//! that [`isa`] chose, with the threads of [`pool`]. This file knows buffers and the choice.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod isa;
mod kernels;
mod memory;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pool;
mod scalar;
mod vector;

use crate::device::{Device, Error, HostBytes, Ticket, View};
use crate::ops::Op;
pub use isa::Isa;
use memory::{Buffer, Operands};
use std::ops::Range;
use vector::Vector;

/// What to run on; what is left out is chosen from the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The instruction set, or the best one the machine has.
    pub isa: Option<Isa>,
    /// Threads, or as many as there are cores for us. The scalar definition uses one.
    pub threads: Option<usize>,
}

/// Cores that this process may use, threads of one core counted once where that can be told.
fn cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, |n| n.get());
    allowed.min(num_cpus::get_physical())
}

/// The processor, with memory of the host.
pub struct Cpu {
    isa: Isa,
    /// Kernels and threads; `scalar` has neither.
    vector: Option<Vector>,
    buffers: Vec<Buffer>,
    /// Tickets given out.
    commits: u64,
}

impl Cpu {
    /// The CPU device under `options`. Errs when the machine lacks the instruction set asked for.
    pub fn new(options: Options) -> Result<Cpu, Error> {
        let (isa, kernels) = isa::choose(options.isa)?;
        let threads = options.threads.unwrap_or_else(cores).max(1);
        let vector = kernels.map(|kernels| Vector::new(kernels, threads));
        Ok(Cpu { isa, vector, buffers: Vec::new(), commits: 0 })
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
        let threads = self.vector.as_ref().map_or(1, Vector::threads);
        format!("cpu: {}, {threads} thread{}", self.isa, if threads == 1 { "" } else { "s" })
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
        match &mut self.vector {
            Some(vector) => vector.run(&op, &o),
            None => scalar::run(&op, &o),
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
