//! What `synthesize` promises of its random checkpoints: that they behave like a model. A device
//! that looks at the operands of each operation tells.

use crate::machine::{Machine, Weights, logits};
use lily_checkpoint::Config;
use lily_checkpoint::synthesize::{Options as Synthesize, synthesize};
use lily_device::device::{HostBytes, Ticket};
use lily_device::ops::Op;
use lily_device::{Device, Error, View};
use lily_model::{Kv, Model, Options};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// What was seen of one forward pass.
#[derive(Default)]
struct Seen {
    /// For each block, in order: the mean over tokens of what it adds to the residual stream,
    /// beside what was there (norms).
    shares: Vec<f64>,
    /// For each layer: how often each expert was chosen.
    chosen: Vec<Vec<usize>>,
    /// Decays and write strengths of the delta nets, all in (0, 1).
    decays: Vec<f32>,
    betas: Vec<f32>,
}

/// Runs everything on another device, and notes what it sees.
struct Watch {
    inner: Box<dyn Device>,
    seen: Arc<Mutex<Seen>>,
}

impl Watch {
    fn floats(&mut self, view: View, count: u32) -> Vec<f32> {
        let mut bytes = vec![0; count as usize * 4];
        self.inner.read(view, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    /// `d` is about to be added to `x`, f32 (tokens, dim).
    fn block(&mut self, x: View, d: View, tokens: u32, dim: u32) {
        let (x, d) = (self.floats(x, tokens * dim), self.floats(d, tokens * dim));
        let norm = |row: &[f32]| row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let rows = x.chunks(dim as usize).zip(d.chunks(dim as usize));
        let sum: f64 = rows.map(|(x, d)| norm(d) / norm(x)).sum();
        self.seen.lock().unwrap().shares.push(sum / f64::from(tokens));
    }
}

impl Device for Watch {
    fn enqueue(&mut self, op: Op) {
        match op {
            Op::AddRmsNorm(o) => self.block(o.x, o.d, o.tokens, o.dim),
            Op::OutputNorm(o) => self.block(o.x, o.d, o.tokens, o.dim),
            _ => (),
        }
        self.inner.enqueue(op);
        if let Op::Route(o) = op {
            let ids = self.floats(o.ids, o.tokens * (o.top + 1));
            let mut chosen = vec![0; o.experts as usize];
            for row in ids.chunks(o.top as usize + 1) {
                // The last is the shared expert.
                row[..o.top as usize].iter().for_each(|id| chosen[id.to_bits() as usize] += 1);
            }
            self.seen.lock().unwrap().chosen.push(chosen);
        }
        if let Op::DeltaConv(o) = op {
            let gates = self.floats(o.gates, o.tokens * 2 * o.v_heads);
            let mut seen = self.seen.lock().unwrap();
            for row in gates.chunks(2 * o.v_heads as usize) {
                let (g, beta) = row.split_at(o.v_heads as usize);
                seen.decays.extend(g.iter().map(|g| g.exp()));
                seen.betas.extend(beta);
            }
        }
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn alloc(&mut self, bytes: u64, label: &str) -> Result<View, Error> {
        self.inner.alloc(bytes, label)
    }
    fn adopt(&mut self, bytes: HostBytes, range: Range<usize>, label: &str) -> Result<View, Error> {
        self.inner.adopt(bytes, range, label)
    }
    fn write(&mut self, to: View, data: &[u8]) {
        self.inner.write(to, data)
    }
    fn commit(&mut self) -> Ticket {
        self.inner.commit()
    }
    fn wait(&mut self, ticket: Ticket) -> Result<(), Error> {
        self.inner.wait(ticket)
    }
    fn read(&mut self, from: View, into: &mut [u8]) -> Result<(), Error> {
        self.inner.read(from, into)
    }
}

/// A model an eighth as wide as the full one, with its proportions.
fn config() -> Config {
    Config {
        vocab: 1024,
        dim: 256,
        layers: 12,
        q_heads: 8,
        head_dim: 64,
        rotary_dim: 16,
        delta_k_heads: 4,
        delta_v_heads: 8,
        delta_head_dim: 32,
        experts: 64,
        expert_hidden: 128,
        max_positions: 4096,
        stop_ids: vec![1],
        ..Config::full()
    }
}

/// Runs `tokens` random ids through `weights`; gives what was seen, and the logits.
fn watch(weights: &Weights, tokens: usize) -> (Seen, Vec<f32>) {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let inner = Machine::ends().pop().expect("there is one").device();
    let options =
        Options { slots: 1, max_seq: tokens, chunk: tokens, outputs: tokens, kv: Kv::F32 };
    let device = Box::new(Watch { inner, seen: seen.clone() });
    let config = weights.checkpoint.config().clone();
    let vocab = config.vocab as u32;
    let mut model = Model::new(device, config, &weights.packed, options).unwrap();
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % vocab
    };
    let ids: Vec<u32> = (0..tokens).map(|_| next()).collect();
    let logits = logits(&mut model, 0, &ids, &[]);
    drop(model);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    (seen, logits)
}

/// The value below which a share `q` of the values lie.
fn quantile(values: &mut [f32], q: f64) -> f32 {
    values.sort_by(f32::total_cmp);
    values[((values.len() - 1) as f64 * q) as usize]
}

#[test]
fn a_synthesized_checkpoint_behaves_like_a_model() {
    let (config, tokens) = (config(), 300);
    for seed in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let options = Synthesize { seed, ..Default::default() };
        synthesize(dir.path(), &config, options, &[], &mut |_, _| true).unwrap();
        let weights = Weights::read(dir.path());
        let (mut seen, logits) = watch(&weights, tokens);

        assert_eq!(seen.shares.len(), 2 * config.layers);
        for (block, share) in seen.shares.iter().enumerate() {
            assert!((0.05..0.5).contains(share), "block {block} adds {share} of the residual");
        }
        assert_eq!(seen.chosen.len(), config.layers);
        for (layer, chosen) in seen.chosen.iter().enumerate() {
            let busiest = *chosen.iter().max().unwrap() as f64;
            let mean = (tokens * config.experts_per_token) as f64 / config.experts as f64;
            assert!(busiest >= 2.0 * mean, "layer {layer}: busiest {busiest}, mean {mean}");
        }
        for row in logits.chunks(config.vocab) {
            let mean = row.iter().sum::<f32>() / row.len() as f32;
            let variance = row.iter().map(|l| (l - mean).powi(2)).sum::<f32>() / row.len() as f32;
            assert!((1.0..3.0).contains(&variance.sqrt()), "logits spread {}", variance.sqrt());
        }
        // Some heads forget at once and some keep a thousand tokens; all in between.
        assert!(quantile(&mut seen.decays, 0.05) < 0.7 && quantile(&mut seen.decays, 0.95) > 0.99);
        assert!(quantile(&mut seen.betas, 0.05) < 0.2 && quantile(&mut seen.betas, 0.95) > 0.8);
    }
}

/// The watch would see it: with weights drawn without care some blocks drown the others.
#[test]
fn careless_random_weights_do_not() {
    let dir = tempfile::tempdir().unwrap();
    lily_checkpoint::testing::write_checkpoint(dir.path(), &config(), 1, 3).unwrap();
    let (seen, _) = watch(&Weights::read(dir.path()), 100);
    assert!(seen.shares.iter().any(|share| !(0.05..0.5).contains(share)), "{:?}", seen.shares);
}
