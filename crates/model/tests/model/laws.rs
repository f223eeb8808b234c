//! What must hold on any weights: how tokens are cut into steps, which other sequences a step
//! carries, what a slot held before, and how many threads run make no difference.
//!
//! Cutting differently may change the order of sums in the delta rule, so there a tolerance
//! stands; everything else must be equal bit for bit, and then results never depend on the load.

use crate::machine::{Expected, Machine, Weights, logits};
use lily_model::{Kv, Model, Outputs, Span};

/// Ids below 96 that repeat only after long.
fn tokens(n: usize, seed: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % 96
    };
    (0..n).map(|_| next()).collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let off = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    off.fold(0.0, |m, x| if x > m || x.is_nan() { x } else { m })
}

fn assert_same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: logit {i} is {a}, alone {b}");
    }
}

#[test]
fn a_prompt_may_be_cut_anywhere() {
    let weights = Weights::golden();
    // Longer than two chunks of the delta rule and one block of the cache.
    let ids = tokens(150, 1);
    let ones = [1; 149];
    let cuts: [&[usize]; 16] = [
        &[1],
        &[2],
        &[3],
        &[4],
        &[15],
        &[16],
        &[63],
        &[64],
        &[65],
        &[127, 1],
        &[128],
        &[129],
        &[70, 3, 77],
        &[1, 1, 1, 64, 2],
        &[15, 15, 15, 15, 15, 15, 15, 15, 15],
        &ones,
    ];
    // That threads change no bit is a law of its own.
    for machine in Machine::all().into_iter().filter(|machine| machine.threads == 1) {
        // Keys and values lie in the cache in either case, rounded or not.
        for kv in [Kv::F32, Kv::Bf16] {
            let mut model = machine.model(&weights, kv);
            let whole = logits(&mut model, 0, &ids, &[]);
            for cut in cuts {
                model.reset(0);
                let off = largest_difference(&logits(&mut model, 0, &ids, cut), &whole);
                // A value near a tie may be rounded the other way in a bf16 cache.
                let most = if kv == Kv::F32 { 1e-4 } else { 5e-3 };
                assert!(off <= most, "{machine}, {kv}, cut {cut:?}: {off:.1e}");
            }
        }
    }
}

/// Sequences of a batch: what each has absorbed before the step, and its new tokens.
fn ragged() -> [(Vec<u32>, Vec<u32>); 3] {
    [
        (tokens(5, 2), tokens(1, 3)),    // decode
        (tokens(0, 4), tokens(80, 5)),   // a prompt, chunked
        (tokens(130, 6), tokens(15, 7)), // the longest that is not chunked, in a second block
    ]
}

fn absorb(model: &mut Model, slot: usize, ids: &[u32]) {
    if !ids.is_empty() {
        let span = Span { slot, ids, outputs: Outputs::None };
        model.step(&[span], &mut || true).expect("nobody said stop");
    }
}

#[test]
fn a_batch_gives_what_each_sequence_gives_alone() {
    let weights = Weights::golden();
    let sequences = ragged();
    for machine in Machine::all() {
        for kv in [Kv::F32, Kv::Bf16] {
            let alone = sequences.clone().map(|(past, new)| {
                let mut model = machine.model(&weights, kv);
                absorb(&mut model, 0, &past);
                logits(&mut model, 0, &new, &[])
            });
            for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
                let mut model = machine.model(&weights, kv);
                for (slot, &i) in order.iter().enumerate() {
                    absorb(&mut model, slot, &sequences[i].0);
                }
                let spans = [0, 1, 2].map(|slot| {
                    let ids = &sequences[order[slot]].1[..];
                    Span { slot, ids, outputs: Outputs::All }
                });
                let ticket = model.step(&spans, &mut || true).expect("nobody said stop");
                let batch = model.logits(ticket).unwrap();
                let want: Vec<f32> = order.iter().flat_map(|&i| alone[i].clone()).collect();
                assert_same_bits(batch, &want, &format!("{machine}, {kv}, order {order:?}"));
                for (slot, &i) in order.iter().enumerate() {
                    assert_eq!(model.position(slot), sequences[i].0.len() + sequences[i].1.len());
                }
            }
        }
    }
}

/// The last law is about one step; here three sequences decode together for long.
#[test]
fn sequences_that_decode_together_do_not_mix() {
    let weights = Weights::golden();
    for machine in Machine::ends() {
        let prompts = [tokens(1, 8), tokens(20, 9), tokens(64, 10)];
        let next = [tokens(30, 11), tokens(30, 12), tokens(30, 13)];
        let mut model = machine.model(&weights, Kv::Bf16);
        let mut together = [Vec::new(), Vec::new(), Vec::new()];
        for (slot, prompt) in prompts.iter().enumerate() {
            absorb(&mut model, slot, prompt);
        }
        for t in 0..30 {
            // In turn one of them pauses.
            let running: Vec<usize> = (0..3).filter(|slot| t % 4 != *slot).collect();
            let spans: Vec<Span> = running
                .iter()
                .map(|&slot| {
                    let at = together[slot].len() / weights.checkpoint.config().vocab;
                    Span { slot, ids: &next[slot][at..=at], outputs: Outputs::Last }
                })
                .collect();
            let ticket = model.step(&spans, &mut || true).expect("nobody said stop");
            let vocab = weights.checkpoint.config().vocab;
            for (rows, &slot) in model.logits(ticket).unwrap().chunks(vocab).zip(&running) {
                together[slot].extend_from_slice(rows);
            }
        }
        for slot in 0..3 {
            let mut model = machine.model(&weights, Kv::Bf16);
            absorb(&mut model, 0, &prompts[slot]);
            let n = together[slot].len() / weights.checkpoint.config().vocab;
            let alone = logits(&mut model, 0, &next[slot][..n], &[1; 30]);
            assert_same_bits(&together[slot], &alone, &format!("{machine}, slot {slot}"));
        }
    }
}

#[test]
fn a_reset_slot_remembers_nothing() {
    let weights = Weights::golden();
    let ids = tokens(40, 14);
    for machine in Machine::all() {
        let mut model = machine.model(&weights, Kv::Bf16);
        let fresh = logits(&mut model, 1, &ids, &[]);
        absorb(&mut model, 0, &tokens(9, 15));
        absorb(&mut model, 1, &tokens(200, 16));
        model.reset(1);
        assert_eq!((model.position(0), model.position(1)), (9, 0));
        let again = logits(&mut model, 1, &ids, &[]);
        assert_same_bits(&again, &fresh, &format!("{machine}"));
    }
}

#[test]
fn a_reset_leaves_the_other_slots_alone() {
    let weights = Weights::golden();
    let (past, new) = (tokens(40, 17), tokens(20, 18));
    for machine in Machine::ends() {
        let mut model = machine.model(&weights, Kv::Bf16);
        absorb(&mut model, 1, &past);
        let want = logits(&mut model, 1, &new, &[]);
        let mut model = machine.model(&weights, Kv::Bf16);
        for slot in [0, 1, 2] {
            absorb(&mut model, slot, if slot == 1 { &past } else { &new });
        }
        model.reset(0);
        model.reset(2);
        assert_same_bits(&logits(&mut model, 1, &new, &[]), &want, &format!("{machine}"));
    }
}

#[test]
fn a_step_that_is_stopped_can_be_forgotten() {
    let weights = Weights::golden();
    let ids = tokens(40, 19);
    let layers = weights.checkpoint.config().layers;
    for machine in Machine::ends() {
        let fresh = logits(&mut machine.model(&weights, Kv::F32), 0, &ids, &[]);
        for stop_before in 0..layers {
            let mut model = machine.model(&weights, Kv::F32);
            absorb(&mut model, 2, &ids[..7]);
            let mut asked = 0;
            let span = Span { slot: 0, ids: &ids, outputs: Outputs::Last };
            let stopped = model.step(&[span], &mut || {
                asked += 1;
                asked <= stop_before
            });
            assert!(stopped.is_none());
            assert_eq!(asked, stop_before + 1, "asked before every layer, and not again");
            model.reset(0);
            let again = logits(&mut model, 0, &ids, &[]);
            assert_same_bits(&again, &fresh, &format!("{machine}, before layer {stop_before}"));
            assert_eq!(model.position(2), 7);
        }
    }
}

#[test]
fn the_rows_asked_for_come_in_the_order_of_the_spans() {
    let weights = Weights::golden();
    let vocab = weights.checkpoint.config().vocab;
    for machine in Machine::ends() {
        let mut model = machine.model(&weights, Kv::F32);
        let all = [tokens(30, 20), tokens(3, 21), tokens(2, 22)];
        let alone = [0, 1, 2].map(|slot| logits(&mut model, slot, &all[slot], &[]));
        for slot in [0, 1, 2] {
            model.reset(slot);
        }
        // The long span runs after the short ones whatever its place.
        let outputs = [Outputs::Last, Outputs::None, Outputs::All];
        let spans = [0, 1, 2].map(|i| Span { slot: i, ids: &all[i], outputs: outputs[i] });
        let ticket = model.step(&spans, &mut || true).expect("nobody said stop");
        let want = [&alone[0][29 * vocab..], &alone[2][..]].concat();
        assert_same_bits(model.logits(ticket).unwrap(), &want, &format!("{machine}"));
    }
}

#[test]
fn threads_change_no_bit() {
    let (weights, expected) = (Weights::golden(), Expected::golden());
    for isa in lily_device::cpu::isa::available() {
        let results: Vec<Vec<f32>> = [1, 2, 3, 5]
            .map(|threads| {
                let machine = Machine { isa, threads };
                logits(&mut machine.model(&weights, Kv::Bf16), 0, &expected.ids, &[33, 1, 1])
            })
            .into();
        for other in &results[1..] {
            assert_same_bits(other, &results[0], &format!("{isa}"));
        }
    }
}
