//! The CPU device itself: memory, adopted bytes, choices, and what it refuses.

use crate::harness::Machine;
use lily_device::cpu::{Isa, Options, isa};
use lily_device::ops::*;
use lily_device::{Cpu, Device, Error, HostBytes, View};
use std::sync::Arc;

fn cpu() -> Cpu {
    Cpu::new(Options::default()).expect("any machine will do")
}

#[test]
fn memory_is_zero_and_keeps_what_is_written() {
    let mut cpu = cpu();
    let view = cpu.alloc(100_000, "test").unwrap();
    let mut bytes = vec![1; 100_000];
    cpu.read(view, &mut bytes).unwrap();
    assert!(bytes.iter().all(|b| *b == 0));
    cpu.write(view.slice(99_990, 10), &[1, 2, 3]);
    cpu.read(view.slice(99_988, 12), &mut bytes[..6]).unwrap();
    assert_eq!(bytes[..6], [0, 0, 1, 2, 3, 0]);
    let empty = cpu.alloc(0, "nothing").unwrap();
    cpu.write(empty, &[]);
}

#[test]
fn more_memory_than_there_is_is_an_error() {
    let mut cpu = cpu();
    for bytes in [u64::MAX, u64::MAX - 1000, 1 << 62, 1 << 50] {
        let error = cpu.alloc(bytes, "the cache").unwrap_err();
        assert!(matches!(&error, Error::OutOfMemory { bytes: asked, .. } if *asked == bytes));
        assert!(error.to_string().contains("no memory for the cache"), "{error}");
    }
}

#[test]
fn host_bytes_are_read_wherever_they_lie() {
    let mut host = vec![0u8; 64];
    for (i, byte) in host.iter_mut().enumerate() {
        *byte = i as u8;
    }
    let host: HostBytes = Arc::new(host);
    for start in 0..32 {
        let mut m = Machine { cpu: cpu() };
        let view = m.cpu.adopt(host.clone(), start..start + 32, "test").unwrap();
        assert_eq!(view.bytes, 32);
        let mut bytes = [0; 32];
        m.cpu.read(view, &mut bytes).unwrap();
        assert!(bytes.iter().enumerate().all(|(i, b)| usize::from(*b) == start + i));
        assert_eq!(m.get_u32(view)[0].to_le_bytes()[0], start as u8);
    }
}

/// 64 bytes that start at a multiple of 16.
#[repr(align(16))]
struct Aligned([u8; 64]);

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[test]
fn adopted_bytes_live_as_long_as_the_device() {
    let host = Arc::new(Aligned([3; 64]));
    let weak = Arc::downgrade(&host);
    let mut cpu = cpu();
    let view = cpu.adopt(host, 16..64, "test").unwrap();
    let mut bytes = [0; 48];
    cpu.read(view, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 48]);
    assert!(weak.upgrade().is_some());
    drop(cpu);
    assert!(weak.upgrade().is_none());
}

#[test]
#[should_panic(expected = "adopted memory is never written")]
fn adopted_bytes_are_not_written() {
    let mut cpu = cpu();
    let view = cpu.adopt(Arc::new(Aligned([0; 64])), 0..64, "test").unwrap();
    cpu.write(view, &[1]);
}

#[test]
#[should_panic(expected = "adopted memory is never written")]
fn adopted_bytes_are_no_result() {
    let mut cpu = cpu();
    let y = cpu.adopt(Arc::new(Aligned([0; 64])), 0..64, "test").unwrap();
    cpu.enqueue(Zero { y, words: 4 }.into());
}

#[test]
#[should_panic(expected = "zero.y: needs 20 bytes, its view has 16")]
fn an_operand_must_fit_its_view() {
    let mut cpu = cpu();
    let y = cpu.alloc(16, "test").unwrap();
    cpu.enqueue(Zero { y, words: 5 }.into());
}

#[test]
#[should_panic(expected = "leaves its buffer of 16 bytes")]
fn a_view_must_fit_its_buffer() {
    let mut cpu = cpu();
    let y = cpu.alloc(16, "test").unwrap();
    cpu.enqueue(Zero { y: View { bytes: 32, ..y }, words: 5 }.into());
}

#[test]
fn an_instruction_set_is_named_or_refused() {
    for isa in isa::available() {
        assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        let cpu = Cpu::new(Options { isa: Some(isa), threads: Some(1) }).unwrap();
        assert!(cpu.describe().contains(&isa.to_string()), "{}", cpu.describe());
    }
    let error = "sse9".parse::<Isa>().unwrap_err().to_string();
    assert!(error.contains("\"sse9\"") && error.contains("scalar"), "{error}");
}
