//! The golden files: the recorded operations, and the weights of the random model.

use safetensors::SafeTensors;
use std::sync::LazyLock;

/// Routed experts of the random model.
pub const EXPERTS: u32 = 5;

pub fn file(name: &str) -> Vec<u8> {
    let path = format!("{}/../../reference/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

pub static OPERATIONS: LazyLock<Vec<u8>> = LazyLock::new(|| file("operations.safetensors"));
pub static LOGITS: LazyLock<Vec<u8>> = LazyLock::new(|| file("logits.safetensors"));
pub static MODEL: LazyLock<Vec<u8>> = LazyLock::new(|| file("tiny/model.safetensors"));

pub fn bytes(file: &[u8], name: &str) -> Vec<u8> {
    let tensors = SafeTensors::deserialize(file).expect("a golden file");
    tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data().to_vec()
}

pub fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    u32s(bytes).into_iter().map(f32::from_bits).collect()
}

/// A tensor of the recorded operations.
pub fn golden(name: &str) -> Vec<f32> {
    f32s(&bytes(&OPERATIONS, name))
}

pub fn golden_ids(name: &str) -> Vec<u32> {
    u32s(&bytes(&OPERATIONS, name))
}

/// A bf16 tensor of the model.
pub fn weight(name: &str) -> Vec<f32> {
    let data = bytes(&MODEL, &format!("language_model.model.{name}"));
    let halves = data.as_chunks::<2>().0.iter();
    halves.map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)).collect()
}

/// Quantised matrices of the model stacked along their rows, as the device wants them: all codes,
/// then all (scale, bias) pairs. The checkpoint's words are the codes already.
pub fn stacked(names: &[String]) -> Vec<u8> {
    let (mut codes, mut pairs) = (Vec::new(), Vec::new());
    for name in names {
        let part = |x: &str| bytes(&MODEL, &format!("language_model.model.{name}.{x}"));
        codes.extend(part("weight"));
        let (scales, biases) = (part("scales"), part("biases"));
        for (scale, bias) in scales.as_chunks::<2>().0.iter().zip(biases.as_chunks::<2>().0) {
            pairs.extend([*scale, *bias].concat());
        }
    }
    codes.extend(pairs);
    codes
}

pub fn matrix(names: &[&str]) -> Vec<u8> {
    stacked(&names.iter().map(|name| name.to_string()).collect::<Vec<_>>())
}

/// Part `part` of all experts' `matrices`, the shared expert last: expert by expert, and within
/// an expert matrix by matrix.
pub fn experts(layer: usize, matrices: &[&str]) -> Vec<u8> {
    let (mut codes, mut pairs) = (Vec::new(), Vec::new());
    for e in 0..=EXPERTS as usize {
        for matrix in matrices {
            let name = |owner: &str| format!("layers.{layer}.mlp.{owner}.{matrix}");
            let whole = |owner: &str| stacked(&[name(owner)]);
            let (data, count) = if e < EXPERTS as usize {
                (whole("switch_mlp"), EXPERTS as usize)
            } else {
                (whole("shared_expert"), 1)
            };
            // A group of 64 elements is 32 bytes of codes and a pair of 4 bytes.
            let (all_codes, all_pairs) = data.split_at(data.len() / 36 * 32);
            let expert = e % EXPERTS as usize;
            let part = |all: &[u8]| {
                let len = all.len() / count;
                all[expert * len..][..len].to_vec()
            };
            codes.extend(part(all_codes));
            pairs.extend(part(all_pairs));
        }
    }
    codes.extend(pairs);
    codes
}
