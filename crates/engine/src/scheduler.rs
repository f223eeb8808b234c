//! What to compute next: (waiting, running, free slots) -> one step.
//!
//! A step is either one chunk of one sequence's prompt, or one token of every sequence that
//! generates. While there is both, the two alternate, so that a running generation waits for at
//! most one chunk of somebody's prefill. Sequences get slots in the order of their arrival and
//! keep them to their end; prompts take turns chunk by chunk, so that a short one does not wait
//! for the whole of a long one.
//!
//! Pure: no clock, no model, no tokens; it trusts that what it says is done.

use std::collections::VecDeque;

/// A sequence's number, unique in the life of a scheduler.
pub(crate) type Id = u64;

/// What to compute next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing: no sequence is there.
    Idle,
    /// The next `tokens` of the prompt of `id`, in its slot.
    Prefill { id: Id, slot: usize, tokens: usize },
    /// One token of each of these, oldest first.
    Decode(Vec<(Id, usize)>),
}

/// A sequence whose prompt is not computed yet.
#[derive(Debug)]
struct Prompt {
    id: Id,
    /// Tokens to go.
    left: usize,
    /// Most tokens a step may take.
    chunk: usize,
}

/// Which sequences there are, and whose turn it is.
#[derive(Debug)]
pub(crate) struct Scheduler {
    /// Sequences without a slot, oldest first.
    waiting: VecDeque<Prompt>,
    /// Slots that nobody has; the last is given first.
    free: Vec<usize>,
    /// Sequences in prefill with their slots; the first is the next.
    prefilling: VecDeque<(Prompt, usize)>,
    /// Sequences that generate, with their slots, in the order in which they began to.
    decoding: Vec<(Id, usize)>,
    /// Whether the last step was a prefill, so that a decode has precedence.
    prefilled: bool,
}

impl Scheduler {
    /// A scheduler for slots `0..slots`, all free.
    pub fn new(slots: usize) -> Scheduler {
        assert!(slots > 0, "a scheduler without slots");
        Scheduler {
            waiting: VecDeque::new(),
            free: (0..slots).rev().collect(),
            prefilling: VecDeque::new(),
            decoding: Vec::new(),
            prefilled: false,
        }
    }

    /// A new sequence with `tokens` to prefill, at most `chunk` of them a step.
    pub fn enqueue(&mut self, id: Id, tokens: usize, chunk: usize) {
        assert!(tokens > 0, "sequence {id} has no tokens");
        assert!(chunk > 0, "sequence {id} has an empty chunk");
        self.waiting.push_back(Prompt { id, left: tokens, chunk });
    }

    /// Gives out free slots and says what to compute now. The caller computes it, and tells
    /// with [`Scheduler::remove`] which sequences ended.
    pub fn next(&mut self) -> Step {
        while !self.waiting.is_empty() {
            let Some(slot) = self.free.pop() else { break };
            let prompt = self.waiting.pop_front().expect("not empty");
            self.prefilling.push_back((prompt, slot));
        }
        let decode = !self.decoding.is_empty() && (self.prefilled || self.prefilling.is_empty());
        self.prefilled = !decode;
        if decode {
            return Step::Decode(self.decoding.clone());
        }
        let Some((mut prompt, slot)) = self.prefilling.pop_front() else { return Step::Idle };
        let (id, tokens) = (prompt.id, prompt.left.min(prompt.chunk));
        prompt.left -= tokens;
        if prompt.left == 0 {
            self.decoding.push((id, slot));
        } else {
            self.prefilling.push_back((prompt, slot));
        }
        Step::Prefill { id, slot, tokens }
    }

    /// Forgets a sequence, wherever it is, and returns the slot that this frees, if it had one.
    pub fn remove(&mut self, id: Id) -> Option<usize> {
        self.waiting.retain(|prompt| prompt.id != id);
        let mut freed = None;
        self.prefilling.retain(|(prompt, slot)| {
            let stays = prompt.id != id;
            freed = if stays { freed } else { Some(*slot) };
            stays
        });
        self.decoding.retain(|&(other, slot)| {
            let stays = other != id;
            freed = if stays { freed } else { Some(slot) };
            stays
        });
        self.free.extend(freed);
        freed
    }

    /// How many sequences have no slot yet.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How many sequences have a slot.
    pub fn running(&self) -> usize {
        self.prefilling.len() + self.decoding.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};
    use std::collections::HashMap;

    #[test]
    fn a_running_generation_alternates_with_a_prefill() {
        let mut scheduler = Scheduler::new(2);
        assert_eq!(scheduler.next(), Step::Idle);
        scheduler.enqueue(1, 5, 4);
        assert_eq!(scheduler.next(), Step::Prefill { id: 1, slot: 0, tokens: 4 });
        assert_eq!(scheduler.next(), Step::Prefill { id: 1, slot: 0, tokens: 1 });
        assert_eq!(scheduler.next(), Step::Decode(vec![(1, 0)]));
        scheduler.enqueue(2, 9, 4);
        scheduler.enqueue(3, 1, 4);
        for tokens in [4, 4, 1] {
            assert_eq!(scheduler.next(), Step::Prefill { id: 2, slot: 1, tokens });
            let both = if tokens == 1 { vec![(1, 0), (2, 1)] } else { vec![(1, 0)] };
            assert_eq!(scheduler.next(), Step::Decode(both));
        }
        assert_eq!((scheduler.waiting(), scheduler.running()), (1, 2));
        assert_eq!(scheduler.remove(1), Some(0));
        assert_eq!(scheduler.next(), Step::Prefill { id: 3, slot: 0, tokens: 1 });
        assert_eq!(scheduler.next(), Step::Decode(vec![(2, 1), (3, 0)]));
        assert_eq!(scheduler.remove(7), None);
    }

    #[test]
    fn a_short_prompt_does_not_wait_for_the_whole_of_a_long_one() {
        let mut scheduler = Scheduler::new(2);
        scheduler.enqueue(1, 100, 4);
        scheduler.enqueue(2, 4, 4);
        assert_eq!(scheduler.next(), Step::Prefill { id: 1, slot: 0, tokens: 4 });
        assert_eq!(scheduler.next(), Step::Prefill { id: 2, slot: 1, tokens: 4 });
        assert_eq!(scheduler.next(), Step::Decode(vec![(2, 1)]).clone());
    }

    /// What the simulator knows of a sequence.
    struct Truth {
        prompt: usize,
        chunk: usize,
        reply: usize,
        slot: Option<usize>,
        /// Prefill steps of others since this one's last.
        passed_over: usize,
        /// Prefill steps since its last token.
        since_token: usize,
    }

    /// Random arrivals, lengths and cancellations; every promise of the module is checked at
    /// every step, and in the end everything has been served.
    #[test]
    fn simulated_traffic_keeps_every_promise() {
        for seed in 0..300 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut below = |n: usize| (rng.next_u64() % n as u64) as usize;
            let slots = 1 + below(5);
            let arrivals = 1 + below(60);
            // From rare arrivals to all at once.
            let pace = 1 + below(30);
            let mut scheduler = Scheduler::new(slots);
            let mut all: HashMap<Id, Truth> = HashMap::new();
            let mut queue: VecDeque<Id> = VecDeque::new();
            let (mut arrived, mut served, mut cancelled, mut steps) = (0, 0, 0, 0);
            while arrived < arrivals || !all.is_empty() {
                steps += 1;
                assert!(steps < 100_000, "seed {seed}: traffic never ends");
                while arrived < arrivals && below(pace) == 0 {
                    let id = arrived as Id;
                    let (prompt, chunk, reply) = (1 + below(50), 1 + below(8), 1 + below(20));
                    scheduler.enqueue(id, prompt, chunk);
                    let truth =
                        Truth { prompt, chunk, reply, slot: None, passed_over: 0, since_token: 0 };
                    all.insert(id, truth);
                    queue.push_back(id);
                    arrived += 1;
                }
                if below(40) == 0 && !all.is_empty() {
                    let mut ids: Vec<_> = all.keys().copied().collect();
                    ids.sort();
                    let id = ids[below(ids.len())];
                    let truth = all.remove(&id).unwrap();
                    let freed = scheduler.remove(id);
                    // A slot may have been given but not shown in a step yet.
                    assert!(truth.slot.is_none() || truth.slot == freed, "seed {seed}");
                    queue.retain(|&q| q != id);
                    cancelled += 1;
                }
                let ended = match scheduler.next() {
                    Step::Idle => {
                        assert!(all.is_empty(), "seed {seed}: idle with work to do");
                        continue;
                    }
                    Step::Prefill { id, slot, tokens } => {
                        if all[&id].slot.is_none() {
                            // First seen: admitted in order of arrival, into an unshared slot.
                            assert_eq!(queue.pop_front(), Some(id), "seed {seed}: not FIFO");
                            assert!(all.values().all(|t| t.slot != Some(slot)), "seed {seed}");
                        }
                        for (&other, truth) in &mut all {
                            truth.passed_over += 1;
                            truth.since_token += 1;
                            let generates = truth.prompt == 0 && other != id;
                            assert!(!generates || truth.since_token <= 1, "seed {seed}: stalled");
                            let prefills = truth.slot.is_some() && truth.prompt > 0;
                            assert!(
                                !prefills || truth.passed_over <= slots,
                                "seed {seed}: starved"
                            );
                        }
                        let truth = all.get_mut(&id).unwrap();
                        assert_eq!(*truth.slot.get_or_insert(slot), slot, "seed {seed}");
                        assert_eq!(tokens, truth.prompt.min(truth.chunk), "seed {seed}");
                        truth.prompt -= tokens;
                        (truth.passed_over, truth.since_token) = (0, 0);
                        // The last chunk gives the first token.
                        truth.reply -= usize::from(truth.prompt == 0);
                        if truth.prompt == 0 && truth.reply == 0 { vec![id] } else { vec![] }
                    }
                    Step::Decode(batch) => {
                        let mut ids: Vec<_> = batch.iter().map(|b| b.0).collect();
                        ids.sort();
                        let mut generating: Vec<_> =
                            all.iter().filter(|a| a.1.prompt == 0).map(|a| *a.0).collect();
                        generating.sort();
                        assert_eq!(ids, generating, "seed {seed}: a decode is of everyone");
                        for (id, slot) in batch {
                            let truth = all.get_mut(&id).unwrap();
                            assert_eq!(truth.slot, Some(slot), "seed {seed}");
                            truth.reply -= 1;
                            truth.since_token = 0;
                        }
                        ids.retain(|id| all[id].reply == 0);
                        ids
                    }
                };
                for id in ended {
                    let truth = all.remove(&id).unwrap();
                    assert_eq!(scheduler.remove(id), truth.slot, "seed {seed}");
                    served += 1;
                }
                assert!(scheduler.running() <= slots, "seed {seed}");
                assert_eq!(scheduler.running() + scheduler.waiting(), all.len(), "seed {seed}");
            }
            assert_eq!(served + cancelled, arrivals, "seed {seed}");
            assert_eq!(scheduler.next(), Step::Idle);
            let mut free = scheduler.free.clone();
            free.sort();
            assert_eq!(free, (0..slots).collect::<Vec<_>>(), "seed {seed}: slots leaked");
        }
    }
}
