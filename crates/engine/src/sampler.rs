//! Logits to a token.
//!
//! Everything that decides is integer or order-fixed f32 arithmetic without library functions, so
//! the same logits, settings and seed give the same token on every machine. No step sorts the
//! vocabulary: the best few come from one pass and nearly always suffice; where they do not,
//! nucleus and draw come from a selection by mass, in linear time.

use std::collections::HashMap;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::request::{Logprob, Sampling};

/// Chooses the tokens of one sequence; remembers what it chose, for the penalties.
pub(crate) struct Sampler {
    settings: Sampling,
    /// ChaCha with 8 rounds, keyed with the seed's 8 bytes (little endian) and 24 zeros, one
    /// `u64` a drawn token. Named and fixed: a seed's tokens are a promise.
    rng: ChaCha8Rng,
    /// How often the reply has an id; 0 for ids that only the prompt has.
    seen: HashMap<u32, u32>,
}

/// Working memory of [`Sampler::sample`], shared by all sequences: it grows to a vocabulary.
#[derive(Default)]
pub(crate) struct Scratch {
    logits: Vec<f32>,
    best: Vec<(f32, u32)>,
    candidates: Vec<Candidate>,
}

/// A token that may be drawn: its mass in the high half, its id inverted in the low one, so that
/// the greater is the better, ties by lower id.
///
/// Mass is unnormalised probability in units of 2^-30 of the best token's: integers, whose sums do
/// not depend on their order. What is less than half a unit is never drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate(u64);

impl Candidate {
    fn new(mass: u32, id: u32) -> Candidate {
        Candidate(u64::from(mass) << 32 | u64::from(!id))
    }

    fn mass(self) -> u64 {
        self.0 >> 32
    }

    fn id(self) -> u32 {
        !(self.0 as u32)
    }
}

/// The mass of the best token.
const MASS_ONE: f32 = (1u32 << 30) as f32;
/// How many of the best tokens are looked at before all are.
const FEW: usize = 512;

impl Sampler {
    /// `sampling` has passed [`Sampling::check`]; `prompt` feeds the repetition penalty.
    pub fn new(sampling: &Sampling, prompt: &[u32]) -> Sampler {
        let seed = sampling.seed.unwrap_or_else(|| getrandom::u64().unwrap_or_default());
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let seen = match sampling.repetition_penalty {
            1.0 => HashMap::new(),
            _ => prompt.iter().map(|&id| (id, 0)).collect(),
        };
        Sampler { settings: sampling.clone(), rng: ChaCha8Rng::from_seed(key), seen }
    }

    /// The next token, or `None` when no logit is finite. `logits`: one for each known id; those
    /// that are not finite are as if they were not there.
    pub fn sample(&mut self, logits: &[f32], scratch: &mut Scratch) -> Option<u32> {
        let Scratch { logits: adjusted, best, candidates } = scratch;
        let logits = self.adjust(logits, adjusted);
        let id = match self.settings.temperature {
            0.0 => argmax(logits)?,
            _ => self.draw(logits, best, candidates)?,
        };
        if self.penalises() {
            *self.seen.entry(id).or_insert(0) += 1;
        }
        Some(id)
    }

    fn penalises(&self) -> bool {
        let Sampling { presence_penalty, frequency_penalty, repetition_penalty, .. } =
            self.settings;
        presence_penalty != 0.0 || frequency_penalty != 0.0 || repetition_penalty != 1.0
    }

    /// The logits with bias and penalties: `logits` itself where there are none.
    fn adjust<'a>(&self, logits: &'a [f32], adjusted: &'a mut Vec<f32>) -> &'a [f32] {
        if self.settings.logit_bias.is_empty() && self.seen.is_empty() {
            return logits;
        }
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        for &(id, bias) in &self.settings.logit_bias {
            if let Some(x) = adjusted.get_mut(id as usize) {
                *x += bias;
            }
        }
        for (&id, &count) in &self.seen {
            let Some(x) = adjusted.get_mut(id as usize) else { continue };
            let penalty = self.settings.repetition_penalty;
            *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
            if count > 0 {
                *x -= self.settings.presence_penalty;
                *x -= self.settings.frequency_penalty * count as f32;
            }
        }
        adjusted
    }

    fn draw(
        &mut self,
        logits: &[f32],
        best: &mut Vec<(f32, u32)>,
        candidates: &mut Vec<Candidate>,
    ) -> Option<u32> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.settings;
        let max = logits[argmax(logits)? as usize];
        let mass = |x: f32| mass((x - max) / temperature);
        let every = |candidates: &mut Vec<Candidate>| {
            candidates.clear();
            candidates.extend(logits.iter().zip(0..).map(|(&x, id)| Candidate::new(mass(x), id)));
        };

        let cut = (1..logits.len()).contains(&top_k);
        select_best(logits, if cut { top_k } else { FEW }, best);
        candidates.clear();
        candidates.extend(best.iter().map(|&(x, id)| Candidate::new(mass(x), id)));
        // Whether the candidates are only the best of all, whose mass is `all`.
        let mut partial = !cut && candidates.len() < logits.len();
        let mut all = match partial {
            true => logits.iter().map(|&x| u64::from(mass(x))).sum(),
            false => total(candidates),
        };
        if top_p < 1.0 {
            // Rounded up, and never less than the best token.
            let target = ((all as f64 * f64::from(top_p)).ceil() as u64).max(1);
            if partial && total(candidates) < target {
                every(candidates);
            }
            let last = crossing(candidates, target);
            candidates.truncate(last + 1);
            (partial, all) = (false, total(candidates));
        }
        if min_p > 0.0 {
            let floor = (min_p * MASS_ONE) as u64;
            if partial && candidates.iter().all(|c| c.mass() >= floor) {
                every(candidates);
            }
            candidates.retain(|c| c.mass() >= floor);
            (partial, all) = (false, total(candidates));
        }
        let drawn = ((u128::from(self.rng.next_u64()) * u128::from(all)) >> 64) as u64;
        if partial && total(candidates) <= drawn {
            every(candidates);
        }
        let chosen = crossing(candidates, drawn + 1);
        Some(candidates[chosen].id())
    }
}

/// The log-probability of `id` under the softmax of `logits`, and the `top` best. Logits that are
/// not finite count as impossible.
pub(crate) fn logprob(logits: &[f32], id: u32, top: usize, scratch: &mut Scratch) -> Logprob {
    let Some(best) = argmax(logits) else {
        return Logprob { logprob: f32::NEG_INFINITY, top: Vec::new() };
    };
    let max = logits[best as usize];
    let all: u64 = logits.iter().map(|&x| u64::from(mass(x - max))).sum();
    let log_sum = f64::from(max) + (all as f64 / f64::from(MASS_ONE)).ln();
    let of = |x: f32| match x.is_finite() {
        true => (f64::from(x) - log_sum) as f32,
        false => f32::NEG_INFINITY,
    };
    select_best(logits, top, &mut scratch.best);
    Logprob {
        logprob: logits.get(id as usize).map_or(f32::NEG_INFINITY, |&x| of(x)),
        top: scratch.best.iter().map(|&(x, id)| (id, of(x))).collect(),
    }
}

/// Logits looked at together: the largest of a block decides whether the block is searched, and
/// the compiler finds it with vector instructions.
const BLOCK: usize = 32;

fn block_max(block: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 8];
    let (eights, rest) = block.as_chunks::<8>();
    for eight in eights {
        for (lane, &x) in lanes.iter_mut().zip(eight) {
            // Not f32::max: this form is one instruction, and passes over NaN as well.
            *lane = if x > *lane { x } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
}

/// The id of the largest finite logit, the lowest of several; `None` if none is finite.
fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = (f32::NEG_INFINITY, None);
    for (block, start) in logits.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        if block_max(block) > best.0 {
            for (&x, id) in block.iter().zip(start..) {
                if x > best.0 && x < f32::INFINITY {
                    best = (x, Some(id));
                }
            }
        }
    }
    best.1
}

/// Leaves the `k` largest finite logits in `best`, best first, ties by lower id.
fn select_best(logits: &[f32], k: usize, best: &mut Vec<(f32, u32)>) {
    best.clear();
    if k == 0 {
        return;
    }
    let order = |a: &(f32, u32), b: &(f32, u32)| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1));
    // What cannot be among the best k. An equal logit further on has a higher id, so it loses.
    let mut floor = f32::NEG_INFINITY;
    for (block, start) in logits.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        if block_max(block) <= floor {
            continue;
        }
        for (&x, id) in block.iter().zip(start..) {
            if x > floor && x < f32::INFINITY {
                best.push((x, id));
            }
        }
        // Twice k, so that a cut is paid by the k entries that it throws away.
        if best.len() >= 2 * k + BLOCK {
            best.select_nth_unstable_by(k - 1, order);
            best.truncate(k);
            floor = best[k - 1].0;
        }
    }
    best.sort_unstable_by(order);
    best.truncate(k);
}

fn total(candidates: &[Candidate]) -> u64 {
    candidates.iter().map(|c| c.mass()).sum()
}

/// The index of the candidate with which the running sum of masses, best first, reaches `target`.
/// Reorders: better candidates come to lie before it, worse ones behind. `target` is positive
/// and at most the total. Linear time, as every round halves what is left.
fn crossing(candidates: &mut [Candidate], mut target: u64) -> usize {
    let (mut low, mut high) = (0, candidates.len());
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        candidates[low..high].select_nth_unstable_by(middle - low, |a, b| b.cmp(a));
        let upper = total(&candidates[low..middle]);
        if upper >= target {
            high = middle;
        } else {
            target -= upper;
            low = middle;
        }
    }
    low
}

/// e^x in units of 2^-30, for x <= 0; 0 for what is not finite.
fn mass(x: f32) -> u32 {
    // Positive only where a logit is infinite.
    let known = if x <= 0.0 { x } else { f32::NEG_INFINITY };
    // Adding 2^52 rounds to an integer, which is then in the low bits of the sum. A conversion
    // would have to look at every case that cannot be, and compilers make no vectors of that.
    const ROUND: f64 = (1u64 << 52) as f64;
    (f64::from(exp(known) * MASS_ONE) + ROUND).to_bits() as u32
}

/// e^x for x <= 0, to a relative 3e-7; 0 or nearly so below -80, as for NaN. Additions and
/// multiplications alone: system libraries differ in the last bit, and vector code has none.
fn exp(x: f32) -> f32 {
    let x = if x > -80.0 { x } else { -80.0 };
    // Adding 1.5 * 2^23 rounds to an integer n, which is then in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let sum = x * std::f32::consts::LOG2_E + ROUND;
    let n = sum - ROUND;
    let r = (x - n * (355.0 / 512.0)) + n * 2.121_944_4e-4; // ln 2 in two parts, the first exact
    let p = 1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0));
    let p = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * p)));
    let two_to_n =
        f32::from_bits(sum.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    p * two_to_n
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uniform in [0, 1).
    fn unit(rng: &mut ChaCha8Rng) -> f32 {
        (rng.next_u64() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Roughly normal logits, with ties, some of them broken.
    fn logits(rng: &mut ChaCha8Rng, n: usize, std: f32) -> Vec<f32> {
        let mut normal = || (0..12).map(|_| unit(rng)).sum::<f32>() - 6.0;
        let mut logits: Vec<f32> = (0..n).map(|_| (normal() * std * 8.0).round() / 8.0).collect();
        for (i, broken) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
            if n > 8 {
                logits[(i * 7 + 3) % n] = broken;
            }
        }
        logits
    }

    fn rng(seed: u64) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(seed)
    }

    /// The definition: sort everything, apply one filter after another in f64, walk to the draw.
    /// Returns the candidates, best first, with their probabilities.
    fn slow(s: &Sampling, logits: &[f32], prompt: &[u32], reply: &[u32]) -> Vec<(u32, f64)> {
        let mut all: Vec<(u32, f64)> = Vec::new();
        for (id, &x) in logits.iter().enumerate() {
            let id = id as u32;
            let mut x = x;
            for &(biased, bias) in &s.logit_bias {
                x += if biased == id { bias } else { 0.0 };
            }
            let count = reply.iter().filter(|&&r| r == id).count() as f32;
            if count > 0.0 || prompt.contains(&id) {
                x = if x > 0.0 { x / s.repetition_penalty } else { x * s.repetition_penalty };
            }
            if count > 0.0 {
                x -= s.presence_penalty;
                x -= s.frequency_penalty * count;
            }
            if x.is_finite() {
                all.push((id, f64::from(x)));
            }
        }
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        if s.temperature == 0.0 {
            all.truncate(1);
            return all.into_iter().map(|(id, _)| (id, 1.0)).collect();
        }
        if s.top_k > 0 {
            all.truncate(s.top_k);
        }
        let max = all[0].1;
        for c in &mut all {
            c.1 = ((c.1 - max) / f64::from(s.temperature)).exp();
        }
        let sum: f64 = all.iter().map(|c| c.1).sum();
        let mut reached = 0.0;
        let mut keep = 0;
        while keep < all.len() && (keep == 0 || reached < f64::from(s.top_p) * sum - 1e-9) {
            reached += all[keep].1;
            keep += 1;
        }
        if s.top_p < 1.0 {
            all.truncate(keep);
        }
        all.retain(|c| c.1 >= f64::from(s.min_p) - 1e-9);
        let sum: f64 = all.iter().map(|c| c.1).sum();
        all.into_iter().map(|(id, p)| (id, p / sum)).collect()
    }

    fn settings() -> Vec<Sampling> {
        let warm = Sampling { temperature: 1.0, ..Sampling::default() };
        vec![
            Sampling::default(),
            warm.clone(),
            Sampling { temperature: 0.3, ..warm.clone() },
            Sampling { temperature: 1e-30, ..warm.clone() },
            Sampling { temperature: 2.0, top_k: 5, ..warm.clone() },
            Sampling { top_k: 1, ..warm.clone() },
            Sampling { top_p: 0.9, ..warm.clone() },
            Sampling { top_p: 0.0, ..warm.clone() },
            Sampling { min_p: 0.2, ..warm.clone() },
            Sampling { min_p: 1.0, ..warm.clone() },
            Sampling { top_k: 20, top_p: 0.95, ..warm.clone() },
            Sampling { top_k: 7, top_p: 0.7, min_p: 0.1, temperature: 1.7, ..warm.clone() },
            Sampling { presence_penalty: 1.5, ..warm.clone() },
            Sampling { frequency_penalty: 0.5, top_k: 4, ..warm.clone() },
            Sampling { repetition_penalty: 1.3, frequency_penalty: -0.25, ..warm.clone() },
            Sampling { logit_bias: vec![(1, 100.0), (2, -100.0), (90, 5.0)], ..warm.clone() },
            Sampling { repetition_penalty: 2.0, logit_bias: vec![(0, 3.0)], ..Sampling::default() },
        ]
    }

    /// Vocabularies, the last larger than the few best that are looked at first, and draws.
    const SIZES: [(usize, u64); 8] = [
        (1, 100),
        (2, 3000),
        (5, 3000),
        (31, 3000),
        (32, 3000),
        (33, 3000),
        (150, 3000),
        (3 * FEW, 500),
    ];

    #[test]
    fn every_draw_is_one_the_definition_allows_and_as_often() {
        let mut rng = rng(1);
        for (i, settings) in settings().into_iter().enumerate() {
            for (n, draws) in SIZES {
                let logits = logits(&mut rng, n, 1.5);
                let prompt = [0, 3, 3, 200];
                let mut scratch = Scratch::default();
                // A short reply, where penalties change from token to token.
                let seeded = Sampling { seed: Some(n as u64), ..settings.clone() };
                let mut sampler = Sampler::new(&seeded, &prompt);
                let mut reply = Vec::new();
                for _ in 0..20 {
                    let id = sampler.sample(&logits, &mut scratch).unwrap();
                    let allowed = slow(&settings, &logits, &prompt, &reply);
                    assert!(allowed.iter().any(|c| c.0 == id), "setting {i}, n {n}: {id}");
                    reply.push(id);
                }
                // The first token's distribution: chi-squared over many seeds.
                let expected = slow(&settings, &logits, &prompt, &[]);
                let mut counts = vec![0.0; n];
                for seed in 0..draws {
                    let seeded = Sampling { seed: Some(seed), ..settings.clone() };
                    let mut sampler = Sampler::new(&seeded, &prompt);
                    counts[sampler.sample(&logits, &mut scratch).unwrap() as usize] += 1.0;
                }
                let (mut chi, mut cells, mut rest) = (0.0, 0.0, (0.0, 0.0));
                let mut cell = |count: f64, mean: f64| {
                    chi += (count - mean).powi(2) / mean;
                    cells += 1.0;
                };
                for &(id, p) in &expected {
                    let (count, mean) = (counts[id as usize], p * draws as f64);
                    match mean >= 10.0 {
                        true => cell(count, mean),
                        false => rest = (rest.0 + count, rest.1 + mean),
                    }
                }
                if rest.1 > 5.0 {
                    cell(rest.0, rest.1);
                }
                // Mean cells - 1, variance twice that: six standard deviations and some.
                let freedom: f64 = cells - 1.0;
                let limit = freedom + 6.0 * (2.0 * freedom).sqrt() + 6.0;
                assert!(chi <= limit, "setting {i}, n {n}: chi2 {chi} of {cells} cells");
            }
        }
    }

    #[test]
    fn the_candidates_are_exactly_those_of_a_full_sort() {
        let mut rng = rng(2);
        for round in 0..400 {
            let n = 1 + (rng.next_u64() % 300) as usize;
            let logits = logits(&mut rng, n, 2.0);
            let k = 1 + (rng.next_u64() % 40) as usize;
            let mut sorted: Vec<_> = (0..n as u32).map(|id| (logits[id as usize], id)).collect();
            sorted.retain(|c| c.0.is_finite());
            sorted.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
            assert_eq!(argmax(&logits), sorted.first().map(|c| c.1), "round {round}");
            sorted.truncate(k);
            let mut best = Vec::new();
            select_best(&logits, k, &mut best);
            assert_eq!(best, sorted, "round {round}, n {n}, k {k}");
        }
    }

    #[test]
    fn crossing_is_the_walk_over_the_sorted_list() {
        let mut rng = rng(3);
        for round in 0..2000 {
            let n = 1 + (rng.next_u64() % 50) as u32;
            let mut candidates: Vec<_> =
                (0..n).map(|id| Candidate::new((rng.next_u64() % 9) as u32, id)).collect();
            let all = total(&candidates);
            if all == 0 {
                continue;
            }
            let target = 1 + rng.next_u64() % all;
            let mut sorted = candidates.clone();
            sorted.sort_by_key(|c| (std::cmp::Reverse(c.mass()), c.id()));
            let mut sum = 0;
            let slow = sorted.iter().position(|c| {
                sum += c.mass();
                sum >= target
            });
            let fast = crossing(&mut candidates, target);
            assert_eq!(Some(fast), slow, "round {round}");
            assert_eq!(candidates[fast], sorted[fast], "round {round}");
            candidates[..fast].sort_by(|a, b| b.cmp(a));
            assert_eq!(candidates[..fast], sorted[..fast], "round {round}");
        }
    }

    #[test]
    fn exp_is_accurate_and_monotone() {
        let mut last = 0.0;
        for i in (0..=80_000).rev() {
            let x = i as f32 * -1e-3;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got / want - 1.0).abs() < 3e-7, "exp({x}) = {got}, not {want}");
            assert!(got >= last, "exp({x})");
            last = got;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(mass(0.0), 1 << 30);
        for x in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, f32::MIN, -81.0, -22.0] {
            assert_eq!(mass(x), 0, "{x}");
        }
    }

    #[test]
    fn a_seed_means_these_tokens_for_ever() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1000) as f32 * 0.008).collect();
        let run = |sampling: Sampling| -> Vec<u32> {
            let mut sampler = Sampler::new(&sampling, &[]);
            let mut scratch = Scratch::default();
            (0..6).map(|_| sampler.sample(&logits, &mut scratch).unwrap()).collect()
        };
        let warm = Sampling { temperature: 1.0, seed: Some(42), ..Sampling::default() };
        assert_eq!(run(warm.clone()), GOLDEN_ALL);
        assert_eq!(run(Sampling { top_k: 20, top_p: 0.95, ..warm.clone() }), GOLDEN_CUT);
        assert_ne!(run(Sampling { seed: Some(43), ..warm.clone() }), GOLDEN_ALL);
        let fresh = Sampling { seed: None, ..warm };
        assert_ne!(run(fresh.clone()), run(fresh));
    }

    const GOLDEN_ALL: [u32; 6] = [334, 803, 285, 618, 299, 889];
    const GOLDEN_CUT: [u32; 6] = [247, 926, 210, 247, 136, 642];

    #[test]
    fn broken_logits_never_win_and_never_panic() {
        let broken = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let mut scratch = Scratch::default();
        for settings in settings() {
            let mut sampler = Sampler::new(&Sampling { seed: Some(1), ..settings }, &[]);
            assert_eq!(sampler.sample(&[], &mut scratch), None);
            assert_eq!(sampler.sample(&broken, &mut scratch), None);
            for fill in broken {
                let mut logits = vec![fill; 100];
                logits[57] = -1e38;
                // A bias makes id 90 finite where it was not only by undoing an infinity, which
                // adding cannot do: 57 stays alone.
                assert_eq!(sampler.sample(&logits, &mut scratch), Some(57), "{fill}");
            }
        }
        let wide = [f32::MAX, f32::MIN, 0.0];
        let warm = Sampling { temperature: 1.0, ..Sampling::default() };
        assert_eq!(Sampler::new(&warm, &[]).sample(&wide, &mut scratch), Some(0));
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        let mut scratch = Scratch::default();
        let logits = [1.0, 5.0, 5.0, 5.0, 0.0, -0.0];
        let mut greedy = Sampler::new(&Sampling::default(), &[]);
        assert_eq!(greedy.sample(&logits, &mut scratch), Some(1));
        assert_eq!(greedy.sample(&[-0.0, 0.0], &mut scratch), Some(0));
        let top = logprob(&logits, 0, 3, &mut scratch).top;
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn logprobs_are_the_log_of_the_softmax() {
        let mut rng = rng(5);
        let mut scratch = Scratch::default();
        for n in [1, 10, 1000, 50_000] {
            let logits = logits(&mut rng, n, 3.0);
            let finite = || logits.iter().filter(|x| x.is_finite()).map(|&x| f64::from(x));
            let max = finite().fold(f64::MIN, f64::max);
            let log_sum = max + finite().map(|x| (x - max).exp()).sum::<f64>().ln();
            for id in [0, n / 2, n - 1] {
                let got = logprob(&logits, id as u32, 5, &mut scratch);
                let want = match f64::from(logits[id]) - log_sum {
                    x if x.is_finite() => x as f32,
                    _ => f32::NEG_INFINITY,
                };
                assert!(got.logprob == want || (got.logprob - want).abs() < 1e-5, "{got:?} {want}");
                assert_eq!(got.top.len(), n.min(5));
                assert!(got.top.is_sorted_by(|a, b| a.1 >= b.1));
                assert!((f64::from(got.top[0].1) - (max - log_sum)).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn penalties_and_bias_act_where_they_should() {
        let mut scratch = Scratch::default();
        let logits = [2.0, 1.9, 1.8, -5.0];
        let mut run = |sampling: Sampling, prompt: &[u32]| -> Vec<u32> {
            let mut sampler = Sampler::new(&sampling, prompt);
            (0..4).map(|_| sampler.sample(&logits, &mut scratch).unwrap()).collect()
        };
        let greedy = Sampling::default();
        assert_eq!(run(greedy.clone(), &[0]), [0, 0, 0, 0]);
        assert_eq!(run(Sampling { presence_penalty: 0.15, ..greedy.clone() }, &[0]), [0, 1, 0, 0]);
        assert_eq!(run(Sampling { frequency_penalty: 0.15, ..greedy.clone() }, &[0]), [0, 1, 0, 2]);
        assert_eq!(run(Sampling { repetition_penalty: 1.2, ..greedy.clone() }, &[0]), [1, 2, 0, 0]);
        assert_eq!(run(Sampling { logit_bias: vec![(3, 7.5)], ..greedy }, &[]), [3, 3, 3, 3]);
    }
}
