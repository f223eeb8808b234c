//! The whole forward pass: tokens in, logits out. MODEL.md tells the same in the same order.
//!
//! ```text
//! x = embed(ids)
//! every layer:  x += mixer(norm(x))     gated delta net; every fourth layer gated attention
//!               x += moe(norm(x))       8 of 256 experts, and the shared one
//! logits = head(norm(x[rows whose logits are wanted]))
//! ```
//!
//! Everything here is queued on the device and nothing is read back: which experts run, which
//! positions are attended to and what is appended where are facts in device memory.
//! Buffers are named after what they hold; their shapes are in [`Scratch`].

use crate::state::{LayerState, State};
use crate::weights::{Attention, Delta, Mixer, Moe, Weights};
use lily_checkpoint::Config;
use lily_device::ops::*;
use lily_device::{Device, View};

/// From how many tokens on a span takes the chunked delta rule: below, reading and writing the
/// state once a token costs less than the chunk's matrix products.
pub const DELTA_CHUNK_FROM: usize = 16;

/// Activations, overwritten by every layer. First extent: the tokens of the step.
pub struct Scratch {
    /// u32 (tokens): token ids
    pub ids: View,
    /// u32 (tokens): the span of each row
    pub span_of: View,
    /// u32 (spans, 4): first row, rows, slot, position
    pub span: View,
    /// u32 (outputs): rows whose logits are wanted
    pub rows: View,
    /// f32 (tokens, dim): residual stream
    pub x: View,
    /// f32 (tokens, dim): normed
    pub y: View,
    /// f32 (tokens, dim): what a block adds to x
    pub d: View,
    /// f32 (tokens, widest): a mixer's projections, side by side
    pub p: View,
    /// f32 (tokens, channels): the delta net's q, k, v
    pub qkv: View,
    /// f32 (tokens, 2 v_heads) its log decay and beta
    pub gates: View,
    /// f32 (tokens, inner): the heads' output
    pub o: View,
    /// f32 (tokens, experts + 1)
    pub router: View,
    /// u32 (tokens, top + 1): experts, the shared one last
    pub chosen: View,
    /// f32 (tokens, top + 1): and how much of each
    pub shares: View,
    /// f32 (tokens, top + 1, hidden)
    pub h: View,
    /// f32 (outputs, dim): normed rows for the head
    pub last: View,
    /// f32 (outputs, vocab)
    pub logits: View,
}

/// The shape of one step: how much of everything, all else lies in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Rows, all spans together.
    pub tokens: u32,
    /// Sequences. The short spans (under [`DELTA_CHUNK_FROM`] tokens) come first.
    pub spans: u32,
    /// How many of the spans are short.
    pub short: u32,
    /// Rows whose logits are wanted.
    pub outputs: u32,
    /// Positions the spans reach when the step is done, summed over spans.
    pub context: u32,
    /// The largest of them.
    pub longest: u32,
}

/// Queues the forward pass of one step. Before every layer asks `go_on`; returns false when that
/// said no, and then leaves the state of the step's slots undefined.
pub fn forward(
    dev: &mut dyn Device,
    c: &Config,
    w: &Weights,
    state: &State,
    s: &Scratch,
    step: Step,
    go_on: &mut dyn FnMut() -> bool,
) -> bool {
    let (tokens, dim, vocab, eps) = (step.tokens, c.dim as u32, c.vocab as u32, c.eps);

    dev.run(Embed { ids: s.ids, table: w.embed, x: s.x, tokens, vocab, dim });
    for (i, (layer, layer_state)) in w.layers.iter().zip(&state.layers).enumerate() {
        if !go_on() {
            return false;
        }
        if i == 0 {
            dev.run(RmsNorm { x: s.x, w: layer.mixer_norm, y: s.y, tokens, dim, eps });
        } else {
            dev.run(AddRmsNorm { x: s.x, d: s.d, w: layer.mixer_norm, y: s.y, tokens, dim, eps });
        }
        match (&layer.mixer, layer_state) {
            (Mixer::Delta(m), LayerState::Delta { conv, delta }) => {
                gated_delta_net(dev, c, m, state, *conv, *delta, s, step)
            }
            (Mixer::Attention(m), LayerState::Attention { k, v }) => {
                gated_attention(dev, c, m, state, *k, *v, s, step)
            }
            _ => unreachable!("a layer and its state are built from the same config"),
        }
        dev.run(AddRmsNorm { x: s.x, d: s.d, w: layer.moe_norm, y: s.y, tokens, dim, eps });
        mixture_of_experts(dev, c, &layer.moe, s, step);
    }

    if step.outputs > 0 {
        let outputs = step.outputs;
        let (x, d, rows) = (s.x, s.d, s.rows);
        dev.run(OutputNorm { x, d, rows, w: w.norm, y: s.last, tokens, outputs, dim, eps });
        linear(dev, w.head, s.last, s.logits, outputs, vocab, dim);
    }
    true
}

/// Gated delta net: d = out( norm(delta_rule(conv(y))) * silu(z) ).
#[allow(clippy::too_many_arguments)] // the layer's weights, its state, and the step
fn gated_delta_net(
    dev: &mut dyn Device,
    c: &Config,
    m: &Delta,
    state: &State,
    conv: View,
    delta: View,
    s: &Scratch,
    step: Step,
) {
    let (tokens, spans, slots, dim) = (step.tokens, step.spans, state.slots as u32, c.dim as u32);
    let (k_heads, v_heads) = (c.delta_k_heads as u32, c.delta_v_heads as u32);
    let head_dim = c.delta_head_dim as u32;
    let (channels, inner) = (c.conv_channels() as u32, c.delta_v_dim() as u32);
    let width = channels + inner + 2 * v_heads; // q, k, v | z | b | a

    linear(dev, m.input, s.y, s.p, tokens, width, dim);
    dev.run(DeltaConv {
        p: s.p,
        w: m.conv,
        a_log: m.a_log,
        dt_bias: m.dt_bias,
        conv,
        span_of: s.span_of,
        span: s.span,
        qkv: s.qkv,
        gates: s.gates,
        tokens,
        spans,
        slots,
        k_heads,
        v_heads,
        head_dim,
    });
    dev.run(ConvState { p: s.p, span: s.span, conv, tokens, spans, slots, channels, width });

    let (qkv, gates, o) = (s.qkv, s.gates, s.o);
    let (short, long) = (step.short, step.spans - step.short);
    if short > 0 {
        let (span, spans) = (s.span, short);
        let state = delta;
        dev.run(DeltaStep {
            qkv,
            gates,
            span,
            state,
            o,
            tokens,
            spans,
            slots,
            k_heads,
            v_heads,
            head_dim,
        });
    }
    if long > 0 {
        let (span, spans) = (s.span.slice(16 * u64::from(short), 16 * u64::from(long)), long);
        let state = delta;
        dev.run(DeltaChunk {
            qkv,
            gates,
            span,
            state,
            o,
            tokens,
            spans,
            slots,
            k_heads,
            v_heads,
            head_dim,
        });
    }
    let (heads, z_at, eps) = (v_heads, channels, c.eps);
    dev.run(GatedNorm { o, p: s.p, w: m.norm, tokens, heads, head_dim, width, z_at, eps });
    linear(dev, m.output, s.o, s.d, tokens, dim, inner);
}

/// Gated attention: d = out( attend(rope(norm(q)), rope(norm(k)), v) * sigmoid(gate) ).
#[allow(clippy::too_many_arguments)] // the layer's weights, its state, and the step
fn gated_attention(
    dev: &mut dyn Device,
    c: &Config,
    m: &Attention,
    state: &State,
    k_cache: View,
    v_cache: View,
    s: &Scratch,
    step: Step,
) {
    let (tokens, spans, dim, eps) = (step.tokens, step.spans, c.dim as u32, c.eps);
    let (q_heads, kv_heads) = (c.q_heads as u32, c.kv_heads as u32);
    let (head_dim, rotary) = (c.head_dim as u32, c.rotary_dim as u32);
    let width = (2 * q_heads + 2 * kv_heads) * head_dim; // per query head q, gate | k | v
    let (slots, max_blocks) = (state.slots as u32, state.max_blocks as u32);
    let (kv_blocks, kv_bytes) = (state.kv_blocks as u32, state.kv.bytes() as u32);
    let (span_of, span, blocks) = (s.span_of, s.span, state.blocks);

    linear(dev, m.input, s.y, s.p, tokens, width, dim);
    dev.run(QkRope {
        p: s.p,
        q_norm: m.q_norm,
        k_norm: m.k_norm,
        rope: state.rope,
        span_of,
        span,
        blocks,
        k_cache,
        v_cache,
        tokens,
        spans,
        slots,
        max_blocks,
        kv_blocks,
        positions: state.positions as u32,
        q_heads,
        kv_heads,
        head_dim,
        rotary,
        kv_bytes,
        eps,
    });
    dev.run(Attend {
        p: s.p,
        k_cache,
        v_cache,
        span_of,
        span,
        blocks,
        o: s.o,
        tokens,
        spans,
        slots,
        max_blocks,
        kv_blocks,
        context: step.context,
        longest: step.longest,
        q_heads,
        kv_heads,
        head_dim,
        kv_bytes,
    });
    linear(dev, m.output, s.o, s.d, tokens, dim, q_heads * head_dim);
}

/// Mixture of experts: d = sum over the chosen of share * down( silu(gate(y)) * up(y) ); the
/// shared expert is always chosen, and its share is sigmoid of a gate of its own.
fn mixture_of_experts(dev: &mut dyn Device, c: &Config, m: &Moe, s: &Scratch, step: Step) {
    let (tokens, dim, hidden) = (step.tokens, c.dim as u32, c.expert_hidden as u32);
    let (experts, top) = (c.experts as u32, c.experts_per_token as u32);

    dev.run(LinearQ8 { w: m.router, x: s.y, y: s.router, tokens, rows: experts + 1, cols: dim });
    let (ids, weights, h) = (s.chosen, s.shares, s.h);
    dev.run(Route { logits: s.router, ids, weights, tokens, experts, top });
    dev.run(ExpertUp { w: m.up, x: s.y, ids, h, tokens, experts, top, hidden, dim });
    let w = m.down;
    dev.run(ExpertDown { w, h, ids, weights, y: s.d, tokens, experts, top, hidden, dim });
}

/// y = W x, W in 4 bit.
fn linear(dev: &mut dyn Device, w: View, x: View, y: View, tokens: u32, rows: u32, cols: u32) {
    dev.run(LinearQ4 { w, x, y, tokens, rows, cols });
}
