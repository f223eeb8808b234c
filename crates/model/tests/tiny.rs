//! An independent tiny checkpoint with logits computed by others (`spec/tiny` of the shared
//! material): the first and the last test of a change to the maths.

use lily_checkpoint::{Checkpoint, OpenOptions, testing};
use lily_device::cpu::{self, Cpu};
use lily_model::{Kv, Model, Options, Outputs, Packed, Span};

#[test]
fn logits_of_spec_tiny() {
    let Some(shared) = testing::shared() else {
        eprintln!("skipped: logits_of_spec_tiny needs LILY_SHARED");
        return;
    };
    let dir = shared.join("spec/tiny");
    let checkpoint = Checkpoint::open(&dir, OpenOptions { any_size: true }).unwrap();
    let expected = std::fs::read(dir.join("expected.safetensors")).unwrap();
    let expected = safetensors::SafeTensors::deserialize(&expected).unwrap();
    let ids: Vec<u32> = expected
        .tensor("ids")
        .unwrap()
        .data()
        .chunks(4)
        .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    let want: Vec<f32> = expected
        .tensor("logits_fp32_dequant")
        .unwrap()
        .data()
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    let packed = Packed::in_memory(&checkpoint).unwrap();
    let cpu = Cpu::new(cpu::Options { isa: Some(cpu::Isa::Scalar), threads: Some(1) }).unwrap();
    let options = Options { slots: 1, max_seq: 256, chunk: 200, outputs: 200, kv: Kv::F32 };
    let mut model =
        Model::new(Box::new(cpu), checkpoint.config().clone(), &packed, options).unwrap();
    for cut in [vec![174], vec![70, 3, 77, 24], vec![1; 174]] {
        model.reset(0);
        let mut got = Vec::new();
        let mut at = 0;
        for n in &cut {
            let span = Span { slot: 0, ids: &ids[at..at + n], outputs: Outputs::All };
            let ticket = model.step(&[span], &mut || true).unwrap();
            got.extend_from_slice(model.logits(ticket).unwrap());
            at += n;
        }
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("spec/tiny, {} pieces: max |difference| of logits {worst:.1e}", cut.len());
        assert_eq!(got.len(), want.len());
        assert!(worst <= 1e-3, "{worst}");
    }
}
