//! The loop: take requests, schedule, step the model, sample, send events.
//!
//! One OS thread owns the model and everything that runs on it; [`Engine`] is the handle through
//! which others reach it. Nothing is decided here about order (`scheduler.rs`) or about tokens
//! (`sampler.rs`). Without work the thread sleeps on a condition variable.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lily_model::{Outputs, Span};

use crate::Error;
use crate::forward::Forward;
use crate::request::{Event, FinishReason, Request, Usage};
use crate::sampler::{Sampler, Scratch, logprob};
use crate::scheduler::{Id, Scheduler, Step};

/// What an engine allows.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Most requests that may wait for a slot; more are refused.
    pub queue: usize,
    /// Ids that the tokenizer knows. The model's embedding is padded beyond them; ids from here
    /// on are never chosen.
    pub known_ids: usize,
}

/// Sizes that clients plan with; they never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest sequence, prompt and reply together, in tokens.
    pub max_seq: usize,
    /// Sequences that run at once.
    pub slots: usize,
}

/// How busy an engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests without a slot.
    pub waiting: usize,
    /// Requests with one.
    pub running: usize,
}

/// The handle of a running engine; clones are the same engine. When the last is dropped, the
/// engine finishes what it has and ends.
#[derive(Clone)]
pub struct Engine(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
    options: Options,
    limits: Limits,
    vocab: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// What the handle and the thread share.
struct Shared {
    state: Mutex<State>,
    /// Signalled when `state` has something new for the thread.
    news: Condvar,
    /// Everything that runs shall end at once; apart from `state` so that a forward pass can ask
    /// between layers.
    stop: AtomicBool,
}

struct State {
    arrivals: VecDeque<Request>,
    /// As of the thread's last round: without `arrivals`.
    load: Load,
    longest_step: Duration,
    phase: Phase,
}

enum Phase {
    Open,
    /// No more requests; the thread ends when it has served those it has.
    Closed,
    /// The thread has panicked.
    Dead(String),
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that holds this lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut state = self.lock();
        if let Phase::Open = state.phase {
            state.phase = Phase::Closed;
        }
        self.news.notify_all();
    }
}

impl Engine {
    /// Starts the engine's thread.
    ///
    /// Panics when the model's sizes do not go together (no slots, `chunk` or `outputs` smaller
    /// than `slots`), or the system refuses a thread.
    pub fn start(model: impl Forward, options: Options) -> Engine {
        let limits = Limits { max_seq: model.max_seq(), slots: model.slots() };
        let (vocab, chunk, outputs) = (model.vocab(), model.chunk(), model.outputs());
        assert!(limits.slots > 0, "a model without slots");
        assert!(chunk >= limits.slots, "chunk {chunk} < slots {}", limits.slots);
        assert!(outputs >= limits.slots, "outputs {outputs} < slots {}", limits.slots);
        assert!(vocab > 0 && options.known_ids > 0, "a model without ids");
        let state = State {
            arrivals: VecDeque::new(),
            load: Load::default(),
            longest_step: Duration::ZERO,
            phase: Phase::Open,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            news: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let looping = Loop {
            scheduler: Scheduler::new(limits.slots),
            sequences: HashMap::new(),
            next_id: 0,
            known_ids: options.known_ids.min(vocab),
            scratch: Scratch::default(),
            shared: shared.clone(),
            model,
        };
        let thread = std::thread::Builder::new()
            .name("lily-engine".to_owned())
            .spawn(move || looping.run())
            .expect("the system gives no thread for the engine");
        let thread = Mutex::new(Some(thread));
        Engine(Arc::new(Handle { shared, options, limits, vocab, thread }))
    }

    /// Hands a request over. Its events come on the engine's thread, also before this returns.
    ///
    /// Errs, with nothing kept or allocated, when the request cannot be served: see [`Error`].
    pub fn submit(&self, request: Request) -> Result<(), Error> {
        self.check(&request)?;
        let Handle { shared, options, limits, .. } = &*self.0;
        let mut state = shared.lock();
        match &state.phase {
            Phase::Open => {}
            Phase::Closed => return Err(Error::ShuttingDown),
            Phase::Dead(message) => return Err(Error::Dead(message.clone())),
        }
        let waiting = state.load.waiting + state.arrivals.len();
        if state.load.running + waiting >= limits.slots + options.queue {
            return Err(Error::QueueFull { waiting });
        }
        state.arrivals.push_back(request);
        shared.news.notify_all();
        Ok(())
    }

    /// Whether the request makes sense for this model, whatever the load.
    fn check(&self, request: &Request) -> Result<(), Error> {
        let (prompt, max_seq) = (request.prompt.len(), self.0.limits.max_seq);
        if prompt == 0 {
            return Err(Error::EmptyPrompt);
        }
        let fits = if request.max_tokens == Some(0) { prompt <= max_seq } else { prompt < max_seq };
        if !fits {
            return Err(Error::PromptTooLong { prompt, max_seq });
        }
        let biased = request.sampling.logit_bias.iter().map(|b| &b.0);
        if let Some(&id) =
            request.prompt.iter().chain(biased).find(|i| **i as usize >= self.0.vocab)
        {
            return Err(Error::TokenId { id, vocab: self.0.vocab });
        }
        request.sampling.check()
    }

    /// The engine's sizes.
    pub fn limits(&self) -> Limits {
        self.0.limits
    }

    /// How busy it is now.
    pub fn load(&self) -> Load {
        let state = self.0.shared.lock();
        Load { waiting: state.load.waiting + state.arrivals.len(), running: state.load.running }
    }

    /// The longest that a step has taken so far. A running reply waits for at most one step of
    /// somebody's prompt between two of its tokens.
    pub fn longest_step(&self) -> Duration {
        self.0.shared.lock().longest_step
    }

    /// Errs with [`Error::Dead`] or [`Error::ShuttingDown`] when no request can succeed any more.
    pub fn health(&self) -> Result<(), Error> {
        match &self.0.shared.lock().phase {
            Phase::Open => Ok(()),
            Phase::Closed => Err(Error::ShuttingDown),
            Phase::Dead(message) => Err(Error::Dead(message.clone())),
        }
    }

    /// Ends everything that waits or runs (as [`FinishReason::Cancelled`]) and waits for the
    /// thread. Not to be called from within a request's `events`.
    pub fn shutdown(self) {
        self.0.shared.stop.store(true, Ordering::Relaxed);
        self.0.shared.close();
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic in it has been caught and told to everyone.
            let _ = thread.join();
        }
    }
}

/// What the thread owns.
struct Loop<F> {
    model: F,
    scheduler: Scheduler,
    sequences: HashMap<Id, Sequence>,
    next_id: Id,
    known_ids: usize,
    scratch: Scratch,
    shared: Arc<Shared>,
}

/// A request under way.
struct Sequence {
    request: Request,
    sampler: Sampler,
    /// Tokens of the prompt that the model has absorbed.
    done: usize,
    /// The last chosen token: what the model absorbs next, once the prompt is done.
    last: u32,
    /// Most tokens to choose.
    limit: usize,
    /// Tokens chosen.
    chosen: usize,
    /// When it got its slot and began.
    began: Option<Instant>,
    /// When its prompt was done.
    prefilled: Option<Instant>,
}

/// What has become of a sequence.
enum End {
    Finished(FinishReason),
    Failed(Error),
}

impl Sequence {
    fn new(request: Request, max_seq: usize) -> Sequence {
        let room = max_seq - request.prompt.len();
        Sequence {
            sampler: Sampler::new(&request.sampling, &request.prompt),
            limit: request.max_tokens.map_or(room, |max| max.min(room)),
            request,
            done: 0,
            last: 0,
            chosen: 0,
            began: None,
            prefilled: None,
        }
    }

    /// Whether someone wants it to end.
    fn unwanted(&self, now: Instant) -> Option<FinishReason> {
        if self.request.cancel.is_cancelled() {
            return Some(FinishReason::Cancelled);
        }
        let late = self.request.deadline.is_some_and(|deadline| deadline <= now);
        late.then_some(FinishReason::Deadline)
    }

    fn usage(&self) -> Usage {
        let now = Instant::now();
        let ms = |from: Option<Instant>, to: Instant| {
            let elapsed = from.map_or(Duration::ZERO, |from| to.saturating_duration_since(from));
            elapsed.as_secs_f64() * 1e3
        };
        Usage {
            prompt: self.request.prompt.len(),
            completion: self.chosen,
            cached: 0,
            prefill_ms: ms(self.began, self.prefilled.unwrap_or(now)),
            decode_ms: ms(self.prefilled, now),
        }
    }

    fn tell(&mut self, event: Event) {
        (self.request.events)(event);
    }

    fn tell_prefill(&mut self) {
        let total = self.request.prompt.len();
        self.tell(Event::Prefill { done: self.done, total, cached: 0 });
    }

    /// What the model absorbs next: `tokens` of the prompt, or the last chosen token.
    fn next_ids(&self, tokens: usize) -> &[u32] {
        match self.request.prompt.get(self.done..self.done + tokens) {
            Some(ids) if !ids.is_empty() => ids,
            _ => std::slice::from_ref(&self.last),
        }
    }

    /// Which logits are needed when the model absorbs them.
    fn next_outputs(&self, tokens: usize) -> Outputs {
        if self.in_prompt() && self.request.prompt_logprobs {
            Outputs::All
        } else if self.done + tokens < self.request.prompt.len() {
            Outputs::None
        } else {
            Outputs::Last
        }
    }

    fn in_prompt(&self) -> bool {
        self.done < self.request.prompt.len()
    }

    /// The model has absorbed what [`Sequence::next_ids`] said, and gave `rows` of `vocab` logits.
    fn absorbed(
        &mut self,
        tokens: usize,
        rows: &[f32],
        vocab: usize,
        known_ids: usize,
        scratch: &mut Scratch,
    ) -> Option<End> {
        if self.in_prompt() {
            let first = self.done;
            self.done += tokens;
            if !self.in_prompt() {
                self.prefilled = Some(Instant::now());
            }
            if self.request.prompt_logprobs {
                let top = self.request.logprobs.unwrap_or(0);
                let following = &self.request.prompt[first + 1..];
                let logprobs = following
                    .iter()
                    .zip(rows.chunks_exact(vocab))
                    .map(|(&id, row)| logprob(&row[..known_ids], id, top, scratch))
                    .collect();
                self.tell(Event::PromptLogprobs(logprobs));
            }
            self.tell_prefill();
            if self.in_prompt() {
                return None;
            }
        }
        self.choose(&rows[rows.len() - vocab..][..known_ids], scratch)
    }

    /// Chooses the next token from `logits` and reports it; says so if it is the last.
    fn choose(&mut self, logits: &[f32], scratch: &mut Scratch) -> Option<End> {
        if self.limit == 0 {
            return Some(End::Finished(FinishReason::Length));
        }
        let Some(id) = self.sampler.sample(logits, scratch) else {
            return Some(End::Failed(Error::NoFiniteLogit));
        };
        self.chosen += 1;
        if self.request.stop_ids.contains(&id) {
            return Some(End::Finished(FinishReason::Stop));
        }
        let logprob = self.request.logprobs.map(|top| logprob(logits, id, top, scratch));
        self.tell(Event::Token { id, logprob });
        self.last = id;
        (self.chosen == self.limit).then_some(End::Finished(FinishReason::Length))
    }
}

impl<F: Forward> Loop<F> {
    fn run(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| while self.round() {}));
        if let Err(panic) = outcome {
            self.die(panic_message(&*panic));
        }
    }

    /// One step of the model, or a sleep until there is work. False: the engine is to end.
    fn round(&mut self) -> bool {
        if !self.take_arrivals() {
            return false;
        }
        self.end_unwanted();
        let step = self.scheduler.next();
        self.publish_load();
        match step {
            Step::Idle => {}
            Step::Prefill { id, slot, tokens } => self.step(&[(id, slot, tokens)]),
            Step::Decode(batch) => {
                let batch: Vec<_> = batch.iter().map(|&(id, slot)| (id, slot, 0)).collect();
                self.step(&batch);
            }
        }
        true
    }

    /// Moves new requests into the scheduler; sleeps when there is nothing at all to do.
    fn take_arrivals(&mut self) -> bool {
        let mut state = self.shared.lock();
        while self.sequences.is_empty() && state.arrivals.is_empty() {
            state.load = Load::default();
            if let Phase::Closed = state.phase {
                return false;
            }
            state = self.shared.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let arrivals = std::mem::take(&mut state.arrivals);
        state.load.waiting += arrivals.len();
        drop(state);
        for request in arrivals {
            let id = self.next_id;
            self.next_id += 1;
            // Every token of a prompt whose log-probabilities are asked for has a row of logits.
            let chunk = match request.prompt_logprobs {
                true => self.model.chunk().min(self.model.outputs()),
                false => self.model.chunk(),
            };
            self.scheduler.enqueue(id, request.prompt.len(), chunk);
            self.sequences.insert(id, Sequence::new(request, self.model.max_seq()));
        }
        true
    }

    fn publish_load(&self) {
        let load = Load { waiting: self.scheduler.waiting(), running: self.scheduler.running() };
        self.shared.lock().load = load;
    }

    fn end_unwanted(&mut self) {
        let stop = self.shared.stop.load(Ordering::Relaxed);
        let now = Instant::now();
        let mut ends: Vec<_> = self
            .sequences
            .iter()
            .filter_map(|(&id, sequence)| {
                let reason = sequence.unwanted(now).or(stop.then_some(FinishReason::Cancelled))?;
                Some((id, End::Finished(reason)))
            })
            .collect();
        ends.sort_by_key(|end| end.0);
        self.end(ends);
    }

    /// Runs the model for some sequences, each with its slot and how many tokens of its prompt
    /// (none: its last chosen token), and takes what comes of it to them.
    fn step(&mut self, batch: &[(Id, usize, usize)]) {
        let Loop { model, sequences, scratch, shared, known_ids, .. } = self;
        let (vocab, known_ids) = (model.vocab(), *known_ids);
        for (id, ..) in batch {
            let sequence = sequences.get_mut(id).expect("scheduled sequences exist");
            if sequence.began.is_none() {
                sequence.began = Some(Instant::now());
                sequence.tell_prefill();
            }
        }
        let parts: Vec<_> = batch.iter().map(|&(id, slot, n)| (&sequences[&id], slot, n)).collect();
        let spans: Vec<_> = parts
            .iter()
            .map(|&(sequence, slot, tokens)| Span {
                slot,
                ids: sequence.next_ids(tokens),
                outputs: sequence.next_outputs(tokens),
            })
            .collect();
        let stopping = || shared.stop.load(Ordering::Relaxed);
        // A step goes on while anyone in it wants it to.
        let mut go_on = || {
            let now = Instant::now();
            !stopping() && parts.iter().any(|part| part.0.unwanted(now).is_none())
        };
        let rows: Vec<_> = spans.iter().map(rows_of).collect();
        let mut ends = Vec::new();
        let began = Instant::now();
        let result = model.step(&spans, &mut go_on);
        {
            let mut state = shared.lock();
            state.longest_step = state.longest_step.max(began.elapsed());
        }
        match result {
            Ok(Some(mut logits)) => {
                for (&(id, _, tokens), rows) in batch.iter().zip(rows) {
                    let own;
                    (own, logits) = logits.split_at(rows * vocab);
                    let sequence = sequences.get_mut(&id).expect("it was there");
                    // Whom nobody listens to chooses no more tokens.
                    let end = match sequence.unwanted(Instant::now()) {
                        Some(reason) => Some(End::Finished(reason)),
                        None => sequence.absorbed(tokens, own, vocab, known_ids, scratch),
                    };
                    ends.extend(end.map(|end| (id, end)));
                }
            }
            Ok(None) => {
                let now = Instant::now();
                for (&(id, ..), (sequence, ..)) in batch.iter().zip(&parts) {
                    let stopped = stopping().then_some(FinishReason::Cancelled);
                    let end = match sequence.unwanted(now).or(stopped) {
                        Some(reason) => End::Finished(reason),
                        None => End::Failed(Error::Model("it stopped by itself".to_owned())),
                    };
                    ends.push((id, end));
                }
            }
            Err(message) => {
                let failed = || End::Failed(Error::Model(message.clone()));
                ends.extend(batch.iter().map(|&(id, ..)| (id, failed())));
            }
        }
        self.end(ends);
    }

    /// Frees what the sequences held, then tells them.
    fn end(&mut self, ends: Vec<(Id, End)>) {
        let mut last_words = Vec::new();
        for (id, end) in ends {
            if let Some(slot) = self.scheduler.remove(id) {
                self.model.reset(slot);
            }
            let sequence = self.sequences.remove(&id).expect("only what is there ends");
            last_words.push((sequence, end));
        }
        if !last_words.is_empty() {
            self.publish_load();
        }
        for (mut sequence, end) in last_words {
            let usage = sequence.usage();
            sequence.tell(match end {
                End::Finished(reason) => Event::Finished { reason, usage },
                End::Failed(error) => Event::Failed(error),
            });
        }
    }

    /// Tells everyone that the thread has panicked. Their callbacks may be what panics.
    fn die(mut self, message: String) {
        let waiting = {
            let mut state = self.shared.lock();
            state.phase = Phase::Dead(message.clone());
            state.load = Load::default();
            std::mem::take(&mut state.arrivals)
        };
        let running = self.sequences.drain().map(|(_, sequence)| sequence.request);
        for mut request in running.chain(waiting) {
            let event = Event::Failed(Error::Dead(message.clone()));
            let _ = catch_unwind(AssertUnwindSafe(|| (request.events)(event)));
        }
    }
}

/// How many rows of logits a span gives.
fn rows_of(span: &Span) -> usize {
    match span.outputs {
        Outputs::None => 0,
        Outputs::Last => 1,
        Outputs::All => span.ids.len(),
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".to_owned())
}
