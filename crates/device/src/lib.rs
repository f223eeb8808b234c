//! The operations of the model ([`ops`]), and the machines that run them ([`device`]).
//!
//! All unsafe code of the project lives here, but for one memory map. This crate knows no model:
//! an operation gets its sizes with every call.

pub mod cpu;
pub mod device;
pub mod ops;

pub use cpu::Cpu;
pub use device::{Device, Error, HostBytes, Ticket, View};
pub use ops::Op;
