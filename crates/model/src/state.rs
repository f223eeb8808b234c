//! What sequences remember between steps, in device memory: keys and values of the attention
//! layers, convolution and delta state of the others. Also the cosines and sines of positions.
//!
//! State lives in arrays with a place (a *slot*) for each sequence. Keys and values are kept in
//! blocks of [`KV_BLOCK`] positions that are given to a slot as its sequence grows; delta-net
//! state has a fixed size. Everything is allocated once, from sizes known before.

use lily_checkpoint::Config;
use lily_checkpoint::config::CONV_TAPS;
use lily_device::ops::KV_BLOCK;
use lily_device::{Device, Error, View};

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kv {
    /// Exact.
    F32,
    /// Rounded to nearest even: half the memory and traffic.
    Bf16,
}

impl Kv {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Kv::F32 => 4,
            Kv::Bf16 => 2,
        }
    }
}

impl std::str::FromStr for Kv {
    type Err = String;
    fn from_str(s: &str) -> Result<Kv, String> {
        match s {
            "f32" => Ok(Kv::F32),
            "bf16" => Ok(Kv::Bf16),
            _ => Err(format!("expected f32 or bf16, found `{s}`")),
        }
    }
}

impl std::fmt::Display for Kv {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Kv::F32 => "f32",
            Kv::Bf16 => "bf16",
        })
    }
}

/// The state of one layer, for all slots.
#[derive(Clone, Copy, Debug)]
pub enum LayerState {
    /// A gated delta net: `conv` f32 (slots, 3, channels), the last raw inputs of the convolution;
    /// `delta` f32 (slots, v_heads, head_dim, head_dim), row = value dim, column = key dim.
    Delta {
        /// Last inputs of the convolution.
        conv: View,
        /// The memory of the delta rule.
        delta: View,
    },
    /// Attention: keys and values, each (kv_blocks, kv_heads, KV_BLOCK, head_dim) of [`Kv`].
    Attention {
        /// Keys, normed and rotated.
        k: View,
        /// Values.
        v: View,
    },
}

/// State of all slots and layers.
pub struct State {
    /// How many sequences can be kept.
    pub slots: usize,
    /// Longest sequence, in tokens.
    pub positions: usize,
    /// Blocks of the KV cache a sequence of that length takes: the width of the block table.
    pub max_blocks: usize,
    /// Blocks there are.
    pub kv_blocks: usize,
    /// How keys and values are stored.
    pub kv: Kv,
    /// u32 (slots, max_blocks): which block holds which part of a slot's context.
    pub blocks: View,
    /// f32 (positions, rotary_dim): cosines, then sines, of the angles of each position.
    pub rope: View,
    /// One entry a layer.
    pub layers: Vec<LayerState>,
}

/// Bytes of what is kept of sequences; see [`State::bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBytes {
    /// Keys and values of all slots at full length.
    pub kv: u64,
    /// Delta and convolution state of all slots.
    pub delta: u64,
    /// Block table, cosines and sines.
    pub tables: u64,
}

impl StateBytes {
    /// All of it.
    pub fn total(self) -> u64 {
        self.kv + self.delta + self.tables
    }
}

impl State {
    /// Bytes that `alloc` will take: a formula, nothing is allocated.
    pub fn bytes(c: &Config, slots: usize, positions: usize, kv: Kv) -> StateBytes {
        let attention = (0..c.layers).filter(|&i| c.is_attention(i)).count() as u64;
        let delta = c.layers as u64 - attention;
        let max_blocks = positions.div_ceil(KV_BLOCK as usize) as u64;
        let slots = slots as u64;
        let head_state = (c.delta_v_heads * c.delta_head_dim * c.delta_head_dim) as u64;
        StateBytes {
            kv: attention * 2 * slots * max_blocks * kv_block_bytes(c, kv),
            delta: delta * slots * 4 * (head_state + ((CONV_TAPS - 1) * c.conv_channels()) as u64),
            tables: 4 * slots * max_blocks + 4 * (positions * c.rotary_dim) as u64,
        }
    }

    /// Allocates the state of `slots` sequences of up to `positions` tokens, all zero.
    pub fn alloc(
        dev: &mut dyn Device,
        c: &Config,
        slots: usize,
        positions: usize,
        kv: Kv,
    ) -> Result<State, Error> {
        assert!(slots > 0 && positions > 0, "{slots} slots of {positions} positions");
        let max_blocks = positions.div_ceil(KV_BLOCK as usize);
        let kv_blocks = slots * max_blocks;
        let mut layers = Vec::with_capacity(c.layers);
        for layer in 0..c.layers {
            layers.push(if c.is_attention(layer) {
                let bytes = kv_blocks as u64 * kv_block_bytes(c, kv);
                LayerState::Attention {
                    k: dev.alloc(bytes, "KV cache")?,
                    v: dev.alloc(bytes, "KV cache")?,
                }
            } else {
                let conv = slots * (CONV_TAPS - 1) * c.conv_channels();
                let delta = slots * c.delta_v_heads * c.delta_head_dim * c.delta_head_dim;
                LayerState::Delta {
                    conv: dev.alloc(4 * conv as u64, "convolution state")?,
                    delta: dev.alloc(4 * delta as u64, "delta-net state")?,
                }
            });
        }

        // Every slot owns its blocks for good: a sequence can always grow to `positions`.
        let blocks = dev.alloc(4 * kv_blocks as u64, "block table")?;
        let table: Vec<u8> = (0..kv_blocks as u32).flat_map(u32::to_le_bytes).collect();
        dev.write(blocks, &table);
        let rope = dev.alloc(4 * (positions * c.rotary_dim) as u64, "rotation table")?;
        dev.write(rope, &rope_table(c, positions));
        Ok(State { slots, positions, max_blocks, kv_blocks, kv, blocks, rope, layers })
    }

    /// The parts of the state that a new sequence in `slot` must find zero: delta and convolution
    /// state. Keys and values need not be: nothing beyond a sequence's own length is read.
    pub fn fixed_parts(&self, slot: usize) -> impl Iterator<Item = View> + '_ {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        let part = move |view: View| {
            let bytes = view.bytes / self.slots as u64;
            view.slice(slot as u64 * bytes, bytes)
        };
        self.layers.iter().flat_map(move |layer| match *layer {
            LayerState::Delta { conv, delta } => vec![part(conv), part(delta)],
            LayerState::Attention { .. } => vec![],
        })
    }
}

/// Bytes of the keys (or the values) of one block, one layer.
fn kv_block_bytes(c: &Config, kv: Kv) -> u64 {
    (KV_BLOCK as usize * c.kv_heads * c.head_dim * kv.bytes()) as u64
}

/// f32 (positions, rotary_dim), little endian: for position p and pair j of rotary_dim / 2, the
/// cosine of p * theta^(-2j / rotary_dim), then in the second half its sine. Angles are formed in
/// f64: at position 262,143 an f32 product would already be off by 0.01.
fn rope_table(c: &Config, positions: usize) -> Vec<u8> {
    let half = c.rotary_dim / 2;
    let frequency: Vec<f64> =
        (0..half).map(|j| c.rope_theta.powf(-2.0 * j as f64 / c.rotary_dim as f64)).collect();
    let mut bytes = Vec::with_capacity(4 * positions * c.rotary_dim);
    for position in 0..positions {
        let angles = frequency.iter().map(|f| position as f64 * f);
        let row = angles.clone().map(f64::cos).chain(angles.map(f64::sin));
        bytes.extend(row.flat_map(|v| (v as f32).to_le_bytes()));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_model_keeps_what_the_arithmetic_says() {
        let bytes = State::bytes(&Config::full(), 1, 4096, Kv::Bf16);
        assert_eq!(bytes.kv, 83_886_080); // 10 layers, K and V, 2 heads of 256, bf16
        assert_eq!(bytes.delta, 62_914_560 + 2_949_120); // 30 layers of state and of conv rows
    }

    #[test]
    fn a_rotation_by_position_zero_is_none() {
        let c = Config { rotary_dim: 4, ..Config::full() };
        let table = rope_table(&c, 2);
        let f: Vec<f32> =
            table.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(&f[..4], &[1.0, 1.0, 0.0, 0.0]);
        let slow = 1e7f64.powf(-0.5);
        let want = [1f64.cos(), slow.cos(), 1f64.sin(), slow.sin()];
        assert_eq!(&f[4..], &want.map(|v| v as f32));
    }
}
