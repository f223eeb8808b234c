//! Devices to run on, and models on them.

use lily_checkpoint::{Checkpoint, OpenOptions};
use lily_device::cpu::{self, Isa};
use lily_device::{Cpu, Device};
use lily_model::{Kv, Model, Options, Outputs, Packed, Span};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

/// A device to test, by name.
pub struct Machine {
    pub isa: Isa,
    pub threads: usize,
}

impl Machine {
    /// Every instruction set this machine has, on one thread and (but for the scalar device, which
    /// knows no threads) on several.
    pub fn all() -> Vec<Machine> {
        let isas = cpu::isa::available().into_iter();
        let all = isas.flat_map(|isa| [1, 3].map(|threads| Machine { isa, threads }));
        all.filter(|machine| machine.isa != Isa::Scalar || machine.threads == 1).collect()
    }

    /// The slowest and the fastest.
    pub fn ends() -> Vec<Machine> {
        let mut all = Machine::all();
        all.drain(1..all.len() - 1);
        all
    }

    pub fn device(&self) -> Box<dyn Device> {
        let options = cpu::Options { isa: Some(self.isa), threads: Some(self.threads) };
        Box::new(Cpu::new(options).expect("an instruction set that is available"))
    }

    /// A model of 3 slots on this device.
    pub fn model(&self, weights: &Weights, kv: Kv) -> Model {
        let options = Options { slots: 3, max_seq: 600, chunk: 600, outputs: 600, kv };
        let config = weights.checkpoint.config().clone();
        Model::new(self.device(), config, &weights.packed, options)
            .expect("memory for a tiny model")
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}, {} threads", self.isa, self.threads)
    }
}

/// A tiny checkpoint and its packed form.
pub struct Weights {
    pub checkpoint: Checkpoint,
    pub packed: Packed,
}

impl Weights {
    pub fn read(dir: &Path) -> Weights {
        let checkpoint = Checkpoint::open(dir, OpenOptions { any_size: true }).unwrap();
        let packed = Packed::in_memory(&checkpoint).unwrap();
        Weights { checkpoint, packed }
    }

    /// The random model of `reference/golden`.
    pub fn golden() -> Weights {
        Weights::read(&golden_dir().join("tiny"))
    }
}

pub fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/golden")
}

/// A prompt, and the logits after each of its tokens, row-major.
pub struct Expected {
    pub ids: Vec<u32>,
    pub logits: Vec<f32>,
}

impl Expected {
    /// From the tensors `ids` and `logits` of a file.
    pub fn read(path: &Path, logits: &str) -> Expected {
        let data = std::fs::read(path).unwrap();
        let tensors = SafeTensors::deserialize(&data).unwrap();
        let words = |name: &str| -> Vec<u32> {
            let data = tensors.tensor(name).unwrap().data().to_vec();
            data.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
        };
        let logits = words(logits).into_iter().map(f32::from_bits).collect();
        Expected { ids: words("ids"), logits }
    }

    /// The prompt of the golden vectors.
    pub fn golden() -> Expected {
        Expected::read(&golden_dir().join("logits.safetensors"), "logits")
    }
}

/// Logits after all of `ids`, which follow what `slot` has absorbed, in steps of the lengths
/// `cut` and a last one of what remains.
pub fn logits(model: &mut Model, slot: usize, ids: &[u32], cut: &[usize]) -> Vec<f32> {
    let (mut all, mut rest) = (Vec::new(), ids);
    for &n in cut.iter().chain([&usize::MAX]) {
        let (piece, after) = rest.split_at(n.min(rest.len()));
        if !piece.is_empty() {
            let span = Span { slot, ids: piece, outputs: Outputs::All };
            let ticket = model.step(&[span], &mut || true).expect("nobody said stop");
            all.extend_from_slice(model.logits(ticket).unwrap());
        }
        rest = after;
    }
    all
}

/// How far logits are from what they should be.
#[derive(Clone, Copy, Debug)]
pub struct Distance {
    /// Largest absolute difference.
    pub max_abs: f64,
    /// Kullback-Leibler divergence from what they should be, in nats, mean over positions.
    pub kl_mean: f64,
    /// Share of positions with the same most likely token.
    pub top1: f64,
}

impl Distance {
    pub fn of(got: &[f32], want: &[f32], vocab: usize) -> Distance {
        assert_eq!(got.len(), want.len());
        let (mut max_abs, mut kl, mut same) = (0.0f64, 0.0, 0);
        for (got, want) in got.chunks_exact(vocab).zip(want.chunks_exact(vocab)) {
            for (a, b) in got.iter().zip(want) {
                let off = f64::from(a - b).abs();
                assert!(off.is_finite(), "a logit is {a}, expected {b}");
                max_abs = max_abs.max(off);
            }
            let (log_p, log_q) = (log_softmax(want), log_softmax(got));
            kl += log_p.iter().zip(&log_q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            same += usize::from(most_likely(got) == most_likely(want));
        }
        let rows = (got.len() / vocab) as f64;
        Distance { max_abs, kl_mean: kl / rows, top1: same as f64 / rows }
    }
}

fn log_softmax(x: &[f32]) -> Vec<f64> {
    let most = x.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(f64::from(x)));
    let total = x.iter().map(|&x| (f64::from(x) - most).exp()).sum::<f64>().ln();
    x.iter().map(|&x| f64::from(x) - most - total).collect()
}

/// The index of the largest; the first of equals.
pub fn most_likely(logits: &[f32]) -> usize {
    (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("a row")
}
