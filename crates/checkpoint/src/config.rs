//! The sizes of the model. Names follow the checkpoint's `config.json`, shortened to the words
//! the code uses; [`Config::full`] is the one model this engine is for.
//!
//! [`Config::from_json`] reads the `config.json` of an MLX conversion and checks every setting on
//! which the engine relies, so that nothing below has to ask again. It knows no file and no tensor.

mod read;

use serde_json::{Value, json};

use crate::error::{Error, Result};
pub(crate) use read::{parse, read};

/// The sizes of one model of the Qwen3.6 MoE architecture (text part).
///
/// Every layer is a mixer (gated delta net, or gated attention every `attention_every`-th layer)
/// and a mixture of experts. Counts are in elements unless a field says otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows of the embedding and of the head (`vocab_size`); the tokenizer may know fewer.
    pub vocab: usize,
    /// Width of the residual stream (`hidden_size`).
    pub dim: usize,
    /// `num_hidden_layers`.
    pub layers: usize,
    /// Layer `i` is full attention iff `(i + 1) % attention_every == 0` (`full_attention_interval`).
    pub attention_every: usize,
    /// `num_attention_heads`.
    pub q_heads: usize,
    /// `num_key_value_heads`; query head `h` reads key/value head `h / (q_heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of an attention head (`head_dim`).
    pub head_dim: usize,
    /// How many leading elements of a head RoPE rotates (`head_dim * partial_rotary_factor`).
    pub rotary_dim: usize,
    /// `rope_theta`.
    pub rope_theta: f64,
    /// `linear_num_key_heads`.
    pub delta_k_heads: usize,
    /// `linear_num_value_heads`; value head `j` uses key head `j / (delta_v_heads / delta_k_heads)`.
    pub delta_v_heads: usize,
    /// Width of a delta-net head, keys and values alike (`linear_key_head_dim`).
    pub delta_head_dim: usize,
    /// `num_experts`: the routed ones.
    pub experts: usize,
    /// `num_experts_per_tok`.
    pub experts_per_token: usize,
    /// Hidden width of an expert, routed and shared alike (`moe_intermediate_size`).
    pub expert_hidden: usize,
    /// `rms_norm_eps`.
    pub eps: f32,
    /// `max_position_embeddings`, in tokens.
    pub max_positions: usize,
    /// Ids that end a reply (top-level `eos_token_id` of the MLX config, not that of `text_config`).
    pub stop_ids: Vec<u32>,
}

/// Taps of the delta net's causal convolution (`linear_conv_kernel_dim`).
pub const CONV_TAPS: usize = 4;
/// Elements that share one scale and one bias.
pub const GROUP: usize = 64;

/// The vocabulary of Qwen3.6, and its ids for `<|im_end|>` and `<|endoftext|>`.
const QWEN_VOCAB: usize = 248_320;
const QWEN_IM_END: u32 = 248_046;
const QWEN_ENDOFTEXT: u32 = 248_044;

impl Config {
    /// Qwen3.6-35B-A3B.
    pub fn full() -> Config {
        Config {
            vocab: QWEN_VOCAB,
            dim: 2048,
            layers: 40,
            attention_every: 4,
            q_heads: 16,
            kv_heads: 2,
            head_dim: 256,
            rotary_dim: 64,
            rope_theta: 1e7,
            delta_k_heads: 16,
            delta_v_heads: 32,
            delta_head_dim: 128,
            experts: 256,
            experts_per_token: 8,
            expert_hidden: 512,
            eps: 1e-6,
            max_positions: 262_144,
            stop_ids: vec![QWEN_IM_END, QWEN_ENDOFTEXT],
        }
    }

    /// Reads the `config.json` of an MLX conversion, of any sizes.
    ///
    /// # Errors
    /// [`Error::Config`] with every deviation from what the engine relies on: the model types,
    /// activation, plain RoPE, the pattern of attention layers, head counts that divide, widths
    /// that are multiples of [`GROUP`], and the quantisation of each module.
    pub fn from_json(text: &str) -> Result<Config> {
        let value = parse(text).map_err(|problem| Error::Config(vec![problem]))?;
        match read(&value) {
            (Some(config), problems) if problems.is_empty() => Ok(config),
            (_, problems) => Err(Error::Config(problems)),
        }
    }

    /// A `config.json` from which [`Config::from_json`] reads this config again, in the layout of
    /// mlx-community's file.
    pub fn to_json(&self) -> String {
        let quantization = quantization(self.layers);
        let layer_types: Vec<_> =
            (0..self.layers).map(|l| layer_type(self.is_attention(l))).collect();
        let config = json!({
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "eos_token_id": self.stop_ids,
            "model_type": "qwen3_5_moe",
            "quantization": quantization,
            "quantization_config": quantization,
            "text_config": {
                "attention_bias": false,
                "attn_output_gate": true,
                "full_attention_interval": self.attention_every,
                "head_dim": self.head_dim,
                "hidden_act": "silu",
                "hidden_size": self.dim,
                "layer_types": layer_types,
                "linear_conv_kernel_dim": CONV_TAPS,
                "linear_key_head_dim": self.delta_head_dim,
                "linear_num_key_heads": self.delta_k_heads,
                "linear_num_value_heads": self.delta_v_heads,
                "linear_value_head_dim": self.delta_head_dim,
                "max_position_embeddings": self.max_positions,
                "model_type": "qwen3_5_moe_text",
                "moe_intermediate_size": self.expert_hidden,
                "num_attention_heads": self.q_heads,
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "num_hidden_layers": self.layers,
                "num_key_value_heads": self.kv_heads,
                // Through its decimal form: 1e-6 as f32 widened to f64 would print as
                // 9.999999974752427e-7.
                "rms_norm_eps": self.eps.to_string().parse::<f64>().expect("f32 prints as f64"),
                "rope_parameters": {
                    "partial_rotary_factor": self.rotary_dim as f64 / self.head_dim as f64,
                    "rope_theta": self.rope_theta,
                    "rope_type": "default",
                },
                "shared_expert_intermediate_size": self.expert_hidden,
                "tie_word_embeddings": false,
                "vocab_size": self.vocab,
            },
            "tie_word_embeddings": false,
        });
        serde_json::to_string_pretty(&config).expect("a JSON value prints")
    }

    /// The sizes in which this config differs from Qwen3.6-35B-A3B, as (name in `config.json`,
    /// size here, size there). Empty for the full model and its fine-tunes: the stop ids, the
    /// longest position, `eps` and the base of RoPE are settings, not sizes.
    pub fn other_sizes(&self) -> Vec<(&'static str, usize, usize)> {
        let full = Config::full();
        [
            ("vocab_size", self.vocab, full.vocab),
            ("hidden_size", self.dim, full.dim),
            ("num_hidden_layers", self.layers, full.layers),
            ("full_attention_interval", self.attention_every, full.attention_every),
            ("num_attention_heads", self.q_heads, full.q_heads),
            ("num_key_value_heads", self.kv_heads, full.kv_heads),
            ("head_dim", self.head_dim, full.head_dim),
            ("rotary width", self.rotary_dim, full.rotary_dim),
            ("linear_num_key_heads", self.delta_k_heads, full.delta_k_heads),
            ("linear_num_value_heads", self.delta_v_heads, full.delta_v_heads),
            ("linear_key_head_dim", self.delta_head_dim, full.delta_head_dim),
            ("num_experts", self.experts, full.experts),
            ("num_experts_per_tok", self.experts_per_token, full.experts_per_token),
            ("moe_intermediate_size", self.expert_hidden, full.expert_hidden),
        ]
        .into_iter()
        .filter(|(_, here, there)| here != there)
        .collect()
    }

    /// Whether layer `layer` (from 0) is full attention; the others are gated delta nets.
    pub fn is_attention(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.attention_every)
    }

    /// Width of all key heads of a delta net: of q, and of k.
    pub fn delta_k_dim(&self) -> usize {
        self.delta_k_heads * self.delta_head_dim
    }

    /// Width of all value heads of a delta net: of v, z and the heads' output.
    pub fn delta_v_dim(&self) -> usize {
        self.delta_v_heads * self.delta_head_dim
    }

    /// Channels of a delta net's convolution: q, k and v side by side.
    pub fn conv_channels(&self) -> usize {
        2 * self.delta_k_dim() + self.delta_v_dim()
    }
}

/// The `quantization` object of a model of so many layers.
pub(crate) fn quantization(layers: usize) -> Value {
    let mut quantization = json!({ "group_size": GROUP, "bits": 4, "mode": "affine" });
    for path in eight_bit_paths(layers) {
        quantization[path] = json!({ "group_size": GROUP, "bits": 8 });
    }
    quantization
}

/// The modules that are quantised to 8 bits: router and shared expert's gate of each layer.
fn eight_bit_paths(layers: usize) -> impl Iterator<Item = String> {
    (0..layers).flat_map(|layer| {
        ["gate", "shared_expert_gate"]
            .map(|module| format!("language_model.model.layers.{layer}.mlp.{module}"))
    })
}

fn layer_type(is_attention: bool) -> &'static str {
    if is_attention { "full_attention" } else { "linear_attention" }
}
