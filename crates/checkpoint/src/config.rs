//! The sizes of the model. Names follow the checkpoint's `config.json`, shortened to the words
//! the code uses; `Config::full` is the one model this engine is for.

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

impl Config {
    /// Qwen3.6-35B-A3B.
    pub fn full() -> Config {
        Config {
            vocab: 248_320,
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
            stop_ids: vec![248_046, 248_044],
        }
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
