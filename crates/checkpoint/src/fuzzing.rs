//! What the fuzz targets in `fuzz/` run, and a test of this crate over the same corpus: each takes
//! any bytes, and panics where a parser breaks its promise.

use crate::config::{Config, GROUP};
use crate::error::Error;
use crate::safetensors::{element_bits, header_bytes, parse_header};
use crate::shards::parse_index;
use crate::tensors::{Tensor, table};

/// The first byte says how many quarters of a kilobyte of data follow the header, the rest is the
/// header's JSON; and all of it is the start of a file.
pub fn safetensors_header(input: &[u8]) {
    let file_bytes = input.len() as u64;
    match header_bytes(&input[..input.len().min(8)], file_bytes) {
        Ok(length) => {
            // What `Ok` says is that the header lies in the file.
            drop(parse_header(&input[8..8 + length], file_bytes));
        }
        Err(problem) => assert_presentable(&problem),
    }

    let Some((&quarters, json)) = input.split_first() else { return };
    let data_bytes = u64::from(quarters) * 256;
    match parse_header(json, 8 + json.len() as u64 + data_bytes) {
        Ok(header) => {
            assert_eq!(header.data_start, 8 + json.len() as u64);
            let mut by_start: Vec<_> = header.entries.iter().collect();
            by_start.sort_by_key(|entry| (entry.range.start, entry.range.end));
            let mut covered = 0;
            for entry in by_start {
                assert!(entry.range.is_empty() || entry.range.start == covered, "{entry:?}");
                covered = covered.max(entry.range.end);
                let bits = element_bits(&entry.dtype).expect("known dtypes only");
                let elements: u64 = entry.shape.iter().product();
                assert_eq!(entry.range.end - entry.range.start, (elements * bits).div_ceil(8));
            }
            assert_eq!(covered, data_bytes);
        }
        Err(problems) => {
            assert!(!problems.is_empty());
            problems.iter().for_each(|problem| assert_presentable(problem));
        }
    }
}

/// The bytes of `model.safetensors.index.json`.
pub fn index(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match parse_index(text) {
        Ok(index) => {
            let mut names: Vec<_> = index.weight_map.iter().map(|(name, _)| name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), index.weight_map.len());
            for (_, file) in &index.weight_map {
                let path = std::path::Path::new(file);
                assert_eq!(path.file_name().and_then(|name| name.to_str()), Some(file.as_str()));
            }
        }
        Err(problem) => assert_presentable(&problem),
    }
}

/// The bytes of `config.json`.
pub fn config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match Config::from_json(text) {
        Ok(config) => {
            // Few layers, as writing hundreds would take the time of hundreds of other inputs.
            let short = Config { layers: config.layers.min(3), ..config.clone() };
            let mut again = Config::from_json(&short.to_json()).expect("what is written reads");
            // serde_json reads a decimal fraction to within one unit of the last place.
            assert!((again.rope_theta / short.rope_theta - 1.0).abs() < 1e-12);
            again.rope_theta = short.rope_theta;
            assert_eq!(again, short);
            let bytes: u64 = table(&short).iter().map(Tensor::bytes).sum();
            assert!(bytes.checked_mul(config.layers as u64).is_some());

            assert_eq!(config.q_heads % config.kv_heads, 0);
            assert_eq!(config.delta_v_heads % config.delta_k_heads, 0);
            assert!(config.rotary_dim <= config.head_dim && config.rotary_dim % 2 == 0);
            assert!(config.experts_per_token <= config.experts);
            assert!(config.eps > 0.0 && config.eps.is_finite());
            assert!(config.stop_ids.iter().all(|&id| (id as usize) < config.vocab));
            for width in [config.dim, config.expert_hidden, config.delta_v_dim()] {
                assert!(width > 0 && width % GROUP == 0);
            }
        }
        Err(Error::Config(problems)) => {
            assert!(!problems.is_empty());
            problems.iter().for_each(|problem| assert_presentable(problem));
        }
        Err(other) => panic!("{other}"),
    }
}

/// A message for a terminal: short, and without control characters.
fn assert_presentable(problem: &str) {
    assert!(!problem.is_empty());
    assert!(problem.chars().count() < 1000, "{problem}");
    assert!(!problem.chars().any(char::is_control), "{problem:?}");
}
