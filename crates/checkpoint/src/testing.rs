//! What the tests of this and other crates share: a small checkpoint written in a moment, and where
//! the reference files are. Nothing here runs outside tests.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use half::bf16;

use crate::config::Config;
use crate::safetensors::encode_header;
use crate::shards::{INDEX, SINGLE};
use crate::tensors::{Dtype, Tensor, table};

/// The folder of reference files that are not part of the repository: `LILY_SHARED`, else
/// `../shared` beside the workspace. Says aloud what is skipped where there is none.
pub fn shared() -> Option<PathBuf> {
    let dir = std::env::var_os("LILY_SHARED").map(PathBuf::from).unwrap_or_else(|| {
        // Cargo sets this to the folder of the crate under test, crates/NAME.
        let crate_dir = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
        PathBuf::from(crate_dir).join("../../../shared")
    });
    if dir.is_dir() {
        return Some(dir);
    }
    eprintln!("skipped: needs the reference files in {} (set LILY_SHARED)", dir.display());
    None
}

/// A model small enough to be written for each test (about 300 KB), with both kinds of layer, more
/// value heads than key heads, and no size that equals another by accident where it can be helped.
pub fn small_config() -> Config {
    Config {
        vocab: 320,
        dim: 128,
        layers: 3,
        attention_every: 3,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 48,
        rotary_dim: 12,
        rope_theta: 1e7,
        delta_k_heads: 2,
        delta_v_heads: 4,
        delta_head_dim: 32,
        experts: 6,
        experts_per_token: 2,
        expert_hidden: 64,
        eps: 1e-6,
        max_positions: 512,
        stop_ids: vec![1, 0],
    }
}

/// Writes a checkpoint of `config` with random weights into the folder `dir`, which exists: one
/// `model.safetensors`, or `shards` files and an index, where the three tensors of a module lie in
/// different files. The data of every file begins at an odd byte. The weights depend on `seed` and
/// the tensor's place in the table alone, and are tame enough to run.
///
/// # Errors
/// Those of writing files.
pub fn write_checkpoint(dir: &Path, config: &Config, shards: usize, seed: u64) -> io::Result<()> {
    assert!(shards > 0, "a checkpoint has at least one file");
    fs::write(dir.join("config.json"), config.to_json())?;
    let tensors: Vec<(usize, Tensor)> = table(config).into_iter().enumerate().collect();
    let mut weight_map = serde_json::Map::new();
    for shard in 0..shards {
        let name = match shards {
            1 => SINGLE.to_string(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
        };
        // Backwards, so that no reader can rely on the table's order.
        let here: Vec<_> = tensors.iter().rev().filter(|(i, _)| i % shards == shard).collect();
        let header = || here.iter().map(|(_, t)| (t.name.as_str(), t.dtype.name(), &t.shape[..]));
        let mut bytes = encode_header(header(), 0);
        if bytes.len().is_multiple_of(2) {
            bytes = encode_header(header(), 1);
        }
        for (i, tensor) in here {
            weight_map.insert(tensor.name.clone(), name.clone().into());
            fill(tensor, seed.wrapping_add(*i as u64), &mut bytes);
        }
        fs::write(dir.join(name), bytes)?;
    }
    if shards > 1 {
        let index = serde_json::json!({ "metadata": {}, "weight_map": weight_map });
        fs::write(dir.join(INDEX), index.to_string())?;
    }
    Ok(())
}

/// Appends the random elements of one tensor. Quantised weights are about ±0.1: a scale near 0.01
/// with either sign, and the bias that puts the middle of the 4-bit codes near zero.
fn fill(tensor: &Tensor, seed: u64, out: &mut Vec<u8>) {
    let mut state = seed;
    let count: usize = tensor.shape.iter().product();
    for element in 0..count {
        let word = splitmix64(&mut state);
        if tensor.dtype == Dtype::U32 {
            out.extend((word as u32).to_le_bytes());
            continue;
        }
        let unit = (word >> 40) as f32 / (1 << 24) as f32;
        let sign = if element.is_multiple_of(3) { -1.0 } else { 1.0 };
        let value = if tensor.name.ends_with(".scales") {
            sign * 0.01 * (0.5 + unit)
        } else if tensor.name.ends_with(".biases") {
            -sign * 0.08 * (0.5 + unit)
        } else {
            0.75 + 0.5 * unit
        };
        out.extend(bf16::from_f32(value).to_le_bytes());
    }
}

/// One step of the SplitMix64 generator (Steele, Lea, Flood 2014).
fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
