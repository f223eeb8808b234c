//! The table of every tensor of the text model: its name in an MLX checkpoint, dtype and shape.
//! It knows sizes only; which file a tensor lies in is `safetensors`' matter.

use std::fmt;

use crate::config::{CONV_TAPS, Config, GROUP};

/// How the elements of a tensor of the text model are stored. All are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// Words of eight 4-bit or four 8-bit elements, the first in the lowest bits.
    U32,
    /// The upper half of an f32.
    BF16,
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::U32 => 4,
            Dtype::BF16 => 2,
        }
    }

    /// The name in a safetensors header.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::U32 => "U32",
            Dtype::BF16 => "BF16",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Dtype::U32 => "u32",
            Dtype::BF16 => "bf16",
        })
    }
}

/// One tensor that a checkpoint must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The whole name, with the prefix `language_model.`.
    pub name: String,
    /// How its elements are stored.
    pub dtype: Dtype,
    /// Row-major, the last dimension varies fastest.
    pub shape: Vec<usize>,
}

impl Tensor {
    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product::<u64>() * self.dtype.bytes() as u64
    }
}

/// What stands before every name of the text model in an MLX checkpoint.
pub const PREFIX: &str = "language_model.";

/// Whether a tensor that is in the file but not in the table is passed over: the vision tower,
/// which Lily does not run.
pub fn is_skipped(name: &str) -> bool {
    name.starts_with("vision_tower.")
}

/// Every tensor of the text model, in the order of the forward pass. A quantised module `X` has
/// three: `X.weight`, `X.scales` and `X.biases`.
pub fn table(config: &Config) -> Vec<Tensor> {
    let mut table = Table::default();
    table.quantised("model.embed_tokens", &[config.vocab], config.dim, 4);
    for layer in 0..config.layers {
        table.layer = format!("model.layers.{layer}.");
        table.plain("input_layernorm.weight", &[config.dim]);
        if config.is_attention(layer) {
            attention(&mut table, config);
        } else {
            delta_net(&mut table, config);
        }
        table.plain("post_attention_layernorm.weight", &[config.dim]);
        experts(&mut table, config);
    }
    table.layer.clear();
    table.plain("model.norm.weight", &[config.dim]);
    table.quantised("lm_head", &[config.vocab], config.dim, 4);
    table.tensors
}

fn attention(table: &mut Table, config: &Config) {
    let q_dim = config.q_heads * config.head_dim;
    let kv_dim = config.kv_heads * config.head_dim;
    // Each head has head_dim rows of query, then head_dim rows of output gate.
    table.quantised("self_attn.q_proj", &[2 * q_dim], config.dim, 4);
    table.quantised("self_attn.k_proj", &[kv_dim], config.dim, 4);
    table.quantised("self_attn.v_proj", &[kv_dim], config.dim, 4);
    table.plain("self_attn.q_norm.weight", &[config.head_dim]);
    table.plain("self_attn.k_norm.weight", &[config.head_dim]);
    table.quantised("self_attn.o_proj", &[config.dim], q_dim, 4);
}

fn delta_net(table: &mut Table, config: &Config) {
    let v_dim = config.delta_v_dim();
    table.quantised("linear_attn.in_proj_qkv", &[config.conv_channels()], config.dim, 4);
    table.quantised("linear_attn.in_proj_z", &[v_dim], config.dim, 4);
    table.quantised("linear_attn.in_proj_b", &[config.delta_v_heads], config.dim, 4);
    table.quantised("linear_attn.in_proj_a", &[config.delta_v_heads], config.dim, 4);
    table.plain("linear_attn.conv1d.weight", &[config.conv_channels(), CONV_TAPS, 1]);
    table.plain("linear_attn.A_log", &[config.delta_v_heads]);
    table.plain("linear_attn.dt_bias", &[config.delta_v_heads]);
    table.plain("linear_attn.norm.weight", &[config.delta_head_dim]);
    table.quantised("linear_attn.out_proj", &[config.dim], v_dim, 4);
}

fn experts(table: &mut Table, config: &Config) {
    let (experts, hidden, dim) = (config.experts, config.expert_hidden, config.dim);
    table.quantised("mlp.gate", &[experts], dim, 8);
    table.quantised("mlp.switch_mlp.gate_proj", &[experts, hidden], dim, 4);
    table.quantised("mlp.switch_mlp.up_proj", &[experts, hidden], dim, 4);
    table.quantised("mlp.switch_mlp.down_proj", &[experts, dim], hidden, 4);
    table.quantised("mlp.shared_expert_gate", &[1], dim, 8);
    table.quantised("mlp.shared_expert.gate_proj", &[hidden], dim, 4);
    table.quantised("mlp.shared_expert.up_proj", &[hidden], dim, 4);
    table.quantised("mlp.shared_expert.down_proj", &[dim], hidden, 4);
}

/// The table while it is written: the tensors so far, and the layer's part of the next names.
#[derive(Default)]
struct Table {
    tensors: Vec<Tensor>,
    layer: String,
}

impl Table {
    fn plain(&mut self, name: &str, shape: &[usize]) {
        self.push(name, "", Dtype::BF16, shape.to_vec());
    }

    /// A module of `rows` (with leading dimensions) times `columns` inputs at `bits` an element.
    fn quantised(&mut self, name: &str, rows: &[usize], columns: usize, bits: usize) {
        let shape = |last: usize| [rows, &[last]].concat();
        self.push(name, ".weight", Dtype::U32, shape(columns * bits / 32));
        self.push(name, ".scales", Dtype::BF16, shape(columns / GROUP));
        self.push(name, ".biases", Dtype::BF16, shape(columns / GROUP));
    }

    fn push(&mut self, name: &str, part: &str, dtype: Dtype, shape: Vec<usize>) {
        let name = format!("{PREFIX}{}{name}{part}", self.layer);
        self.tensors.push(Tensor { name, dtype, shape });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn the_full_model_has_the_published_totals() {
        let table = table(&Config::full());
        assert_eq!(table.len(), 1757);
        assert_eq!(table.iter().map(Tensor::bytes).sum::<u64>(), 19_508_787_456);
        let sum = |part: &str| -> u64 {
            table.iter().filter(|t| t.name.contains(part)).map(Tensor::bytes).sum()
        };
        assert_eq!(sum("embed_tokens"), 286_064_640);
        assert_eq!(sum("lm_head"), 286_064_640);
        assert_eq!(sum(".switch_mlp."), 18_119_393_280);
        assert_eq!(sum(".shared_expert."), 70_778_880);
        assert_eq!(sum(".mlp.gate."), 22_282_240);
        assert_eq!(sum(".shared_expert_gate."), 87_040);
        assert_eq!(sum("self_attn"), 153_354_240 + 10 * 2 * 256 * 2);
        let names: std::collections::HashSet<_> = table.iter().map(|t| &t.name).collect();
        assert_eq!(names.len(), table.len());
    }

    /// The largest sizes that a config may have still give byte counts without overflow.
    #[test]
    fn the_largest_sizes_do_not_overflow() {
        let config = Config {
            vocab: 1 << 22,
            dim: 1 << 16,
            layers: 2,
            attention_every: 2,
            q_heads: 1 << 10,
            kv_heads: 1 << 10,
            head_dim: 1 << 12,
            rotary_dim: 1 << 12,
            delta_k_heads: 1 << 10,
            delta_v_heads: 1 << 10,
            delta_head_dim: 1 << 12,
            experts: 1 << 14,
            experts_per_token: 1 << 14,
            expert_hidden: 1 << 16,
            max_positions: 1 << 24,
            ..Config::full()
        };
        let bytes: u64 = table(&config).iter().map(Tensor::bytes).sum();
        assert!(bytes.checked_mul(128).is_some_and(|bytes| bytes < 1 << 56), "{bytes}");
    }

    #[test]
    fn the_table_is_the_published_manifest() {
        let Some(shared) = crate::testing::shared() else { return };
        let manifest = std::fs::read_to_string(shared.join("spec/manifest.tsv")).unwrap();
        let mut expected = HashMap::new();
        let mut skipped = 0;
        for line in manifest.lines() {
            let field: Vec<_> = line.split('\t').collect();
            if is_skipped(field[0]) {
                skipped += 1;
            } else {
                expected.insert(field[0], (field[1], field[2].to_string(), field[3]));
            }
        }
        assert_eq!(skipped, 333);
        for tensor in table(&Config::full()) {
            let shape: Vec<_> = tensor.shape.iter().map(usize::to_string).collect();
            let bytes = tensor.bytes().to_string();
            let found = (tensor.dtype.name(), shape.join("x"), bytes.as_str());
            assert_eq!(expected.remove(tensor.name.as_str()), Some(found), "{}", tensor.name);
        }
        assert!(expected.is_empty(), "{expected:?}");
    }
}
