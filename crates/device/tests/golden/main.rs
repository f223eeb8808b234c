//! Every operation on every device, against what `reference/model.py` makes of the same operands.
//!
//! The vectors are those of `reference/golden/operations.safetensors`: two tokens at positions 6
//! and 7 of a sequence, in layer 0 (delta net) and layer 1 (attention) of the random model beside
//! it. So that no row, span or slot can be taken for another, they run as rows 1 and 2 of a
//! batch, as span 1, in slot 2 of 3; row 0 belongs to another sequence in slot 0, and slot 1 is
//! idle. The states of idle slots must keep the value that was put there.

mod bench;
mod vectors;

use bench::*;
use lily_device::View;
use lily_device::ops::*;
use vectors::*;

// The sizes of the random model.
const DIM: u32 = 64;
const K_HEADS: u32 = 2;
const V_HEADS: u32 = 6;
const DELTA_DIM: u32 = 32;
const CHANNELS: u32 = (2 * K_HEADS + V_HEADS) * DELTA_DIM;
const INNER: u32 = V_HEADS * DELTA_DIM;
const DELTA_WIDTH: u32 = CHANNELS + INNER + 2 * V_HEADS;
const Q_HEADS: u32 = 6;
const KV_HEADS: u32 = 2;
const HEAD_DIM: u32 = 32;
const ROTARY: u32 = 8;
const WIDTH: u32 = (2 * Q_HEADS + 2 * KV_HEADS) * HEAD_DIM;
const TOP: u32 = 2;
const HIDDEN: u32 = 128;
const VOCAB: u32 = 96;
const EPS: f32 = 1e-6;

#[test]
fn embed() {
    for mut b in benches() {
        let ids = u32s(&bytes(&LOGITS, "ids"));
        let ids = b.words(&[&[5], &ids[PAST as usize..][..TOKENS as usize]].concat());
        let table = b.adopt(matrix(&["embed_tokens"]));
        let x = b.room(ROWS * DIM);
        b.run(Embed { ids, table, x, tokens: ROWS, vocab: VOCAB, dim: DIM });
        b.check_rows("x", x, &golden("embed.x"));
    }
}

#[test]
fn rms_norm() {
    for mut b in benches() {
        let x = b.rows(&golden("embed.x"));
        let w = b.floats(&weight("layers.0.input_layernorm.weight"));
        let y = b.room(ROWS * DIM);
        b.run(RmsNorm { x, w, y, tokens: ROWS, dim: DIM, eps: EPS });
        b.check_rows("y", y, &golden("layers.0.rms_norm.y"));
    }
}

#[test]
fn add_rms_norm() {
    for mut b in benches() {
        let x = b.rows(&golden("embed.x"));
        let d = b.rows(&golden("layers.0.linear_q4.d"));
        let w = b.floats(&weight("layers.0.post_attention_layernorm.weight"));
        let y = b.room(ROWS * DIM);
        b.run(AddRmsNorm { x, d, w, y, tokens: ROWS, dim: DIM, eps: EPS });
        b.check_rows("x", x, &golden("layers.0.add_rms_norm.x"));
        b.check_rows("y", y, &golden("layers.0.add_rms_norm.y"));
    }
}

#[test]
fn output_norm() {
    for mut b in benches() {
        // The last rows first, and one of them twice: rows come in the order asked for.
        let x = b.rows(&golden("layers.0.add_rms_norm.x"));
        let d = b.rows(&golden("layers.0.expert_down.y"));
        let w = b.floats(&weight("layers.1.input_layernorm.weight"));
        let rows = b.words(&[2, 1, 2]);
        let y = b.room(3 * DIM);
        b.run(OutputNorm { x, d, rows, w, y, tokens: ROWS, outputs: 3, dim: DIM, eps: EPS });
        let want = golden("layers.1.rms_norm.y");
        let (first, second) = want.split_at(DIM as usize);
        let got = f32s(&b.get(y));
        b.close("y", &got, &[second, first, second].concat(), b.tolerance);
    }
}

fn linear_q4_case(names: &[&str], x: &str, y: &str, rows: u32, cols: u32) {
    for mut b in benches() {
        let w = b.adopt(matrix(names));
        let x = b.rows(&golden(x));
        let got = b.room(ROWS * rows);
        b.run(LinearQ4 { w, x, y: got, tokens: ROWS, rows, cols });
        b.check_rows(y, got, &golden(y));
    }
}

#[test]
fn linear_q4() {
    let input = ["qkv", "z", "b", "a"].map(|x| format!("layers.0.linear_attn.in_proj_{x}"));
    let input = input.each_ref().map(String::as_str);
    linear_q4_case(&input, "layers.0.rms_norm.y", "layers.0.linear_q4.p", DELTA_WIDTH, DIM);
    let output = ["layers.0.linear_attn.out_proj"];
    linear_q4_case(&output, "layers.0.gated_norm.o", "layers.0.linear_q4.d", DIM, INNER);
    let input = ["q", "k", "v"].map(|x| format!("layers.1.self_attn.{x}_proj"));
    let input = input.each_ref().map(String::as_str);
    linear_q4_case(&input, "layers.1.rms_norm.y", "layers.1.linear_q4.p", WIDTH, DIM);
    let output = ["layers.1.self_attn.o_proj"];
    let inner = Q_HEADS * HEAD_DIM;
    linear_q4_case(&output, "layers.1.attend.o", "layers.1.linear_q4.d", DIM, inner);
}

#[test]
fn linear_q8() {
    for mut b in benches() {
        let names = ["layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate"];
        let w = b.adopt(matrix(&names));
        let x = b.rows(&golden("layers.0.add_rms_norm.y"));
        let y = b.room(ROWS * (EXPERTS + 1));
        b.run(LinearQ8 { w, x, y, tokens: ROWS, rows: EXPERTS + 1, cols: DIM });
        b.check_rows("y", y, &golden("layers.0.linear_q8.logits"));
    }
}

#[test]
fn delta_conv() {
    for mut b in benches() {
        let p = b.rows(&golden("layers.0.linear_q4.p"));
        let w = b.floats(&weight("layers.0.linear_attn.conv1d.weight"));
        let a_log = b.floats(&weight("layers.0.linear_attn.A_log"));
        let dt_bias = b.floats(&weight("layers.0.linear_attn.dt_bias"));
        let conv = b.slots(&golden("layers.0.delta_conv.conv"));
        let (span_of, span) = (b.words(&SPAN_OF), b.words(&SPAN));
        let (qkv, gates) = (b.room(ROWS * CHANNELS), b.room(ROWS * 2 * V_HEADS));
        b.run(DeltaConv {
            p,
            w,
            a_log,
            dt_bias,
            conv,
            span_of,
            span,
            qkv,
            gates,
            tokens: ROWS,
            spans: SPANS,
            slots: SLOTS,
            k_heads: K_HEADS,
            v_heads: V_HEADS,
            head_dim: DELTA_DIM,
        });
        b.check_rows("qkv", qkv, &golden("layers.0.delta_conv.qkv"));
        b.check_rows("gates", gates, &golden("layers.0.delta_conv.gates"));
        b.check_slots("conv", conv, &golden("layers.0.delta_conv.conv"));
    }
}

#[test]
fn conv_state() {
    for mut b in benches() {
        let p = b.rows(&golden("layers.0.linear_q4.p"));
        let conv = b.slots(&golden("layers.0.delta_conv.conv"));
        let span = b.words(&SPAN);
        b.run(ConvState {
            p,
            span,
            conv,
            tokens: ROWS,
            spans: SPANS,
            slots: SLOTS,
            channels: CHANNELS,
            width: DELTA_WIDTH,
        });
        b.check_slots("conv", conv, &golden("layers.0.conv_state.conv"));
    }
}

/// The delta rule in either form: `op` builds it from qkv, gates, span, state and o.
fn delta_case(op: fn([View; 5]) -> Op) {
    for mut b in benches() {
        let qkv = b.rows(&golden("layers.0.delta_conv.qkv"));
        let gates = b.rows(&golden("layers.0.delta_conv.gates"));
        let state = b.slots(&golden("layers.0.delta_step.state_before"));
        let span = b.words(&SPAN);
        let o = b.room(ROWS * INNER);
        // A log decay and a beta that are possible, for the row of noise.
        let possible = [[-0.5f32; V_HEADS as usize], [0.5; V_HEADS as usize]];
        b.dev.write(
            gates,
            &possible.as_flattened().iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>(),
        );
        b.run(op([qkv, gates, span, state, o]));
        b.check_rows("o", o, &golden("layers.0.delta_step.o"));
        b.check_slots("state", state, &golden("layers.0.delta_step.state"));
    }
}

#[test]
fn delta_step() {
    delta_case(|[qkv, gates, span, state, o]| {
        Op::from(DeltaStep {
            qkv,
            gates,
            span,
            state,
            o,
            tokens: ROWS,
            spans: SPANS,
            slots: SLOTS,
            k_heads: K_HEADS,
            v_heads: V_HEADS,
            head_dim: DELTA_DIM,
        })
    });
}

#[test]
fn delta_chunk() {
    delta_case(|[qkv, gates, span, state, o]| {
        Op::from(DeltaChunk {
            qkv,
            gates,
            span,
            state,
            o,
            tokens: ROWS,
            spans: SPANS,
            slots: SLOTS,
            k_heads: K_HEADS,
            v_heads: V_HEADS,
            head_dim: DELTA_DIM,
        })
    });
}

#[test]
fn gated_norm() {
    for mut b in benches() {
        let o = b.rows(&golden("layers.0.delta_step.o"));
        let p = b.rows(&golden("layers.0.linear_q4.p"));
        let w = b.floats(&weight("layers.0.linear_attn.norm.weight"));
        b.run(GatedNorm {
            o,
            p,
            w,
            tokens: ROWS,
            heads: V_HEADS,
            head_dim: DELTA_DIM,
            width: DELTA_WIDTH,
            z_at: CHANNELS,
            eps: EPS,
        });
        b.check_rows("o", o, &golden("layers.0.gated_norm.o"));
    }
}

/// The KV cache of the tests: blocks lie in no order, and the golden slot's is the last.
const MAX_BLOCKS: u32 = 2;
const KV_BLOCKS: u32 = 5;
const BLOCKS: [u32; 6] = [1, 0, 2, 2, 4, 3];

/// The cache's elements: `golden` (position, kv head, element) in the golden slot, else `other`.
fn cache(golden: &[f32], positions: u32, other: f32) -> Vec<f32> {
    let block = (KV_HEADS * KV_BLOCK * HEAD_DIM) as usize;
    let mut all = vec![other; KV_BLOCKS as usize * block];
    for (i, x) in golden[..(positions * KV_HEADS * HEAD_DIM) as usize].iter().enumerate() {
        let (at, i) = (i as u32 % HEAD_DIM, i as u32 / HEAD_DIM);
        let (head, pos) = (i % KV_HEADS, i / KV_HEADS);
        let index = (head * KV_BLOCK + pos) * HEAD_DIM + at;
        all[BLOCKS[2 * SLOT] as usize * block + index as usize] = *x;
    }
    all
}

/// bf16 bits of a value that is one.
fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect()
}

/// The rows of projections with queries as `qk_rope` leaves them.
fn rotated() -> Vec<f32> {
    let mut p = golden("layers.1.linear_q4.p");
    let q = golden("layers.1.qk_rope.q");
    let d = HEAD_DIM as usize;
    for (p, q) in p.chunks_exact_mut(WIDTH as usize).zip(q.chunks_exact(Q_HEADS as usize * d)) {
        for (p, q) in p.chunks_exact_mut(2 * d).zip(q.chunks_exact(d)) {
            p[..d].copy_from_slice(q);
        }
    }
    p
}

#[test]
fn qk_rope() {
    let keys = golden("layers.1.qk_rope.k_cache");
    let values = golden("layers.1.qk_rope.v_cache");
    let rope: Vec<f32> = (0..PAST + TOKENS)
        .flat_map(|pos| {
            let angles = (0..ROTARY / 2)
                .map(move |j| f64::from(pos) * 1e7f64.powf(-f64::from(2 * j) / f64::from(ROTARY)));
            angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|x| x as f32)
        })
        .collect();
    let cases = [4, 2].map(|kv_bytes| benches().into_iter().map(move |b| (b, kv_bytes)));
    for (mut b, kv_bytes) in cases.into_iter().flatten() {
        let p = b.rows(&golden("layers.1.linear_q4.p"));
        let q_norm = b.floats(&weight("layers.1.self_attn.q_norm.weight"));
        let k_norm = b.floats(&weight("layers.1.self_attn.k_norm.weight"));
        let rope = b.floats(&rope);
        let (span_of, span) = (b.words(&SPAN_OF), b.words(&SPAN));
        let blocks = b.words(&BLOCKS);
        let caches = [&keys, &values].map(|golden| {
            let before = cache(golden, PAST, 7.5);
            if kv_bytes == 4 { b.floats(&before) } else { b.put(&bf16_bytes(&before)) }
        });
        b.run(QkRope {
            p,
            q_norm,
            k_norm,
            rope,
            span_of,
            span,
            blocks,
            k_cache: caches[0],
            v_cache: caches[1],
            tokens: ROWS,
            spans: SPANS,
            slots: SLOTS,
            max_blocks: MAX_BLOCKS,
            kv_blocks: KV_BLOCKS,
            positions: PAST + TOKENS,
            q_heads: Q_HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            rotary: ROTARY,
            kv_bytes,
            eps: EPS,
        });
        // Keys of p may be rotated in place or not; queries and gates are read again.
        let queries = (2 * Q_HEADS * HEAD_DIM) as usize;
        let got = f32s(&b.get(p));
        let rows = got.chunks_exact(WIDTH as usize).skip(1);
        for (got, want) in rows.zip(rotated().chunks_exact(WIDTH as usize)) {
            b.close("p", &got[..queries], &want[..queries], b.tolerance);
        }
        for (view, golden) in caches.into_iter().zip([&keys, &values]) {
            let data = b.get(view);
            let (got, tolerance) = if kv_bytes == 4 {
                (f32s(&data), b.tolerance)
            } else {
                let halves = data.as_chunks::<2>().0.iter();
                (halves.map(|x| half::bf16::from_le_bytes(*x).to_f32()).collect(), 0.5f32.powi(9))
            };
            // Slot 0 has its row of noise at position 0 of its first block.
            let block = (KV_HEADS * KV_BLOCK * HEAD_DIM) as usize;
            let skip = BLOCKS[0] as usize * block;
            let want = cache(golden, PAST + TOKENS, 7.5);
            for (i, (got, want)) in got.chunks(block).zip(want.chunks(block)).enumerate() {
                if i * block != skip {
                    b.close(&format!("block {i} of {kv_bytes} bytes"), got, want, tolerance);
                }
            }
        }
    }
}

#[test]
fn attend() {
    for mut b in benches() {
        let p = b.rows(&rotated());
        // Beyond the sequence the cache holds what must not be read.
        let k = cache(&golden("layers.1.qk_rope.k_cache"), PAST + TOKENS, f32::NAN);
        let v = cache(&golden("layers.1.qk_rope.v_cache"), PAST + TOKENS, f32::NAN);
        // The row of noise attends to itself alone.
        let [k, v] = [k, v].map(|mut cache| {
            let block = (KV_HEADS * KV_BLOCK * HEAD_DIM) as usize;
            for head in 0..KV_HEADS as usize {
                let at = BLOCKS[0] as usize * block + head * (KV_BLOCK * HEAD_DIM) as usize;
                cache[at..][..HEAD_DIM as usize].fill(0.25);
            }
            b.floats(&cache)
        });
        let (span_of, span) = (b.words(&SPAN_OF), b.words(&SPAN));
        let blocks = b.words(&BLOCKS);
        let o = b.room(ROWS * Q_HEADS * HEAD_DIM);
        b.run(Attend {
            p,
            k_cache: k,
            v_cache: v,
            span_of,
            span,
            blocks,
            o,
            tokens: ROWS,
            spans: SPANS,
            slots: SLOTS,
            max_blocks: MAX_BLOCKS,
            kv_blocks: KV_BLOCKS,
            context: PAST + TOKENS + 1,
            longest: PAST + TOKENS,
            q_heads: Q_HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            kv_bytes: 4,
        });
        b.check_rows("o", o, &golden("layers.1.attend.o"));
    }
}

#[test]
fn route() {
    for mut b in benches() {
        for layer in [0, 1] {
            let name = |x: &str| format!("layers.{layer}.{x}");
            let logits = b.rows(&golden(&name("linear_q8.logits")));
            let (ids, weights) = (b.words(&[99; 9]), b.room(ROWS * (TOP + 1)));
            b.run(Route { logits, ids, weights, tokens: ROWS, experts: EXPERTS, top: TOP });
            let got = u32s(&b.get(ids));
            assert_eq!(got[TOP as usize + 1..], golden_ids(&name("route.ids")), "{}", b.name);
            b.check_rows("weights", weights, &golden(&name("route.weights")));
        }
    }
}

/// Ids and shares of the batch: those of row 0 are possible ones.
fn chosen(b: &mut Bench, layer: usize) -> (View, View) {
    let ids = golden_ids(&format!("layers.{layer}.route.ids"));
    let ids = b.words(&[&[4, 0, EXPERTS], &ids[..]].concat());
    (ids, b.rows(&golden(&format!("layers.{layer}.route.weights"))))
}

#[test]
fn expert_up() {
    for mut b in benches() {
        for layer in [0, 1] {
            let w = b.adopt(experts(layer, &["gate_proj", "up_proj"]));
            let x = b.rows(&golden(&format!("layers.{layer}.add_rms_norm.y")));
            let (ids, _) = chosen(&mut b, layer);
            let h = b.room(ROWS * (TOP + 1) * HIDDEN);
            b.run(ExpertUp {
                w,
                x,
                ids,
                h,
                tokens: ROWS,
                experts: EXPERTS,
                top: TOP,
                hidden: HIDDEN,
                dim: DIM,
            });
            b.check_rows("h", h, &golden(&format!("layers.{layer}.expert_up.h")));
        }
    }
}

#[test]
fn expert_down() {
    for mut b in benches() {
        for layer in [0, 1] {
            let w = b.adopt(experts(layer, &["down_proj"]));
            let h = b.rows(&golden(&format!("layers.{layer}.expert_up.h")));
            let (ids, weights) = chosen(&mut b, layer);
            let y = b.room(ROWS * DIM);
            b.run(ExpertDown {
                w,
                h,
                ids,
                weights,
                y,
                tokens: ROWS,
                experts: EXPERTS,
                top: TOP,
                hidden: HIDDEN,
                dim: DIM,
            });
            b.check_rows("y", y, &golden(&format!("layers.{layer}.expert_down.y")));
        }
    }
}
