//! An independent tiny checkpoint with logits that others computed (`spec/tiny` of the shared
//! material): the first and the last test of a change to the maths.

use crate::machine::{Distance, Expected, Machine, Weights, logits};
use lily_checkpoint::testing;
use lily_model::Kv;

#[test]
fn logits_of_spec_tiny() {
    let Some(shared) = testing::shared() else { return };
    let dir = shared.join("spec/tiny");
    let weights = Weights::read(&dir);
    let expected = Expected::read(&dir.join("expected.safetensors"), "logits_fp32_dequant");
    let vocab = weights.checkpoint.config().vocab;
    for machine in Machine::all() {
        let mut model = machine.model(&weights, Kv::F32);
        for cut in [vec![], vec![70, 3, 77, 24], vec![1; 174]] {
            model.reset(0);
            let got = logits(&mut model, 0, &expected.ids, &cut);
            let d = Distance::of(&got, &expected.logits, vocab);
            println!("spec/tiny, {machine}, {} cuts: {:.1e}", cut.len(), d.max_abs);
            assert!(d.max_abs <= 1e-3, "{machine}: {d:?}");
            assert_eq!(d.top1, 1.0, "{machine}");
        }
    }
}
