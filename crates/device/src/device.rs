//! What the model needs from a machine: memory, and a queue that runs operations in order.
//!
//! The trait serves a CPU that computes at once as well as GPUs that record operations into
//! command buffers or graphs: nothing between [`Device::enqueue`] and [`Device::wait`] returns a
//! value to the host, so a whole forward pass can be in flight, and the next one behind it.

use crate::ops::Op;
use std::ops::Range;
use std::sync::Arc;

/// A range of device memory. Copying a view copies no data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Which buffer of the device.
    pub buffer: u32,
    /// First byte in the buffer.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl View {
    /// The part of this view from byte `start`, `bytes` long. Panics if it does not fit.
    pub fn slice(self, start: u64, bytes: u64) -> View {
        assert!(start + bytes <= self.bytes, "slice {start}+{bytes} of a view of {}", self.bytes);
        View { offset: self.offset + start, bytes, ..self }
    }
}

/// Stands for everything enqueued before [`Device::commit`] returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Host memory that a device may use in place: a mapped file, or bytes in the binary.
pub type HostBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// What goes wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device cannot give that much memory.
    #[error(
        "{device}: no memory for {label}: {bytes} bytes asked; use a shorter --max-seq or fewer slots"
    )]
    OutOfMemory {
        /// Which device.
        device: String,
        /// What the memory was for.
        label: String,
        /// How much was asked.
        bytes: u64,
    },
    /// The machine lacks what the caller asked for by name.
    #[error("{0}")]
    Unsupported(String),
    /// The device failed while it ran operations; its state is lost.
    #[error("{device} failed: {reason}")]
    Lost {
        /// Which device.
        device: String,
        /// The driver's own words.
        reason: String,
    },
}

/// A machine that runs the operations of the table. Only `wait` and `read` block.
pub trait Device: Send {
    /// The device in words, for people: its kind, instruction set or GPU, and threads.
    fn describe(&self) -> String;

    /// Zeroed memory, aligned to 16 KiB. `label` names it in errors.
    fn alloc(&mut self, bytes: u64, label: &str) -> Result<View, Error>;

    /// The part `range` of host memory as a read-only buffer: used in place where the device can
    /// (its start is aligned to 16 bytes on a CPU, to 16 KiB on a GPU that shares memory), else
    /// copied. Panics if the range is not within the bytes.
    fn adopt(&mut self, bytes: HostBytes, range: Range<usize>, label: &str) -> Result<View, Error>;

    /// Queues a copy of `data` to the start of `to`. `data` may be reused when this returns.
    fn write(&mut self, to: View, data: &[u8]);

    /// Queues an operation. It behaves as if it ran after everything queued before it.
    fn enqueue(&mut self, op: Op);

    /// Sends what has been queued on its way.
    fn commit(&mut self) -> Ticket;

    /// Waits until everything `ticket` stands for has run.
    fn wait(&mut self, ticket: Ticket) -> Result<(), Error>;

    /// Copies the start of `from` to `into`, after everything queued so far has run.
    fn read(&mut self, from: View, into: &mut [u8]) -> Result<(), Error>;
}

impl dyn Device + '_ {
    /// Queues one row of the table.
    pub fn run(&mut self, op: impl Into<Op>) {
        self.enqueue(op.into());
    }
}
