//! A device to run one operation on, with the golden rows as part of a batch.

use crate::vectors::f32s;
use lily_device::cpu::{Options, isa};
use lily_device::{Cpu, Device, HostBytes, Op, View};
use std::sync::Arc;

pub const TOKENS: u32 = 2; // rows of the golden span
pub const PAST: u32 = 6; // tokens of the sequence before it
pub const ROWS: u32 = TOKENS + 1; // of the batch
pub const SPANS: u32 = 2;
pub const SLOTS: u32 = 3;
pub const SLOT: usize = 2; // of the golden span
pub const SPAN_OF: [u32; 3] = [0, 1, 1];
pub const SPAN: [u32; 8] = [0, 1, 0, 0, 1, TOKENS, SLOT as u32, PAST];

/// A device, what to call it, and how far it may be off, relative to the largest element of a
/// result. The scalar device computes in f64 from operands rounded to f32; the others in f32.
pub struct Bench {
    pub name: String,
    pub dev: Box<dyn Device>,
    pub tolerance: f32,
}

pub fn benches() -> Vec<Bench> {
    let mut all = Vec::new();
    for isa in isa::available() {
        let tolerance = if isa == isa::Isa::Scalar { 2e-6 } else { 2e-5 };
        for threads in [1, 3] {
            let dev = Cpu::new(Options { isa: Some(isa), threads: Some(threads) }).expect("a CPU");
            let name = format!("{isa}, {threads} threads");
            all.push(Bench { name, dev: Box::new(dev), tolerance });
        }
    }
    all
}

impl Bench {
    pub fn put(&mut self, data: &[u8]) -> View {
        let view = self.dev.alloc(data.len() as u64, "test").expect("memory");
        self.dev.write(view, data);
        view
    }

    /// Weights, the way a model hands them over.
    pub fn adopt(&mut self, data: Vec<u8>) -> View {
        let range = 0..data.len();
        let data: HostBytes = Arc::new(data);
        self.dev.adopt(data, range, "test").expect("memory")
    }

    pub fn floats(&mut self, data: &[f32]) -> View {
        self.put(&data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn words(&mut self, data: &[u32]) -> View {
        self.put(&data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Rows of a batch: row 0 is noise, the others are those of the golden span.
    pub fn rows(&mut self, golden: &[f32]) -> View {
        let width = golden.len() / TOKENS as usize;
        let noise = (0..width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 40.0);
        self.floats(&noise.chain(golden.iter().copied()).collect::<Vec<_>>())
    }

    /// A state array: the golden one in its slot, 7.5 in the idle one, 0 in slot 0.
    pub fn slots(&mut self, golden: &[f32]) -> View {
        let mut all = vec![0.0; golden.len()];
        all.extend(vec![7.5; golden.len()]);
        all.extend(golden);
        self.floats(&all)
    }

    /// Memory for `elements` results, full of NaN.
    pub fn room(&mut self, elements: u32) -> View {
        self.floats(&vec![f32::NAN; elements as usize])
    }

    pub fn get(&mut self, view: View) -> Vec<u8> {
        let mut data = vec![0; view.bytes as usize];
        self.dev.read(view, &mut data).expect("a read");
        data
    }

    /// Runs `op` and waits for it.
    pub fn run(&mut self, op: impl Into<Op>) {
        self.dev.run(op);
        let ticket = self.dev.commit();
        self.dev.wait(ticket).expect("a step");
    }

    pub fn close(&self, what: &str, got: &[f32], want: &[f32], tolerance: f32) {
        assert_eq!(got.len(), want.len(), "{}: {what}", self.name);
        let size = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let off = got.iter().zip(want).map(|(a, b)| (a - b).abs());
        // f32::max would pass over a NaN.
        let off = off.fold(0.0f32, |m, x| if x > m || x.is_nan() { x } else { m });
        assert!(
            off <= tolerance * size,
            "{}: {what} is off by {off:.2e} of {size:.2e}, allowed {tolerance:.0e}",
            self.name
        );
    }

    /// The golden rows of a result of the batch.
    pub fn check_rows(&mut self, what: &str, got: View, want: &[f32]) {
        let got = f32s(&self.get(got));
        let width = want.len() / TOKENS as usize;
        assert!(got[..width].iter().all(|x| x.is_finite()), "{}: {what}, row 0", self.name);
        self.close(what, &got[width..], want, self.tolerance);
    }

    /// The golden slot of a state array, and that the idle one was left alone.
    pub fn check_slots(&mut self, what: &str, got: View, want: &[f32]) {
        let got = f32s(&self.get(got));
        let [used, idle, own] = [0, 1, 2].map(|slot| &got[slot * want.len()..][..want.len()]);
        assert!(used.iter().all(|x| x.is_finite()), "{}: {what}, slot 0", self.name);
        assert!(idle.iter().all(|&x| x == 7.5), "{}: {what}, the idle slot", self.name);
        self.close(what, own, want, self.tolerance);
    }
}
