//! What a client asks the engine for, and what it hears back: the two types the outside sees.
//!
//! Everything here is tokens. Text, templates, stop strings and wire formats are the business of
//! the caller, who ends a sequence early by its [`Cancel`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::Error;

/// One sequence to compute.
///
/// Built from [`Request::new`] with the fields of interest replaced:
/// `Request { max_tokens: Some(8), ..Request::new(prompt, events) }`.
pub struct Request {
    /// The prompt's token ids; at least one, each below the model's vocabulary.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; `None`: what remains of the sequence. `Some(0)` only computes
    /// the prompt.
    pub max_tokens: Option<usize>,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Ids that end the sequence. The one that does is counted in [`Usage::completion`] but not
    /// sent as a [`Event::Token`].
    pub stop_ids: Vec<u32>,
    /// Report each token's log-probability, and those of this many best alternatives.
    pub logprobs: Option<usize>,
    /// Also report the log-probabilities of the prompt's own tokens, with [`Request::logprobs`]
    /// alternatives each ([`Event::PromptLogprobs`]).
    pub prompt_logprobs: bool,
    /// When to give up, waiting or running.
    pub deadline: Option<Instant>,
    /// Ends the sequence from outside; keep a clone of it.
    pub cancel: Cancel,
    /// Called on the engine's thread for every event, in order; it must not block. The last
    /// event is [`Event::Finished`] or [`Event::Failed`], after which it is dropped.
    pub events: Box<dyn FnMut(Event) + Send>,
}

impl Request {
    /// A greedy request without limits beyond the model's own.
    pub fn new(prompt: Vec<u32>, events: impl FnMut(Event) + Send + 'static) -> Request {
        Request {
            prompt,
            max_tokens: None,
            sampling: Sampling::default(),
            stop_ids: Vec::new(),
            logprobs: None,
            prompt_logprobs: false,
            deadline: None,
            cancel: Cancel::default(),
            events: Box::new(events),
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Request")
            .field("prompt", &self.prompt.len())
            .field("max_tokens", &self.max_tokens)
            .field("sampling", &self.sampling)
            .finish_non_exhaustive()
    }
}

/// How the next token is chosen from the logits. The default is greedy.
///
/// The steps, in this order: `logit_bias` is added; `repetition_penalty` divides a positive logit
/// and multiplies a negative one, for ids of the prompt and of the reply; `presence_penalty` and
/// `frequency_penalty` (times the count) are subtracted, for ids of the reply; then, unless
/// greedy, logits are divided by `temperature` and the candidates cut by `top_k`, `top_p` (over
/// what `top_k` left) and `min_p`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the best token (greedy).
    pub temperature: f32,
    /// Only this many best tokens are candidates; 0: all.
    pub top_k: usize,
    /// Only the best tokens that together reach this probability; 1: all.
    pub top_p: f32,
    /// Only tokens at least this probable relative to the best one; 0: all.
    pub min_p: f32,
    /// Subtracted from the logits of tokens that the reply has; 0: off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for every time that the reply has it; 0: off.
    pub frequency_penalty: f32,
    /// Divides (positive) or multiplies (negative) the logits of tokens that the prompt or the
    /// reply has; 1: off.
    pub repetition_penalty: f32,
    /// Added to the logit of an id; each id at most once.
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed, settings and logits give the same tokens on every machine; `None`: a fresh
    /// seed.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

impl Sampling {
    /// Errs with [`Error::Sampling`], naming the field, when a value is out of its range.
    pub fn check(&self) -> Result<(), Error> {
        let range = |field, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            let expected = match (low == f32::MIN, high == f32::MAX) {
                (true, _) => "a finite number".to_owned(),
                (false, true) => format!("a number of at least {low}"),
                (false, false) => format!("a number from {low} to {high}"),
            };
            Err(Error::Sampling { field, value, expected })
        };
        range("temperature", self.temperature, 0.0, f32::MAX)?;
        range("top_p", self.top_p, 0.0, 1.0)?;
        range("min_p", self.min_p, 0.0, 1.0)?;
        range("presence_penalty", self.presence_penalty, f32::MIN, f32::MAX)?;
        range("frequency_penalty", self.frequency_penalty, f32::MIN, f32::MAX)?;
        range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        for &(_, bias) in &self.logit_bias {
            range("logit_bias", bias, f32::MIN, f32::MAX)?;
        }
        Ok(())
    }
}

/// Ends a request from outside, at any time and from any thread. All clones are one switch, and
/// it never goes back.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks the engine to end the sequence; a forward pass in flight stops between two layers.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether someone has asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What the engine says about a request, in this order: `Prefill` once or more (with
/// `PromptLogprobs` between, if asked for), `Token` any number of times, then `Finished`.
/// `Finished` and `Failed` are last and may come at any time.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The sequence has its place (`done == cached`), or a part of its prompt was computed.
    Prefill {
        /// Tokens of the prompt whose state exists.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
        /// Tokens of the prompt whose state was kept from before.
        cached: usize,
    },
    /// Log-probabilities of the next tokens of the prompt. The prompt's first token has none, so
    /// a prompt of `n` tokens gets `n - 1` in all.
    PromptLogprobs(Vec<Logprob>),
    /// One token of the reply.
    Token {
        /// Its id.
        id: u32,
        /// Present when [`Request::logprobs`] is.
        logprob: Option<Logprob>,
    },
    /// The sequence is over.
    Finished {
        /// Why.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
    /// The sequence is lost.
    Failed(Error),
}

/// A token's natural log-probability under the model itself: the softmax of the logits before
/// bias, penalties, temperature and cuts.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprob {
    /// Of the token in question.
    pub logprob: f32,
    /// The best tokens and theirs, best first, ties by lower id.
    pub top: Vec<(u32, f32)>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// One of the [`Request::stop_ids`] was chosen.
    Stop,
    /// [`Request::max_tokens`], or what remained of the sequence, is used up.
    Length,
    /// [`Cancel::cancel`] was called, or the engine shuts down.
    Cancelled,
    /// [`Request::deadline`] has passed.
    Deadline,
}

/// What a sequence took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens chosen, with the stop id if one ended the sequence.
    pub completion: usize,
    /// Tokens of the prompt whose state was kept from before.
    pub cached: usize,
    /// From the sequence's getting its place to its first logits, in milliseconds.
    pub prefill_ms: f64,
    /// From then to its end, in milliseconds.
    pub decode_ms: f64,
}
