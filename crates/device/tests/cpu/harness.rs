//! What the tests of rows share: devices to run on, inputs to feed, answers to compare.

use half::bf16;
use lily_device::cpu::{Isa, Options, isa};
use lily_device::{Cpu, Device, Op, View};

/// Numbers of splitmix64: the same on every machine.
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A whole number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Uniform in 0 .. 1.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Normal with mean 0 and standard deviation 1.
    pub fn normal(&mut self) -> f32 {
        let (a, b) = (1.0 - self.uniform(), self.uniform());
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    /// `n` different numbers below `of`, in random order.
    pub fn distinct(&mut self, n: usize, of: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..of).collect();
        for i in 0..n {
            let j = i + self.below(of - i);
            all.swap(i, j);
        }
        all.truncate(n);
        all
    }
}

/// A quantised matrix with every part in sight.
#[derive(Clone)]
pub struct Matrix {
    pub bits: usize,
    pub cols: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<bf16>,
    pub biases: Vec<bf16>,
}

impl Matrix {
    /// Scales of both signs; some groups all zero.
    pub fn random(rng: &mut Rng, bits: usize, rows: usize, cols: usize) -> Matrix {
        let levels = 1 << bits;
        let codes = (0..rows * cols).map(|_| rng.below(levels) as u8).collect();
        let mut scales = Vec::new();
        let mut biases = Vec::new();
        for _ in 0..rows * cols / 64 {
            let zero = rng.below(10) == 0;
            let scale = if zero { 0.0 } else { rng.normal() * 0.8 / levels as f32 };
            let bias = if zero { 0.0 } else { -scale * levels as f32 / 2.0 + 0.1 * rng.normal() };
            scales.push(bf16::from_f32(scale));
            biases.push(bf16::from_f32(bias));
        }
        Matrix { bits, cols, codes, scales, biases }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = match self.bits {
            4 => self.codes.chunks_exact(2).map(|c| c[0] | c[1] << 4).collect(),
            _ => self.codes.clone(),
        };
        for (scale, bias) in self.scales.iter().zip(&self.biases) {
            bytes.extend(scale.to_le_bytes());
            bytes.extend(bias.to_le_bytes());
        }
        bytes
    }

    pub fn at(&self, row: usize, col: usize) -> f64 {
        let i = row * self.cols + col;
        f64::from(self.scales[i / 64]) * f64::from(self.codes[i]) + f64::from(self.biases[i / 64])
    }

    /// Row . x, and the sum of the products' magnitudes: what rounding errors are relative to.
    pub fn dot(&self, row: usize, x: &[f32]) -> (f64, f64) {
        x.iter().enumerate().fold((0.0, 0.0), |(sum, size), (c, &x)| {
            let product = self.at(row, c) * f64::from(x);
            (sum + product, size + product.abs())
        })
    }
}

/// One device, and shorthand for its memory.
pub struct Machine {
    pub cpu: Cpu,
}

impl Machine {
    pub fn new(isa: Isa, threads: usize) -> Machine {
        let options = Options { isa: Some(isa), threads: Some(threads) };
        Machine { cpu: Cpu::new(options).expect("an available instruction set") }
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> View {
        let view = self.cpu.alloc(bytes.len() as u64, "test").expect("memory");
        self.cpu.write(view, bytes);
        view
    }

    pub fn f32(&mut self, data: &[f32]) -> View {
        self.bytes(&data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn u32(&mut self, data: &[u32]) -> View {
        self.bytes(&data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Memory for `n` results, full of NaN: what is not written fails every comparison.
    pub fn out(&mut self, n: usize) -> View {
        self.f32(&vec![f32::NAN; n])
    }

    pub fn run(&mut self, op: impl Into<Op>) {
        self.cpu.enqueue(op.into());
    }

    pub fn get(&mut self, view: View) -> Vec<f32> {
        self.get_u32(view).into_iter().map(f32::from_bits).collect()
    }

    pub fn get_u32(&mut self, view: View) -> Vec<u32> {
        let mut bytes = vec![0; view.bytes as usize];
        let ticket = self.cpu.commit();
        self.cpu.wait(ticket).expect("the CPU does not fail");
        self.cpu.read(view, &mut bytes).expect("the CPU does not fail");
        bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }
}

/// What a result should be, and how far off it may be.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    pub value: f64,
    pub within: f64,
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Runs on every instruction set with 1, 2, 3 and 7 threads. Results must be within what is
/// expected, and the same bits for any number of threads. Returns them, one for each set.
pub fn everywhere(
    name: &str,
    expected: &[Expected],
    run: impl Fn(&mut Machine) -> Vec<f32>,
) -> Vec<(Isa, Vec<f32>)> {
    let results = isa::available().into_iter().map(|isa| {
        let got = run(&mut Machine::new(isa, 1));
        assert_eq!(got.len(), expected.len(), "{name} on {isa}");
        for (i, (got, want)) in got.iter().zip(expected).enumerate() {
            assert!(
                (f64::from(*got) - want.value).abs() <= want.within,
                "{name} on {isa}: result {i} is {got}, not {} +- {}",
                want.value,
                want.within
            );
        }
        for threads in [2, 3, 7] {
            let other = run(&mut Machine::new(isa, threads));
            assert_eq!(bits(&got), bits(&other), "{name} on {isa}: {threads} threads differ");
        }
        (isa, got)
    });
    results.collect()
}

/// Part of a batch, run alone, must give the bits it had in `whole`: `part` says where they are.
pub fn alone(
    name: &str,
    whole: &[(Isa, Vec<f32>)],
    part: std::ops::Range<usize>,
    run: impl Fn(&mut Machine) -> Vec<f32>,
) {
    for (isa, whole) in whole {
        let got = run(&mut Machine::new(*isa, 2));
        assert_eq!(bits(&got), bits(&whole[part.clone()]), "{name} on {isa}: alone differs");
    }
}

/// Spans of a batch: (rows, slot, position) of each, in order.
#[derive(Clone)]
pub struct Batch(pub Vec<(usize, usize, usize)>);

impl Batch {
    pub fn tokens(&self) -> usize {
        self.0.iter().map(|s| s.0).sum()
    }

    pub fn spans(&self) -> Vec<u32> {
        let mut first = 0;
        let mut spans = Vec::new();
        for &(rows, slot, position) in &self.0 {
            spans.extend([first, rows, slot, position].map(|n| n as u32));
            first += rows;
        }
        spans
    }

    pub fn span_of(&self) -> Vec<u32> {
        let spans = self.0.iter().enumerate();
        spans.flat_map(|(i, s)| std::iter::repeat_n(i as u32, s.0)).collect()
    }

    /// Every row: (slot, position, row in its span).
    pub fn rows(&self) -> Vec<(usize, usize, usize)> {
        let row = |&(rows, slot, at): &(usize, usize, usize)| {
            (0..rows).map(move |i| (slot, at + i, i)).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(row).collect()
    }

    /// Each span as a batch of its own, with the rows it has in this one.
    pub fn members(&self) -> Vec<(Batch, std::ops::Range<usize>)> {
        let mut first = 0;
        let member = |span: &(usize, usize, usize)| {
            let range = first..first + span.0;
            first = range.end;
            (Batch(vec![*span]), range)
        };
        self.0.iter().map(member).collect()
    }
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
