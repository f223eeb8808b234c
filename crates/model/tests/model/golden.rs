//! Logits of the random model against the reference. A random model amplifies rounding, so the
//! error of every path stands in one table with the error that bf16 costs on the same weights.

use crate::machine::{Distance, Expected, Machine, Weights, golden_dir, logits};
use lily_device::cpu::Isa;
use lily_model::Kv;

/// What rounding to bf16 costs, as the reference measured it: `what` is the name in the file.
fn yardstick(what: &str) -> Distance {
    let text = std::fs::read_to_string(golden_dir().join("yardstick.json")).unwrap();
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    let number = |name: &str| all[what][name].as_f64().unwrap();
    Distance { max_abs: number("max_abs"), kl_mean: number("kl_mean"), top1: number("top1") }
}

fn print(name: &str, d: Distance) {
    println!(
        "{name:40} max |difference| {:.1e}, KL {:.1e}, same token {:.3}",
        d.max_abs, d.kl_mean, d.top1
    );
}

#[test]
fn logits_are_those_of_the_reference() {
    let (weights, expected) = (Weights::golden(), Expected::golden());
    let vocab = weights.checkpoint.config().vocab;
    let activations = yardstick("bf16 activations");
    let cache = yardstick("bf16 keys and values");
    print("reference, bf16 activations", activations);
    print("reference, bf16 keys and values", cache);
    for machine in Machine::all() {
        for kv in [Kv::F32, Kv::Bf16] {
            // One step runs the delta rule in chunks, steps of one token run it token by token.
            for (how, cut) in [("one step", vec![]), ("token by token", vec![1; 70])] {
                let mut model = machine.model(&weights, kv);
                let got = logits(&mut model, 0, &expected.ids, &cut);
                let d = Distance::of(&got, &expected.logits, vocab);
                print(&format!("{machine}, {kv} cache, {how}"), d);
                match kv {
                    // In the reference, f32 arithmetic costs 1e-5; the scalar device has f64.
                    Kv::F32 => {
                        let most = if machine.isa == Isa::Scalar { 2e-5 } else { 2e-4 };
                        assert!(d.max_abs <= most, "{machine}: {d:?}");
                    }
                    // The same values are rounded, up to ties: the same size of error.
                    Kv::Bf16 => {
                        assert!(d.max_abs <= 2.0 * cache.max_abs, "{machine}: {d:?}");
                        assert!(d.kl_mean <= 2.0 * cache.kl_mean, "{machine}: {d:?}");
                    }
                }
                assert!(d.kl_mean < activations.kl_mean / 10.0, "{machine}: {d:?}");
            }
        }
    }
}
