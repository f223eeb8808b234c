//! The weights as views of device memory, named as the forward pass names them.

use crate::pack::Packed;
use lily_checkpoint::Config;
use lily_device::{Device, Error, View};

/// All weights of the model.
pub struct Weights {
    /// q4 (vocab, dim): embed_tokens
    pub embed: View,
    /// One entry a layer.
    pub layers: Vec<Layer>,
    /// f32 (dim): norm
    pub norm: View,
    /// q4 (vocab, dim): lm_head
    pub head: View,
}

/// One layer: a mixer and a mixture of experts, each behind a norm.
pub struct Layer {
    /// f32 (dim): input_layernorm
    pub mixer_norm: View,
    /// Delta net or attention.
    pub mixer: Mixer,
    /// f32 (dim): post_attention_layernorm
    pub moe_norm: View,
    /// Which every layer has.
    pub moe: Moe,
}

/// What mixes information between tokens.
pub enum Mixer {
    /// linear_attn
    Delta(Delta),
    /// self_attn
    Attention(Attention),
}

/// A gated delta net.
pub struct Delta {
    /// q4 (channels + v_dim + 2 v_heads, dim): in_proj_{qkv, z, b, a}
    pub input: View,
    /// f32 (channels, 4): conv1d
    pub conv: View,
    /// f32 (v_heads): A_log
    pub a_log: View,
    /// f32 (v_heads): dt_bias
    pub dt_bias: View,
    /// f32 (head_dim): norm
    pub norm: View,
    /// q4 (dim, v_dim): out_proj
    pub output: View,
}

/// Gated attention.
pub struct Attention {
    /// q4 (2 q_heads head_dim + 2 kv_heads head_dim, dim): {q, k, v}_proj
    pub input: View,
    /// f32 (head_dim): q_norm
    pub q_norm: View,
    /// f32 (head_dim): k_norm
    pub k_norm: View,
    /// q4 (dim, q_heads head_dim): o_proj
    pub output: View,
}

/// A mixture of experts. The shared expert is number `experts` of them.
pub struct Moe {
    /// q8 (experts + 1, dim): gate, shared_expert_gate
    pub router: View,
    /// q4 (experts + 1, 2 hidden, dim): gate_proj over up_proj
    pub up: View,
    /// q4 (experts + 1, dim, hidden): down_proj
    pub down: View,
}

impl Weights {
    /// Hands every packed array to the device.
    pub fn adopt(dev: &mut dyn Device, c: &Config, packed: &Packed) -> Result<Weights, Error> {
        let mut view = |name: String| dev.adopt(packed.data(), packed.range(&name), &name);
        let mut layers = Vec::with_capacity(c.layers);
        for i in 0..c.layers {
            let mut part = |name: &str| view(format!("layers.{i}.{name}"));
            layers.push(Layer {
                mixer_norm: part("mixer_norm")?,
                mixer: if c.is_attention(i) {
                    Mixer::Attention(Attention {
                        input: part("input")?,
                        q_norm: part("q_norm")?,
                        k_norm: part("k_norm")?,
                        output: part("output")?,
                    })
                } else {
                    Mixer::Delta(Delta {
                        input: part("input")?,
                        conv: part("conv")?,
                        a_log: part("a_log")?,
                        dt_bias: part("dt_bias")?,
                        norm: part("norm")?,
                        output: part("output")?,
                    })
                },
                moe_norm: part("moe_norm")?,
                moe: Moe { router: part("router")?, up: part("up")?, down: part("down")? },
            });
        }
        let embed = view("embed".into())?;
        Ok(Weights { embed, layers, norm: view("norm".into())?, head: view("head".into())? })
    }
}
