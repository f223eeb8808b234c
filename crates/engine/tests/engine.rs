//! The engine from outside, with a model whose every reply can be told beforehand and that is
//! slow, fails, or panics when a test wants it to.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lily_engine::{
    Cancel, Engine, Error, Event, FinishReason, Forward, Limits, Load, Options, Outputs, Request,
    Sampling, Span, Usage,
};

const VOCAB: usize = 64;
/// Ids from here on are padding; the model likes them best.
const KNOWN: usize = 60;
/// Absorbing one of these does what it says.
const FAIL: u32 = 50;
const PANIC: u32 = 51;
const NAN: u32 = 52;

/// The logits after `history`: a hash of all of it, so that a token lost, doubled or leaked from
/// elsewhere changes everything that follows.
fn logits_after(history: &[u32]) -> Vec<f32> {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for &id in history {
        hash = (hash ^ u64::from(id)).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    }
    let mut logits: Vec<f32> = (0..VOCAB as u64)
        .map(|id| {
            let mixed = (hash ^ (id << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 40) as f32 / (1 << 24) as f32 * 8.0
        })
        .collect();
    logits[FAIL as usize..KNOWN].fill(-100.0);
    logits[KNOWN..].fill(100.0);
    if history.contains(&NAN) {
        logits.fill(f32::NAN);
    }
    logits
}

/// What greedy decoding gives.
fn reply(prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..tokens {
        let logits = logits_after(&history);
        let best = (0..KNOWN).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        history.push(best as u32);
    }
    history.split_off(prompt.len())
}

#[derive(Clone, Debug, PartialEq)]
struct Did {
    /// Slot and tokens of each span.
    spans: Vec<(usize, usize)>,
    /// Layers run; fewer than all if stopped.
    layers: usize,
}

struct Fake {
    slots: usize,
    max_seq: usize,
    chunk: usize,
    layers: usize,
    layer_time: Duration,
    /// Absorbed tokens per slot; `None`: spoilt until reset.
    histories: Vec<Option<Vec<u32>>>,
    logits: Vec<f32>,
    log: Arc<Mutex<Vec<Did>>>,
}

impl Fake {
    fn new(slots: usize) -> Fake {
        Fake {
            slots,
            max_seq: 100,
            chunk: 8,
            layers: 4,
            layer_time: Duration::ZERO,
            histories: vec![Some(Vec::new()); slots],
            logits: Vec::new(),
            log: Arc::default(),
        }
    }

    fn start(self, queue: usize) -> Engine {
        Engine::start(self, Options { queue, known_ids: KNOWN })
    }
}

impl Forward for Fake {
    fn vocab(&self) -> usize {
        VOCAB
    }
    fn slots(&self) -> usize {
        self.slots
    }
    fn max_seq(&self) -> usize {
        self.max_seq
    }
    fn chunk(&self) -> usize {
        self.chunk
    }
    fn outputs(&self) -> usize {
        self.slots.max(4)
    }
    fn reset(&mut self, slot: usize) {
        self.histories[slot] = Some(Vec::new());
    }
    fn step(
        &mut self,
        spans: &[Span],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<&[f32]>, String> {
        assert!(spans.iter().map(|s| s.ids.len()).sum::<usize>() <= self.chunk);
        let mut histories: Vec<_> = spans
            .iter()
            .map(|span| {
                self.histories[span.slot].take().expect("a fresh or sound slot, not shared")
            })
            .collect();
        let shape = spans.iter().map(|span| (span.slot, span.ids.len())).collect();
        self.log.lock().unwrap().push(Did { spans: shape, layers: 0 });
        for _ in 0..self.layers {
            if !go_on() {
                return Ok(None);
            }
            self.log.lock().unwrap().last_mut().unwrap().layers += 1;
            std::thread::sleep(self.layer_time);
        }
        self.logits.clear();
        let mut rows = 0;
        for (span, history) in spans.iter().zip(&mut histories) {
            for (i, &id) in span.ids.iter().enumerate() {
                assert_ne!(id, PANIC, "told to panic");
                if id == FAIL {
                    return Err("told to fail".to_owned());
                }
                history.push(id);
                let last = i + 1 == span.ids.len();
                if span.outputs == Outputs::All || span.outputs == Outputs::Last && last {
                    self.logits.extend(logits_after(history));
                    rows += 1;
                }
            }
            assert!(history.len() <= self.max_seq, "a sequence outgrew its slot");
        }
        assert!(rows <= self.outputs(), "{rows} rows");
        for (span, history) in spans.iter().zip(histories) {
            self.histories[span.slot] = Some(history);
        }
        Ok(Some(&self.logits))
    }
}

/// A submitted request, watched.
struct Watched {
    events: Receiver<Event>,
    cancel: Cancel,
}

const LONG: Duration = Duration::from_secs(20);

impl Watched {
    fn submit(engine: &Engine, change: impl FnOnce(&mut Request)) -> Result<Watched, Error> {
        let (sender, events) = channel();
        let mut request = Request::new(vec![1, 2, 3], move |event| {
            // A test may have stopped listening.
            let _ = sender.send(event);
        });
        change(&mut request);
        let cancel = request.cancel.clone();
        engine.submit(request)?;
        Ok(Watched { events, cancel })
    }

    fn next(&self) -> Event {
        self.events.recv_timeout(LONG).expect("an event")
    }

    /// Everything up to the end, after which nothing may come.
    fn all(&self) -> Vec<Event> {
        let mut events = Vec::new();
        loop {
            events.push(self.next());
            if let Event::Finished { .. } | Event::Failed(_) = events.last().unwrap() {
                let after = self.events.recv_timeout(LONG);
                assert_eq!(after, Err(RecvTimeoutError::Disconnected), "the end is the end");
                return events;
            }
        }
    }

    /// The tokens, and how it ended.
    fn outcome(&self) -> (Vec<u32>, Event) {
        let mut events = self.all();
        let end = events.pop().unwrap();
        let token = |event: &Event| match event {
            Event::Token { id, .. } => Some(*id),
            _ => None,
        };
        (events.iter().filter_map(token).collect(), end)
    }

    fn finished(&self) -> (Vec<u32>, FinishReason, Usage) {
        match self.outcome() {
            (ids, Event::Finished { reason, usage }) => (ids, reason, usage),
            (_, other) => panic!("{other:?}"),
        }
    }

    fn wait_for_token(&self) {
        while !matches!(self.next(), Event::Token { .. }) {}
    }
}

fn submit(engine: &Engine, change: impl FnOnce(&mut Request)) -> Watched {
    Watched::submit(engine, change).expect("accepted")
}

/// Waits for the engine to have nothing to do.
fn settle(engine: &Engine) {
    let begun = Instant::now();
    while engine.load() != Load::default() {
        assert!(begun.elapsed() < LONG, "still busy: {:?}", engine.load());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_reply_comes_token_by_token_after_the_prompt_chunk_by_chunk() {
    let engine = Fake::new(2).start(4);
    assert_eq!(engine.limits(), Limits { max_seq: 100, slots: 2 });
    let prompt: Vec<u32> = (0..20).collect();
    let watched = submit(&engine, |request| {
        request.prompt = prompt.clone();
        request.max_tokens = Some(3);
    });
    let events = watched.all();
    let prefill = |done| Event::Prefill { done, total: 20, cached: 0 };
    assert_eq!(events[..4], [prefill(0), prefill(8), prefill(16), prefill(20)]);
    let tokens: Vec<_> =
        reply(&prompt, 3).into_iter().map(|id| Event::Token { id, logprob: None }).collect();
    assert_eq!(events[4..7], tokens);
    let Event::Finished { reason: FinishReason::Length, usage } = events[7] else { panic!() };
    assert_eq!((usage.prompt, usage.completion, usage.cached), (20, 3, 0));
    assert!(usage.prefill_ms > 0.0 && usage.decode_ms > 0.0);
    assert_eq!(events.len(), 8);
}

#[test]
fn many_at_once_say_what_each_says_alone() {
    for slots in [1, 3, 8] {
        let engine = Fake::new(slots).start(100);
        let all: Vec<_> = (0..40u32)
            .map(|i| {
                let prompt: Vec<u32> = (0..1 + i * 7 % 50).map(|t| (t * i + i) % 50).collect();
                let tokens = (i * 5 % 23) as usize;
                let watched = submit(&engine, |request| {
                    request.prompt = prompt.clone();
                    request.max_tokens = Some(tokens);
                });
                (prompt, tokens, watched)
            })
            .collect();
        for (i, (prompt, tokens, watched)) in all.into_iter().enumerate() {
            // Some of them leave early, and disturb nobody.
            if i % 7 == 3 {
                watched.cancel.cancel();
                watched.all();
            } else {
                let (ids, reason, _) = watched.finished();
                assert_eq!((ids, reason), (reply(&prompt, tokens), FinishReason::Length), "{i}");
            }
        }
        settle(&engine);
    }
}

#[test]
fn it_ends_at_any_stop_id_or_at_the_limit_or_when_the_sequence_is_full() {
    let engine = Fake::new(1).start(4);
    let full = reply(&[1, 2, 3], 97);
    let (stop, at) = (full[5], full.iter().position(|&id| id == full[5]).unwrap());
    let (ids, reason, usage) =
        submit(&engine, |request| request.stop_ids = vec![FAIL, stop]).finished();
    assert_eq!((&ids[..], reason), (&full[..at], FinishReason::Stop));
    assert_eq!(usage.completion, at + 1);

    for max_tokens in [None, Some(97), Some(usize::MAX)] {
        let (ids, reason, usage) =
            submit(&engine, |request| request.max_tokens = max_tokens).finished();
        assert_eq!((ids, reason), (full.clone(), FinishReason::Length));
        assert_eq!(usage.completion, 97);
    }
    let (ids, reason, _) = submit(&engine, |request| request.max_tokens = Some(0)).finished();
    assert_eq!((ids, reason), (vec![], FinishReason::Length));
}

#[test]
fn what_cannot_be_served_is_refused_in_words() {
    let engine = Fake::new(1).start(4);
    let refused = |change: fn(&mut Request)| match Watched::submit(&engine, change) {
        Err(error) => error,
        Ok(_) => panic!("accepted"),
    };
    assert_eq!(refused(|r| r.prompt.clear()), Error::EmptyPrompt);
    let too_long = Error::PromptTooLong { prompt: 100, max_seq: 100 };
    assert_eq!(refused(|r| r.prompt = vec![1; 100]), too_long);
    assert!(too_long.to_string().contains("maximum context length is 100 tokens"));
    assert!(matches!(
        refused(|r| (r.prompt, r.max_tokens) = (vec![1; 101], Some(0))),
        Error::PromptTooLong { .. }
    ));
    assert_eq!(refused(|r| r.prompt = vec![1, 64]), Error::TokenId { id: 64, vocab: VOCAB });
    assert_eq!(
        refused(|r| r.sampling.logit_bias = vec![(99, 1.0)]),
        Error::TokenId { id: 99, vocab: VOCAB }
    );
    for (field, change) in [
        ("temperature", (|r| r.sampling.temperature = -0.1) as fn(&mut Request)),
        ("temperature", |r| r.sampling.temperature = f32::NAN),
        ("top_p", |r| r.sampling.top_p = 1.1),
        ("min_p", |r| r.sampling.min_p = -1.0),
        ("presence_penalty", |r| r.sampling.presence_penalty = f32::INFINITY),
        ("frequency_penalty", |r| r.sampling.frequency_penalty = f32::NAN),
        ("repetition_penalty", |r| r.sampling.repetition_penalty = 0.0),
        ("logit_bias", |r| r.sampling.logit_bias = vec![(1, f32::NAN)]),
    ] {
        let error = refused(change);
        assert!(matches!(error, Error::Sampling { field: f, .. } if f == field), "{error:?}");
        assert!(error.to_string().contains(field));
    }
    // A prompt that fills the sequence may still be computed for its own sake.
    let full = submit(&engine, |r| (r.prompt, r.max_tokens) = (vec![1; 100], Some(0)));
    assert_eq!(full.finished().2.prompt, 100);
}

#[test]
fn a_full_queue_refuses_and_an_emptied_one_accepts() {
    let slow = Fake { layer_time: Duration::from_millis(2), ..Fake::new(1) };
    let engine = slow.start(2);
    let first = submit(&engine, |_| {});
    first.wait_for_token();
    let waiting: Vec<_> = (0..2).map(|_| submit(&engine, |_| {})).collect();
    assert_eq!(Watched::submit(&engine, |_| {}).err(), Some(Error::QueueFull { waiting: 2 }));
    assert_eq!(engine.load(), Load { waiting: 2, running: 1 });
    waiting[0].cancel.cancel();
    // Cancelled in the queue: never began.
    let events = waiting[0].all();
    assert!(matches!(events[..], [Event::Finished { reason: FinishReason::Cancelled, usage }]
            if usage.completion == 0 && usage.prefill_ms == 0.0));
    let another = submit(&engine, |r| r.max_tokens = Some(1));
    first.cancel.cancel();
    waiting[1].cancel.cancel();
    assert_eq!(another.finished().0, reply(&[1, 2, 3], 1));
}

#[test]
fn cancelling_stops_a_forward_pass_between_two_layers_and_frees_the_slot() {
    let slow = Fake { layers: 1000, layer_time: Duration::from_millis(5), ..Fake::new(1) };
    let log = slow.log.clone();
    let engine = slow.start(4);
    let first = submit(&engine, |_| {});
    while log.lock().unwrap().first().is_none_or(|did| did.layers < 3) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let at = log.lock().unwrap()[0].layers;
    first.cancel.cancel();
    let (ids, reason, usage) = first.finished();
    assert_eq!((ids, reason, usage.completion), (vec![], FinishReason::Cancelled, 0));
    let layers = log.lock().unwrap()[0].layers;
    assert!(layers <= at + 2, "cancelled at layer {at}, went on to {layers}");
    assert_eq!(engine.load(), Load::default());

    // A deadline does the same.
    let deadline = Instant::now() + Duration::from_millis(50);
    let late = submit(&engine, |r| r.deadline = Some(deadline));
    let reason = late.finished().1;
    assert_eq!(reason, FinishReason::Deadline);
    assert!(deadline.elapsed() < Duration::from_secs(2), "the step would have taken 5 s");
    let longest = engine.longest_step();
    assert!((Duration::from_millis(10)..Duration::from_secs(4)).contains(&longest), "{longest:?}");
}

#[test]
fn a_step_with_one_who_stays_goes_on_for_that_one() {
    let slow = Fake { layer_time: Duration::from_millis(2), ..Fake::new(2) };
    let engine = slow.start(4);
    let leaves = submit(&engine, |r| r.prompt = vec![9, 9]);
    let stays = submit(&engine, |r| r.max_tokens = Some(30));
    leaves.wait_for_token();
    stays.wait_for_token();
    leaves.cancel.cancel();
    assert_eq!(leaves.finished().1, FinishReason::Cancelled);
    let (ids, reason, usage) = stays.finished();
    assert_eq!((&ids[..], reason), (&reply(&[1, 2, 3], 30)[1..], FinishReason::Length));
    assert_eq!(usage.completion, 30);
}

#[test]
fn a_generation_waits_for_at_most_one_chunk_of_a_prefill() {
    let fake = Fake { layer_time: Duration::from_micros(200), ..Fake::new(3) };
    let log = fake.log.clone();
    let engine = fake.start(10);
    let talker = submit(&engine, |_| {});
    talker.wait_for_token();
    let prompts: Vec<_> = (0..6).map(|_| submit(&engine, |r| r.prompt = vec![7; 90])).collect();
    talker.all();
    let log = log.lock().unwrap();
    // The talker is in slot 0 and decodes one token a step.
    let decodes = log.iter().filter(|did| did.spans.contains(&(0, 1))).count();
    assert_eq!(decodes, 96);
    let mut since = 0;
    let last = log.iter().rposition(|did| did.spans.contains(&(0, 1))).unwrap();
    for did in &log[1..last] {
        since = if did.spans.contains(&(0, 1)) { 0 } else { since + 1 };
        assert!(since <= 1, "{log:?}");
    }
    drop(prompts);
}

#[test]
fn a_failing_step_ends_those_in_it_and_nobody_else() {
    let engine = Fake::new(2).start(4);
    let sound = submit(&engine, |r| r.max_tokens = Some(50));
    let failing = submit(&engine, |r| r.prompt = vec![4, FAIL]);
    let broken = submit(&engine, |r| r.prompt = vec![4, NAN]);
    assert_eq!(failing.outcome(), (vec![], Event::Failed(Error::Model("told to fail".to_owned()))));
    assert_eq!(broken.outcome(), (vec![], Event::Failed(Error::NoFiniteLogit)));
    assert_eq!(sound.finished().0, reply(&[1, 2, 3], 50));
    // The slots are as good as new.
    for _ in 0..3 {
        assert_eq!(submit(&engine, |r| r.max_tokens = Some(5)).finished().0, reply(&[1, 2, 3], 5));
    }
    assert_eq!(engine.health(), Ok(()));
}

/// Clients of every kind at once, a long time: those who stay hear what they would hear alone.
#[test]
fn heavy_traffic_leaves_no_trace() {
    let engine = Fake { layer_time: Duration::from_micros(20), ..Fake::new(3) }.start(1000);
    let mut state = 1u64;
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % n
    };
    let mut all = Vec::new();
    for _ in 0..400 {
        let mut prompt: Vec<u32> = (0..1 + below(60)).map(|_| below(50) as u32).collect();
        let kind = below(8);
        let at = below(prompt.len() as u64) as usize;
        match kind {
            0 => prompt[at] = FAIL,
            1 => prompt[at] = NAN,
            _ => {}
        }
        let tokens = below(30) as usize;
        let watched = submit(&engine, |request| {
            request.prompt = prompt.clone();
            request.max_tokens = Some(tokens);
            request.prompt_logprobs = kind == 2;
            request.deadline =
                (kind == 3).then(|| Instant::now() + Duration::from_millis(below(50)));
        });
        if kind == 4 {
            std::thread::sleep(Duration::from_micros(below(2000)));
            watched.cancel.cancel();
        }
        all.push((kind, prompt, tokens, watched));
    }
    for (kind, prompt, tokens, watched) in all {
        let expected = reply(&prompt, tokens);
        match (kind, watched.outcome()) {
            (0, (ids, Event::Failed(Error::Model(_)))) => assert!(ids.is_empty()),
            (1, (ids, Event::Failed(Error::NoFiniteLogit))) => assert!(ids.is_empty()),
            (1, (ids, Event::Finished { .. })) => assert_eq!((ids.len(), tokens), (0, 0)),
            (3, (ids, Event::Finished { reason: FinishReason::Deadline, .. }))
            | (4, (ids, Event::Finished { reason: FinishReason::Cancelled, .. })) => {
                assert!(expected.starts_with(&ids));
            }
            (2.., (ids, Event::Finished { reason: FinishReason::Length, .. })) => {
                assert_eq!(ids, expected);
            }
            (kind, outcome) => panic!("{kind}: {outcome:?}"),
        }
    }
    settle(&engine);
    assert_eq!(submit(&engine, |r| r.max_tokens = Some(9)).finished().0, reply(&[1, 2, 3], 9));
}

#[test]
fn a_panic_is_told_to_everyone_and_the_engine_says_that_it_is_dead() {
    let slow = Fake { layer_time: Duration::from_millis(5), ..Fake::new(2) };
    let engine = slow.start(4);
    let bystander = submit(&engine, |_| {});
    bystander.wait_for_token();
    let culprit = submit(&engine, |r| r.prompt = vec![PANIC]);
    let waiting = submit(&engine, |_| {});
    let dead = |error: &Error| matches!(error, Error::Dead(m) if m.contains("told to panic"));
    for watched in [bystander, culprit, waiting] {
        let end = watched.outcome().1;
        assert!(matches!(&end, Event::Failed(error) if dead(error)), "{end:?}");
    }
    assert!(Watched::submit(&engine, |_| {}).is_err_and(|error| dead(&error)));
    assert!(engine.health().is_err_and(|error| dead(&error)));
    assert_eq!(engine.load(), Load::default());
    engine.shutdown();
}

#[test]
fn shutdown_ends_everything_at_once() {
    let slow = Fake { layers: 1000, layer_time: Duration::from_millis(5), ..Fake::new(1) };
    let engine = slow.start(4);
    let running = submit(&engine, |_| {});
    running.next();
    let waiting = submit(&engine, |_| {});
    let other = engine.clone();
    let begun = Instant::now();
    engine.shutdown();
    assert!(begun.elapsed() < Duration::from_secs(2), "a step would have taken 5 s");
    for watched in [running, waiting] {
        assert_eq!(watched.finished().1, FinishReason::Cancelled);
    }
    assert_eq!(Watched::submit(&other, |_| {}).err(), Some(Error::ShuttingDown));
    assert_eq!(other.health(), Err(Error::ShuttingDown));
    other.shutdown();
}

#[test]
fn without_handles_the_engine_finishes_what_it_has() {
    let engine = Fake::new(1).start(4);
    let both = [(); 2].map(|()| submit(&engine, |_| {}));
    drop(engine);
    for watched in both {
        assert_eq!(watched.finished().0, reply(&[1, 2, 3], 97));
    }
}

#[test]
fn log_probabilities_are_the_models_own() {
    let engine = Fake::new(2).start(4);
    let expected = |history: &[u32], id: u32| {
        let logits = &logits_after(history)[..KNOWN];
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        (f64::from(logits[id as usize]).exp() / sum).ln()
    };
    let prompt: Vec<u32> = (0..19).collect();
    let events = submit(&engine, |request| {
        request.prompt = prompt.clone();
        request.logprobs = Some(3);
        request.prompt_logprobs = true;
        request.max_tokens = Some(4);
        // The reported ones do not follow temperature, bias or penalties.
        request.sampling = Sampling {
            temperature: 0.5,
            top_k: 1,
            presence_penalty: 0.5,
            logit_bias: vec![(7, -1.0)],
            ..Sampling::default()
        };
    })
    .all();
    let mut history = vec![prompt[0]];
    let mut following = prompt[1..].iter();
    let mut check = |id: u32, logprob: &lily_engine::Logprob| {
        let want = expected(&history, id);
        assert!((f64::from(logprob.logprob) - want).abs() < 1e-4, "{logprob:?}, not {want}");
        let best = reply(&history, 1)[0];
        assert_eq!((logprob.top.len(), logprob.top[0].0), (3, best));
        assert!((f64::from(logprob.top[0].1) - expected(&history, best)).abs() < 1e-4);
        history.push(id);
    };
    for event in &events {
        match event {
            Event::PromptLogprobs(logprobs) => {
                // Chunks are as short as the rows of logits that a step may give.
                assert!(logprobs.len() <= 4);
                for logprob in logprobs {
                    check(*following.next().unwrap(), logprob);
                }
            }
            Event::Token { id, logprob } => check(*id, logprob.as_ref().unwrap()),
            _ => {}
        }
    }
    assert_eq!(history.len(), 19 + 4);
}
