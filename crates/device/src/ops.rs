//! The table of operations: all that is known of a kernel outside the kernel.
//!
//! A row gives the maths, the scalars, and the operands with access, dtype and shape. From a row
//! follow the bounds check of every operand, the hazards between operations, and the bytes an
//! operation moves (for `bench`). Every device runs exactly these rows; the scalar CPU device
//! is their executable definition. The table knows no weights, no layers and no order: that is
//! the forward pass of the model crate.
//!
//! # Ragged batches
//!
//! One step computes `tokens` rows that belong to `spans` sequences. Rows of one sequence stand
//! together, in order of position. Two small arrays in device memory describe them, so that a
//! recorded step can be replayed with other positions:
//!
//! - `span_of` u32 (tokens): the span each row belongs to;
//! - `spans` u32 (spans, 4): first row, rows, slot, and the position of the first row in its
//!   sequence.
//!
//! A *slot* is the place of one sequence in the state arrays. Keys and values live in blocks of
//! [`KV_BLOCK`] positions; `blocks` u32 (slots, max_blocks) says which block holds which part of
//! a slot's context.

use crate::device::View;

/// Positions in one block of the KV cache.
pub const KV_BLOCK: u32 = 128;
/// Elements that share one scale and one bias in a quantised matrix.
pub const GROUP: u32 = 64;
/// Taps of the delta net's causal convolution; its state holds one row less.
pub const TAPS: u32 = 4;

/// Storage types of operands, and the bytes that `n` elements take.
#[allow(non_camel_case_types)]
pub mod dtype {
    macro_rules! dtypes { ($( $(#[doc = $doc:literal])* $name:ident: $bytes_per_64:literal, )*) => { $(
        $(#[doc = $doc])*
        pub enum $name {}
        impl $name {
            /// Bytes of `n` elements. For quantised types `n` is a multiple of 64.
            pub const fn bytes(n: u64) -> u64 { n * $bytes_per_64 / 64 }
        }
    )* } }
    dtypes! {
        /// IEEE single.
        f32: 256,
        /// Unsigned 32-bit integer.
        u32: 256,
        /// A byte: used where the element size is a scalar of the operation (the KV cache).
        u8: 64,
        /// Affine 4-bit matrix: first all nibbles (row-major, element 2n in the low half of byte
        /// n), then one (scale, bias) pair of bf16 for every 64 elements. w = scale * q + bias.
        q4: 36,
        /// Affine 8-bit matrix: first all bytes, then the (scale, bias) pairs as in `q4`.
        q8: 68,
    }
}

/// What an operation does with an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only reads it.
    Read,
    /// Writes all of it (or all it touches) without reading.
    Write,
    /// Reads and writes it.
    Update,
}

/// One operand of one operation, as a device and the tools see it.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Its name in the row.
    pub name: &'static str,
    /// What the operation does with it.
    pub access: Access,
    /// Where it lies.
    pub view: View,
    /// Bytes that must fit in the view.
    pub bytes: u64,
    /// Bytes the operation moves at most; less than `bytes` where it gathers.
    pub touched: u64,
}

macro_rules! touched {
    ([$($dim:expr),*]) => { 1 $(* ($dim as u64))* };
    ([$($dim:expr),*] [$($touch:expr),*]) => { 1 $(* ($touch as u64))* };
}

macro_rules! ops {
    ($( $(#[doc = $doc:literal])*
        $Op:ident $kernel:ident ($($arg:ident: $argty:ty),* $(,)?) {
            $( $access:ident $name:ident: $dtype:ident [$($dim:expr),*] $(touch [$($touch:expr),*])?; )*
        }
    )*) => {
        $( $(#[doc = $doc])*
           // The row documents operands and scalars by name, in formulas that index with brackets.
           #[allow(missing_docs, rustdoc::broken_intra_doc_links)]
           #[derive(Clone, Copy, Debug)]
           pub struct $Op { $(pub $name: View,)* $(pub $arg: $argty,)* }
           impl From<$Op> for Op { fn from(op: $Op) -> Op { Op::$Op(op) } } )*

        /// Any operation of the table.
        #[allow(missing_docs)] // one variant a row, named after it
        #[derive(Clone, Copy, Debug)]
        pub enum Op { $( $Op($Op), )* }

        impl Op {
            /// The names of all kernels, in the order of the table.
            pub const KERNELS: &[&str] = &[ $( stringify!($kernel) ),* ];

            /// The name of the kernel, of its file and of its test.
            pub fn kernel(&self) -> &'static str {
                match self { $( Op::$Op(_) => stringify!($kernel), )* }
            }

            /// Calls `each` with every operand, in the order of the row.
            pub fn operands(&self, mut each: impl FnMut(Operand)) {
                match *self { $( #[allow(unused_variables)] Op::$Op($Op { $($name,)* $($arg,)* }) => { $( each(Operand {
                    name: stringify!($name), access: Access::$access, view: $name,
                    bytes: dtype::$dtype::bytes(1 $(* ($dim as u64))*),
                    touched: dtype::$dtype::bytes(touched!([$($dim),*] $([$($touch),*])?)),
                }); )* } )* }
            }
        }
    };
}

ops! {
    /// x[t] = table[ids[t]]
    Embed embed (tokens: u32, vocab: u32, dim: u32) {
        Read ids: u32[tokens]; Read table: q4[vocab, dim] touch [tokens, dim];
        Write x: f32[tokens, dim];
    }

    /// y[t] = x[t] / rms(x[t]) * w,  rms(x) = sqrt(mean(x^2) + eps). The weights already hold 1 + w.
    RmsNorm rms_norm (tokens: u32, dim: u32, eps: f32) {
        Read x: f32[tokens, dim]; Read w: f32[dim]; Write y: f32[tokens, dim];
    }

    /// x[t] += d[t];  y[t] = x[t] / rms(x[t]) * w
    AddRmsNorm add_rms_norm (tokens: u32, dim: u32, eps: f32) {
        Update x: f32[tokens, dim]; Read d: f32[tokens, dim]; Read w: f32[dim];
        Write y: f32[tokens, dim];
    }

    /// y[i] = norm(x[r] + d[r]) * w,  r = rows[i]: the rows whose logits are wanted.
    OutputNorm output_norm (tokens: u32, outputs: u32, dim: u32, eps: f32) {
        Read x: f32[tokens, dim] touch [outputs, dim]; Read d: f32[tokens, dim] touch [outputs, dim];
        Read rows: u32[outputs]; Read w: f32[dim]; Write y: f32[outputs, dim];
    }

    /// y[t,r] = W[r] . x[t],  W in 4 bit. Several matrices that read the same x stand stacked in W.
    LinearQ4 linear_q4 (tokens: u32, rows: u32, cols: u32) {
        Read w: q4[rows, cols]; Read x: f32[tokens, cols]; Write y: f32[tokens, rows];
    }

    /// y[t,r] = W[r] . x[t],  W in 8 bit (the router).
    LinearQ8 linear_q8 (tokens: u32, rows: u32, cols: u32) {
        Read w: q8[rows, cols]; Read x: f32[tokens, cols]; Write y: f32[tokens, rows];
    }

    /// What the delta rule reads, from the projection p[t] = [q | k | v | z | b | a]:
    /// ```text
    /// c = silu(causal depthwise convolution of [q | k | v]; taps before the span come from `conv`)
    /// q = c_q / |c_q| / sqrt(head_dim),  k = c_k / |c_k|   per head, |c| = sqrt(sum(c^2) + 1e-6)
    /// g = -exp(a_log) softplus(a + dt_bias)                log decay, <= 0
    /// beta = sigmoid(b)
    /// ```
    /// Tap 3 multiplies the current token. qkv[t] = [q | k | v]; gates[t] = [g | beta].
    /// channels = (2 k_heads + v_heads) head_dim; width = channels + v_heads head_dim + 2 v_heads.
    DeltaConv delta_conv (tokens: u32, spans: u32, slots: u32, k_heads: u32, v_heads: u32, head_dim: u32) {
        Read p: f32[tokens, (2 * k_heads + 2 * v_heads) * head_dim + 2 * v_heads];
        Read w: f32[(2 * k_heads + v_heads) * head_dim, TAPS];
        Read a_log: f32[v_heads]; Read dt_bias: f32[v_heads];
        Read conv: f32[slots, TAPS - 1, (2 * k_heads + v_heads) * head_dim]
            touch [spans, TAPS - 1, (2 * k_heads + v_heads) * head_dim];
        Read span_of: u32[tokens]; Read span: u32[spans, 4];
        Write qkv: f32[tokens, (2 * k_heads + v_heads) * head_dim];
        Write gates: f32[tokens, 2 * v_heads];
    }

    /// conv[slot] = the last 3 rows of [conv[slot]; p of the span], the raw values before SiLU.
    ConvState conv_state (tokens: u32, spans: u32, slots: u32, channels: u32, width: u32) {
        Read p: f32[tokens, width] touch [spans, TAPS - 1, channels]; Read span: u32[spans, 4];
        Update conv: f32[slots, TAPS - 1, channels] touch [spans, TAPS - 1, channels];
    }

    /// The gated delta rule, one token after another, per value head j (key head j / (v_heads / k_heads)):
    /// ```text
    /// S <- exp(g) S;  u = beta (v - S k);  S <- S + u k^T;  o = S q
    /// ```
    /// state: row = value dim, column = key dim. `span` may be a part of the step's spans.
    DeltaStep delta_step (tokens: u32, spans: u32, slots: u32, k_heads: u32, v_heads: u32, head_dim: u32) {
        Read qkv: f32[tokens, (2 * k_heads + v_heads) * head_dim]; Read gates: f32[tokens, 2 * v_heads];
        Read span: u32[spans, 4];
        Update state: f32[slots, v_heads, head_dim, head_dim] touch [spans, v_heads, head_dim, head_dim];
        Write o: f32[tokens, v_heads * head_dim];
    }

    /// The same recurrence as `delta_step`, 64 tokens at a time as matrix products (the WY form):
    /// for long spans.
    DeltaChunk delta_chunk (tokens: u32, spans: u32, slots: u32, k_heads: u32, v_heads: u32, head_dim: u32) {
        Read qkv: f32[tokens, (2 * k_heads + v_heads) * head_dim]; Read gates: f32[tokens, 2 * v_heads];
        Read span: u32[spans, 4];
        Update state: f32[slots, v_heads, head_dim, head_dim] touch [spans, v_heads, head_dim, head_dim];
        Write o: f32[tokens, v_heads * head_dim];
    }

    /// o[t,h] = o[t,h] / rms(o[t,h]) * w * silu(z[t,h]),  z = p[t, z_at ..]: norm first, then gate.
    GatedNorm gated_norm (tokens: u32, heads: u32, head_dim: u32, width: u32, z_at: u32, eps: f32) {
        Update o: f32[tokens, heads * head_dim];
        Read p: f32[tokens, width] touch [tokens, heads * head_dim]; Read w: f32[head_dim];
    }

    /// From the projection p[t] = [per query head: q, gate | k | v]:
    /// ```text
    /// q, k <- norm(q) * q_norm, norm(k) * k_norm   per head
    /// rotate elements (j, j + rotary/2) of q and k by the angle of the row's position
    /// append k and v to the cache;  q stays in p, in place
    /// ```
    /// rope[pos] = rotary/2 cosines, then as many sines. Caches: (block, kv head, position in the
    /// block, head_dim), elements of kv_bytes: 2 = bf16 rounded to nearest even, 4 = f32.
    QkRope qk_rope (tokens: u32, spans: u32, slots: u32, max_blocks: u32, kv_blocks: u32, positions: u32,
                    q_heads: u32, kv_heads: u32, head_dim: u32, rotary: u32, kv_bytes: u32, eps: f32) {
        Update p: f32[tokens, (2 * q_heads + 2 * kv_heads) * head_dim];
        Read q_norm: f32[head_dim]; Read k_norm: f32[head_dim];
        Read rope: f32[positions, rotary] touch [tokens, rotary];
        Read span_of: u32[tokens]; Read span: u32[spans, 4]; Read blocks: u32[slots, max_blocks];
        Update k_cache: u8[kv_blocks, kv_heads, KV_BLOCK, head_dim, kv_bytes] touch [tokens, kv_heads, head_dim, kv_bytes];
        Update v_cache: u8[kv_blocks, kv_heads, KV_BLOCK, head_dim, kv_bytes] touch [tokens, kv_heads, head_dim, kv_bytes];
    }

    /// o[t,h] = softmax(q . k / sqrt(head_dim)) v * sigmoid(gate),  over the positions of the row's
    /// sequence up to its own. Query head h reads kv head h / (q_heads / kv_heads).
    /// context = positions the spans reach, summed; longest = the largest of them.
    Attend attend (tokens: u32, spans: u32, slots: u32, max_blocks: u32, kv_blocks: u32, context: u32, longest: u32,
                   q_heads: u32, kv_heads: u32, head_dim: u32, kv_bytes: u32) {
        Read p: f32[tokens, (2 * q_heads + 2 * kv_heads) * head_dim];
        Read k_cache: u8[kv_blocks, kv_heads, KV_BLOCK, head_dim, kv_bytes] touch [context, kv_heads, head_dim, kv_bytes];
        Read v_cache: u8[kv_blocks, kv_heads, KV_BLOCK, head_dim, kv_bytes] touch [context, kv_heads, head_dim, kv_bytes];
        Read span_of: u32[tokens]; Read span: u32[spans, 4]; Read blocks: u32[slots, max_blocks];
        Write o: f32[tokens, q_heads * head_dim];
    }

    /// Which experts, and how much of each. logits[t] = [experts | shared gate].
    /// ```text
    /// p = softmax(logits[t, ..experts]);  the `top` largest, ties to the lower id
    /// ids = those, then `experts`: the shared expert stands last among the experts' matrices
    /// weights = p / sum of the chosen p, then sigmoid(shared gate)
    /// ```
    Route route (tokens: u32, experts: u32, top: u32) {
        Read logits: f32[tokens, experts + 1];
        Write ids: u32[tokens, top + 1]; Write weights: f32[tokens, top + 1];
    }

    /// h[t,i] = silu(Wg[e] x[t]) * (Wu[e] x[t]),  e = ids[t,i]. W[e] stacks gate over up.
    ExpertUp expert_up (tokens: u32, experts: u32, top: u32, hidden: u32, dim: u32) {
        Read w: q4[experts + 1, 2 * hidden, dim] touch [experts.min(tokens.saturating_mul(top)) + 1, 2 * hidden, dim];
        Read x: f32[tokens, dim]; Read ids: u32[tokens, top + 1];
        Write h: f32[tokens, top + 1, hidden];
    }

    /// y[t] = sum over i of weights[t,i] Wd[e] h[t,i],  e = ids[t,i], in the order of i.
    ExpertDown expert_down (tokens: u32, experts: u32, top: u32, hidden: u32, dim: u32) {
        Read w: q4[experts + 1, dim, hidden] touch [experts.min(tokens.saturating_mul(top)) + 1, dim, hidden];
        Read h: f32[tokens, top + 1, hidden]; Read ids: u32[tokens, top + 1]; Read weights: f32[tokens, top + 1];
        Write y: f32[tokens, dim];
    }

    /// y = 0
    Zero zero (words: u32) {
        Write y: u32[words];
    }
}

impl Op {
    /// Bytes the operation moves at most: reads and writes, an update counted twice.
    pub fn bytes_moved(&self) -> u64 {
        let mut sum = 0;
        self.operands(|o| sum += o.touched * if o.access == Access::Update { 2 } else { 1 });
        sum
    }

    /// Panics unless every operand fits its view, is aligned to four bytes, and what the
    /// operation writes overlaps no other operand. Devices call this before they run an
    /// operation: it is what makes their pointers sound.
    pub fn check(&self) {
        const MOST: usize = 12;
        let mut seen: [Option<Operand>; MOST] = [None; MOST];
        let mut count = 0;
        self.operands(|o| {
            assert!(
                o.bytes <= o.view.bytes,
                "{}.{}: needs {} bytes, its view has {}",
                self.kernel(),
                o.name,
                o.bytes,
                o.view.bytes
            );
            assert!(o.view.offset % 4 == 0, "{}.{}: view not aligned", self.kernel(), o.name);
            for other in seen[..count].iter().flatten() {
                let overlap = other.view.buffer == o.view.buffer
                    && other.view.offset < o.view.offset + o.bytes
                    && o.view.offset < other.view.offset + other.bytes;
                assert!(
                    !overlap || (o.access == Access::Read && other.access == Access::Read),
                    "{}: operands {} and {} overlap",
                    self.kernel(),
                    other.name,
                    o.name
                );
            }
            seen[count] = Some(o);
            count += 1;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(buffer: u32, bytes: u64) -> View {
        View { buffer, offset: 0, bytes }
    }

    #[test]
    fn a_row_knows_its_bytes() {
        let op = LinearQ4 {
            w: view(0, 36 * 3),
            x: view(1, 256),
            y: view(2, 12),
            tokens: 1,
            rows: 3,
            cols: 64,
        };
        Op::from(op).check();
        assert_eq!(Op::from(op).bytes_moved(), 36 * 3 + 256 + 12);
    }

    #[test]
    #[should_panic(expected = "linear_q4.w: needs 108 bytes, its view has 107")]
    fn a_short_view_is_caught() {
        let op = LinearQ4 {
            w: view(0, 107),
            x: view(1, 256),
            y: view(2, 12),
            tokens: 1,
            rows: 3,
            cols: 64,
        };
        Op::from(op).check();
    }

    #[test]
    #[should_panic(expected = "operands x and y overlap")]
    fn an_overlapping_write_is_caught() {
        let op = LinearQ4 {
            w: view(0, 108),
            x: view(1, 256),
            y: view(1, 12),
            tokens: 1,
            rows: 3,
            cols: 64,
        };
        Op::from(op).check();
    }
}
