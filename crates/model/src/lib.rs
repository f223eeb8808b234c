//! Tokens and state in, logits out.
//!
//! [`pack`] turns a checkpoint into what a device reads, [`weights`] names it, [`state`] is what
//! sequences remember, [`mod@forward`] is the forward pass, and [`Model`] holds them together and
//! turns a list of sequences with new tokens into one step. It knows no text, no sampling, and
//! not which device it got.
#![forbid(unsafe_code)]

pub mod forward;
pub mod pack;
pub mod state;
pub mod weights;

pub use pack::Packed;
pub use state::Kv;

use forward::{DELTA_CHUNK_FROM, Scratch, Step, forward};
use lily_checkpoint::Config;
use lily_device::ops::Zero;
use lily_device::{Device, Error, Ticket, View};
use state::{State, StateBytes};
use weights::Weights;

/// How much a model is made for. Memory follows from this and the config alone: see [`plan`].
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Sequences that can be kept at once.
    pub slots: usize,
    /// Longest sequence, in tokens.
    pub max_seq: usize,
    /// Most tokens one step carries, all sequences together.
    pub chunk: usize,
    /// Most rows of logits one step gives.
    pub outputs: usize,
    /// How keys and values are stored.
    pub kv: Kv,
}

/// Bytes a model will take on its device.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The packed weights.
    pub weights: u64,
    /// What is kept of sequences.
    pub state: StateBytes,
    /// Activations of one step.
    pub scratch: u64,
}

impl Plan {
    /// All of it.
    pub fn total(self) -> u64 {
        self.weights + self.state.total() + self.scratch
    }
}

/// What [`Model::new`] will allocate: a formula, nothing is touched.
pub fn plan(c: &Config, o: Options) -> Plan {
    Plan {
        weights: pack::plan(c).iter().map(|a| a.bytes).sum(),
        state: State::bytes(c, o.slots, o.max_seq, o.kv),
        scratch: scratch_sizes(c, o).iter().map(|(_, bytes)| bytes).sum(),
    }
}

/// The new tokens of one sequence in a step.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// The place of the sequence.
    pub slot: usize,
    /// Its new tokens, at least one; they follow what the slot has absorbed so far.
    pub ids: &'a [u32],
    /// Of which of them the logits are wanted.
    pub outputs: Outputs,
}

/// Which rows of a span end in logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outputs {
    /// None: a part of a prompt that is not its end.
    None,
    /// Those after the last token, from which the next is sampled.
    Last,
    /// Those after every token.
    All,
}

impl Span<'_> {
    fn output_count(&self) -> usize {
        match self.outputs {
            Outputs::None => 0,
            Outputs::Last => 1,
            Outputs::All => self.ids.len(),
        }
    }
}

/// A model on its device, with the state of all its sequences.
pub struct Model {
    dev: Box<dyn Device>,
    config: Config,
    options: Options,
    weights: Weights,
    state: State,
    scratch: Scratch,
    /// Tokens absorbed, per slot.
    positions: Vec<usize>,
    /// The last committed step and its rows of logits.
    last: Option<(Ticket, usize)>,
    logits: Vec<f32>,
}

impl Model {
    /// Puts weights, state and scratch on the device. Errs where the device lacks the memory.
    /// Panics on options of zero and on a `max_seq` beyond the model's positions.
    pub fn new(
        mut dev: Box<dyn Device>,
        config: Config,
        packed: &Packed,
        options: Options,
    ) -> Result<Model, Error> {
        let Options { slots, max_seq, chunk, outputs, kv } = options;
        assert!(slots > 0 && chunk >= slots && outputs >= slots, "{options:?}");
        assert!(max_seq > 0 && max_seq <= config.max_positions, "{max_seq} positions");
        let weights = Weights::adopt(&mut *dev, &config, packed)?;
        let state = State::alloc(&mut *dev, &config, slots, max_seq, kv)?;
        let scratch = alloc_scratch(&mut *dev, &config, options)?;
        let positions = vec![0; slots];
        let logits = Vec::new();
        Ok(Model { dev, config, options, weights, state, scratch, positions, last: None, logits })
    }

    /// The sizes of the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device in words.
    pub fn device(&self) -> String {
        self.dev.describe()
    }

    /// Sequences that can be kept at once.
    pub fn slots(&self) -> usize {
        self.options.slots
    }

    /// Longest sequence, in tokens.
    pub fn max_seq(&self) -> usize {
        self.options.max_seq
    }

    /// Most tokens one step may carry.
    pub fn chunk(&self) -> usize {
        self.options.chunk
    }

    /// Most rows of logits one step may give.
    pub fn outputs(&self) -> usize {
        self.options.outputs
    }

    /// Tokens the sequence in `slot` has absorbed.
    pub fn position(&self, slot: usize) -> usize {
        self.positions[slot]
    }

    /// Makes `slot` ready for a new sequence: position 0, delta-net state zero.
    pub fn reset(&mut self, slot: usize) {
        for view in self.state.fixed_parts(slot) {
            let words = (view.bytes / 4) as u32;
            self.dev.run(Zero { y: view, words });
        }
        self.positions[slot] = 0;
    }

    /// Queues one forward pass over the new tokens of one or several sequences, and commits it.
    ///
    /// `None`: `go_on`, which is asked before every layer, said no; the slots of the spans must
    /// then be [`reset`](Model::reset). Panics on spans that do not fit the options (too many
    /// tokens or outputs, a slot twice, a full slot) and on ids beyond the vocabulary.
    pub fn step(&mut self, spans: &[Span], go_on: &mut dyn FnMut() -> bool) -> Option<Ticket> {
        let o = self.options;
        let tokens: usize = spans.iter().map(|s| s.ids.len()).sum();
        let outputs: usize = spans.iter().map(Span::output_count).sum();
        assert!(tokens > 0 && tokens <= o.chunk, "{tokens} tokens, at most {}", o.chunk);
        assert!(outputs <= o.outputs, "{outputs} rows of logits, at most {}", o.outputs);

        // Short spans first: they take another delta rule than the long ones.
        let mut order: Vec<usize> = (0..spans.len()).collect();
        order.sort_by_key(|&i| spans[i].ids.len() >= DELTA_CHUNK_FROM);
        let mut ids = Vec::with_capacity(tokens);
        let mut span_of = Vec::with_capacity(tokens);
        let mut table = Vec::with_capacity(4 * spans.len());
        let mut first_row = vec![0; spans.len()];
        let mut step = Step {
            tokens: tokens as u32,
            spans: spans.len() as u32,
            short: 0,
            outputs: outputs as u32,
            context: 0,
            longest: 0,
        };
        let mut seen = vec![false; o.slots];
        for (n, &i) in order.iter().enumerate() {
            let Span { slot, ids: new, .. } = spans[i];
            assert!(!new.is_empty(), "a span without tokens");
            assert!(!std::mem::replace(&mut seen[slot], true), "slot {slot} twice in a step");
            let position = self.positions[slot];
            let reach = position + new.len();
            assert!(reach <= o.max_seq, "slot {slot} is full: {reach} > {}", o.max_seq);
            first_row[i] = ids.len();
            table.extend([ids.len(), new.len(), slot, position].map(|v| v as u32));
            ids.extend_from_slice(new);
            span_of.extend(std::iter::repeat_n(n as u32, new.len()));
            step.short += u32::from(new.len() < DELTA_CHUNK_FROM);
            step.context += reach as u32;
            step.longest = step.longest.max(reach as u32);
        }
        let vocab = self.config.vocab;
        assert!(ids.iter().all(|&id| (id as usize) < vocab), "an id beyond {vocab}");
        let mut rows = Vec::with_capacity(outputs);
        for (span, first) in spans.iter().zip(&first_row) {
            let all = *first..first + span.ids.len();
            rows.extend(all.skip(span.ids.len() - span.output_count()).map(|row| row as u32));
        }

        let s = &self.scratch;
        for (view, values) in
            [(s.ids, &ids), (s.span_of, &span_of), (s.span, &table), (s.rows, &rows)]
        {
            self.dev.write(view, bytemuck::cast_slice(values));
        }
        let (dev, w) = (&mut *self.dev, &self.weights);
        if !forward(dev, &self.config, w, &self.state, s, step, go_on) {
            return None;
        }
        let ticket = self.dev.commit();
        for span in spans {
            self.positions[span.slot] += span.ids.len();
        }
        self.last = Some((ticket, outputs));
        Some(ticket)
    }

    /// Waits for the last step and returns its logits: f32 (outputs, vocab), row-major, in the
    /// order of the spans. Panics if `ticket` is not that of the last step: its logits are gone.
    pub fn logits(&mut self, ticket: Ticket) -> Result<&[f32], Error> {
        let (last, outputs) = self.last.expect("no step yet");
        assert_eq!(ticket, last, "these logits have been overwritten by a later step");
        self.dev.wait(ticket)?;
        self.logits.resize(outputs * self.config.vocab, 0.0);
        self.dev.read(self.scratch.logits, bytemuck::cast_slice_mut(&mut self.logits))?;
        Ok(&self.logits)
    }
}

/// Every buffer of [`Scratch`] with its bytes, in the order of its fields.
fn scratch_sizes(c: &Config, o: Options) -> [(&'static str, u64); 17] {
    let (tokens, outputs) = (o.chunk, o.outputs);
    let delta_width = c.conv_channels() + c.delta_v_dim() + 2 * c.delta_v_heads;
    let attention_width = 2 * (c.q_heads + c.kv_heads) * c.head_dim;
    let inner = c.delta_v_dim().max(c.q_heads * c.head_dim);
    let choices = c.experts_per_token + 1;
    [
        ("ids", tokens),
        ("span_of", tokens),
        ("span", 4 * o.slots),
        ("rows", outputs),
        ("x", tokens * c.dim),
        ("y", tokens * c.dim),
        ("d", tokens * c.dim),
        ("p", tokens * delta_width.max(attention_width)),
        ("qkv", tokens * c.conv_channels()),
        ("gates", tokens * 2 * c.delta_v_heads),
        ("o", tokens * inner),
        ("router", tokens * (c.experts + 1)),
        ("chosen", tokens * choices),
        ("shares", tokens * choices),
        ("h", tokens * choices * c.expert_hidden),
        ("last", outputs * c.dim),
        ("logits", outputs * c.vocab),
    ]
    .map(|(name, elements)| (name, 4 * elements as u64))
}

fn alloc_scratch(dev: &mut dyn Device, c: &Config, o: Options) -> Result<Scratch, Error> {
    let mut views = [View::default(); 17];
    for (view, (name, bytes)) in views.iter_mut().zip(scratch_sizes(c, o)) {
        *view = dev.alloc(bytes, &format!("activations ({name})"))?;
    }
    let [
        ids,
        span_of,
        span,
        rows,
        x,
        y,
        d,
        p,
        qkv,
        gates,
        o,
        router,
        chosen,
        shares,
        h,
        last,
        logits,
    ] = views;
    Ok(Scratch {
        ids,
        span_of,
        span,
        rows,
        x,
        y,
        d,
        p,
        qkv,
        gates,
        o,
        router,
        chosen,
        shares,
        h,
        last,
        logits,
    })
}
