//! Where other implementations of this model went wrong, and the same mistakes made here: the
//! list that `cargo xtask mutate` works through.
//!
//! Names such as `mlx-lm #1442` are issues on GitHub. A line to damage is given as text that
//! stands in its file once; whoever changes the line changes it here.

use std::fmt;

/// One thing that goes wrong in practice.
pub struct Pitfall {
    /// Its place in the list.
    pub number: u8,
    /// What goes wrong, and where it did.
    pub what: &'static str,
    /// How it is tested here.
    pub shown: Shown,
}

/// How the tests are tested for a pitfall.
pub enum Shown {
    /// Each of these turns a test red.
    By(&'static [Mutation]),
    /// This engine cannot commit it, for a reason.
    Never(&'static str),
}

/// One damaged line.
pub struct Mutation {
    /// What is done, in short.
    pub name: &'static str,
    /// The damaged file.
    pub file: &'static str,
    /// Text that stands in it once,
    pub find: &'static str,
    /// and what takes its place.
    pub replace: &'static str,
    /// The test that must fail.
    pub test: Test,
}

/// A quick test: those of one target whose name contains `filter`.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub struct Test {
    /// The crate.
    pub package: &'static str,
    /// `--lib`, or `--test` and its name.
    pub target: &'static [&'static str],
    /// Part of the names.
    pub filter: &'static str,
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {} {}", self.package, self.target.join(" "), self.filter)
    }
}

/// An operation of the table against the reference.
const fn operation(filter: &'static str) -> Test {
    Test { package: "lily-device", target: &["--test", "golden"], filter }
}

/// A row of the table against its formula, at sizes and values of its own.
const fn row(filter: &'static str) -> Test {
    Test { package: "lily-device", target: &["--test", "cpu"], filter }
}

/// The whole model against the reference or its own laws.
const fn model(filter: &'static str) -> Test {
    Test { package: "lily-model", target: &["--test", "model"], filter }
}

const LOGITS: Test = model("logits_are_those_of_the_reference");

/// The engine over a made-up model.
const fn engine(filter: &'static str) -> Test {
    Test { package: "lily-engine", target: &["--test", "engine"], filter }
}

const SCALAR: &str = "crates/device/src/cpu/scalar.rs";
const FORWARD: &str = "crates/model/src/forward.rs";
const MODEL: &str = "crates/model/src/lib.rs";
const PACK: &str = "crates/model/src/pack.rs";
const STATE: &str = "crates/model/src/state.rs";
const ENGINE: &str = "crates/engine/src/engine.rs";

/// The rotation of a pair, where it stands in the scalar device.
const TURN: &str = "let (a, b) = (normed(x[j], w[j]), normed(x[m], w[m]));
                let (cos, sin) = (f64::from(cos[j]), f64::from(sin[j]));
                x[j] = (a * cos - b * sin) as f32;
                x[m] = (b * cos + a * sin) as f32;";

/// All of them.
pub const ALL: &[Pitfall] = &[
    Pitfall {
        number: 1,
        what: "1 is added to norm weights that hold it already (mlx-lm #1442, #1623, mlx-vlm #1548)",
        shown: Shown::By(&[
            Mutation {
                name: "norm weights get another 1",
                file: SCALAR,
                find: "*y = (f64::from(x) * scale * f64::from(w)) as f32;",
                replace: "*y = (f64::from(x) * scale * (1.0 + f64::from(w))) as f32;",
                test: operation("rms_norm"),
            },
            Mutation {
                name: "the delta net's norm weights get a 1",
                file: SCALAR,
                find: "scale * f64::from(w) * silu(f64::from(z))",
                replace: "scale * (1.0 + f64::from(w)) * silu(f64::from(z))",
                test: operation("gated_norm"),
            },
            Mutation {
                name: "query and key norm weights get another 1",
                file: SCALAR,
                find: "|x: f32, w: f32| f64::from(x) * scale * f64::from(w);",
                replace: "|x: f32, w: f32| f64::from(x) * scale * (1.0 + f64::from(w));",
                test: operation("qk_rope"),
            },
            Mutation {
                name: "epsilon is added to the root, not the mean",
                file: SCALAR,
                find: "1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()",
                replace: "1.0 / ((dot(x, x) / x.len() as f64).sqrt() + f64::from(eps))",
                test: LOGITS,
            },
            Mutation {
                name: "epsilon is 1e-5",
                file: SCALAR,
                find: "1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()",
                replace: "1.0 / (dot(x, x) / x.len() as f64 + 1e-5).sqrt()",
                test: LOGITS,
            },
        ]),
    },
    Pitfall {
        number: 2,
        what: "the file is taken for one in Hugging Face's layout (llama.cpp #23758)",
        shown: Shown::By(&[
            Mutation {
                name: "convolution weights are (tap, channel)",
                file: SCALAR,
                find: "i.w[channel * taps + tap]",
                replace: "i.w[tap * channels + channel]",
                test: operation("delta_conv"),
            },
            Mutation {
                name: "tap 0 multiplies the current token",
                file: SCALAR,
                find: "i.w[channel * taps + tap]",
                replace: "i.w[channel * taps + taps - 1 - tap]",
                test: operation("delta_conv"),
            },
            Mutation {
                name: "up stands over gate",
                file: PACK,
                find: "up.push((format!(\"{from}.switch_mlp.gate_proj\"), e * hidden, hidden));\n            up.push((format!(\"{from}.switch_mlp.up_proj\"), e * hidden, hidden));",
                replace: "up.push((format!(\"{from}.switch_mlp.up_proj\"), e * hidden, hidden));\n            up.push((format!(\"{from}.switch_mlp.gate_proj\"), e * hidden, hidden));",
                test: LOGITS,
            },
            Mutation {
                name: "a is read as b",
                file: PACK,
                find: "(format!(\"{from}.in_proj_b\"), 0, c.delta_v_heads),\n                (format!(\"{from}.in_proj_a\"), 0, c.delta_v_heads),",
                replace: "(format!(\"{from}.in_proj_a\"), 0, c.delta_v_heads),\n                (format!(\"{from}.in_proj_b\"), 0, c.delta_v_heads),",
                test: LOGITS,
            },
        ]),
    },
    Pitfall {
        number: 3,
        what: "the router is read as 4 bit, like the rest",
        shown: Shown::By(&[
            Mutation {
                name: "the router is multiplied as 4 bit",
                file: FORWARD,
                find: "dev.run(LinearQ8 {",
                replace: "dev.run(LinearQ4 {",
                test: LOGITS,
            },
            Mutation {
                name: "the high half of a byte is the even element",
                file: SCALAR,
                find: "[code & 15, code >> 4]",
                replace: "[code >> 4, code & 15]",
                test: operation("linear_q4"),
            },
            Mutation {
                name: "biases are left out",
                file: SCALAR,
                find: "|q| scale * f32::from(q) + bias",
                replace: "|q| scale * f32::from(q) + bias * 0.0",
                test: operation("linear_q4"),
            },
        ]),
    },
    Pitfall {
        number: 4,
        what: "text_config's one eos_token_id is taken for all ids that end a reply",
        shown: Shown::By(&[
            Mutation {
                name: "stop ids come from text_config",
                file: "crates/checkpoint/src/config.rs",
                find: "match (given(top), given(text)) {",
                replace: "match (given(text), given(top)) {",
                test: Test { package: "lily-checkpoint", target: &["--lib"], filter: "stop_ids" },
            },
            Mutation {
                name: "only the first stop id ends a reply",
                file: ENGINE,
                find: "if self.request.stop_ids.contains(&id) {",
                replace: "if self.request.stop_ids.first() == Some(&id) {",
                test: engine("it_ends_at_any_stop_id"),
            },
        ]),
    },
    Pitfall {
        number: 5,
        what: "experts are built as one dense MLP (mlx-vlm #1073); tensors are read as if aligned",
        shown: Shown::By(&[
            Mutation {
                name: "every token goes to expert 0",
                file: SCALAR,
                find: "ids[i] = best.expect(\"top <= experts\") as u32;",
                replace: "ids[i] = (best.expect(\"top <= experts\") * 0) as u32;",
                test: operation("route"),
            },
            Mutation {
                name: "the shared expert is left out",
                file: SCALAR,
                find: "for n in t * chosen..(t + 1) * chosen {",
                replace: "for n in t * chosen..(t + 1) * chosen - 1 {",
                test: operation("expert_down"),
            },
            Mutation {
                name: "the shared expert has no gate",
                file: SCALAR,
                find: "weights[top] = sigmoid(f64::from(logits[experts])) as f32;",
                replace: "weights[top] = 1.0;",
                test: operation("route"),
            },
            Mutation {
                name: "experts are read without their number",
                file: PACK,
                find: "(format!(\"{from}.switch_mlp.gate_proj\"), e * hidden, hidden)",
                replace: "(format!(\"{from}.switch_mlp.gate_proj\"), 0 * e, hidden)",
                test: LOGITS,
            },
        ]),
    },
    Pitfall {
        number: 6,
        what: "queries and gates are split as two halves instead of head by head (llmman #16)",
        shown: Shown::By(&[
            Mutation {
                name: "gates stand behind all queries",
                file: SCALAR,
                find: "let (q, gate) = i.p[t * width + 2 * h * d..][..2 * d].split_at(d);",
                replace: "let q = &i.p[t * width + h * d..][..d]; let gate = &i.p[t * width + (q_heads + h) * d..][..d];",
                test: operation("attend"),
            },
            Mutation {
                name: "the attention gate is SiLU",
                file: SCALAR,
                find: "(sum / total * sigmoid(f64::from(gate)))",
                replace: "(sum / total * silu(f64::from(gate)))",
                test: operation("attend"),
            },
            Mutation {
                name: "scores are not scaled",
                file: SCALAR,
                find: "products.sum::<f64>() / (d as f64).sqrt()",
                replace: "products.sum::<f64>()",
                test: operation("attend"),
            },
            Mutation {
                name: "a token does not attend to itself",
                file: SCALAR,
                find: "let context = span.position + t - span.first + 1;",
                replace: "let context = (span.position + t - span.first).max(1);",
                test: operation("attend"),
            },
        ]),
    },
    Pitfall {
        number: 7,
        what: "rotary positions turn all of a head, or neighbours instead of halves, or before the norm",
        shown: Shown::By(&[
            Mutation {
                name: "neighbours are turned",
                file: SCALAR,
                find: TURN,
                replace: "let (j, m, f) = (2 * j, 2 * j + 1, j + m - m);
                let (a, b) = (normed(x[j], w[j]), normed(x[m], w[m]));
                let (cos, sin) = (f64::from(cos[f]), f64::from(sin[f]));
                x[j] = (a * cos - b * sin) as f32;
                x[m] = (b * cos + a * sin) as f32;",
                test: operation("qk_rope"),
            },
            Mutation {
                name: "all of a head is turned",
                file: FORWARD,
                find: "let (head_dim, rotary) = (c.head_dim as u32, c.rotary_dim as u32);",
                replace: "let (head_dim, rotary) = (c.head_dim as u32, 2 * c.rotary_dim as u32);",
                test: LOGITS,
            },
            Mutation {
                name: "a head turns the other way",
                file: SCALAR,
                find: "x[j] = (a * cos - b * sin) as f32;
                x[m] = (b * cos + a * sin) as f32;",
                replace: "x[j] = (a * cos + b * sin) as f32;
                x[m] = (b * cos - a * sin) as f32;",
                test: operation("qk_rope"),
            },
            Mutation {
                name: "norm weights after the turn",
                file: SCALAR,
                find: TURN,
                replace: "let (a, b) = (f64::from(x[j]) * scale, f64::from(x[m]) * scale);
                let (cos, sin) = (f64::from(cos[j]), f64::from(sin[j]));
                x[j] = ((a * cos - b * sin) * f64::from(w[j])) as f32;
                x[m] = ((b * cos + a * sin) * f64::from(w[m])) as f32;",
                test: operation("qk_rope"),
            },
            Mutation {
                name: "keys take the queries' norm weights",
                file: SCALAR,
                find: "norm_and_rotate(k, i.k_norm);",
                replace: "norm_and_rotate(k, i.q_norm);",
                test: operation("qk_rope"),
            },
            Mutation {
                name: "theta is 1,000,000",
                file: STATE,
                find: "c.rope_theta.powf(",
                replace: "1e6f64.powf(",
                test: LOGITS,
            },
        ]),
    },
    Pitfall {
        number: 8,
        what: "keys are normed by their mean, queries lack their scale (1bit-MONSTER #2134, mlx-lm #1798), shares are not renormalised",
        shown: Shown::By(&[
            Mutation {
                name: "keys are normed by their mean square",
                file: SCALAR,
                find: "1.0 / (dot(c, c) + 1e-6).sqrt()",
                replace: "1.0 / (dot(c, c) / head_dim as f64 + 1e-6).sqrt()",
                test: operation("delta_conv"),
            },
            Mutation {
                name: "epsilon is added to the mean",
                file: SCALAR,
                find: "1.0 / (dot(c, c) + 1e-6).sqrt()",
                replace: "1.0 / (dot(c, c) + 1e-6 * head_dim as f64).sqrt()",
                test: operation("delta_conv"),
            },
            Mutation {
                name: "queries lack their scale",
                file: SCALAR,
                find: "scale /= (head_dim as f64).sqrt();",
                replace: "scale *= 1.0;",
                test: operation("delta_conv"),
            },
            Mutation {
                name: "shares of experts are not renormalised",
                file: SCALAR,
                find: "let total: f64 = (0..top).map(|i| (chosen(i) - chosen(0)).exp()).sum();",
                replace: "let total: f64 = logits[..experts].iter().map(|&l| (f64::from(l) - chosen(0)).exp()).sum();",
                test: operation("route"),
            },
            Mutation {
                name: "softplus is a plain exponential",
                file: SCALAR,
                find: "x.max(0.0) + (-x.abs()).exp().ln_1p()",
                replace: "x.exp()",
                test: operation("delta_conv"),
            },
            Mutation {
                name: "A is not exponentiated",
                file: SCALAR,
                find: "(-f64::from(i.a_log[j]).exp() * dt)",
                replace: "(-f64::from(i.a_log[j]).abs() * dt)",
                test: operation("delta_conv"),
            },
            Mutation {
                name: "the gate of the norm is a sigmoid",
                file: SCALAR,
                find: "f64::from(w) * silu(f64::from(z))",
                replace: "f64::from(w) * sigmoid(f64::from(z))",
                test: operation("gated_norm"),
            },
            Mutation {
                name: "z gates before the norm",
                file: SCALAR,
                find: "            let scale = inverse_rms(o, op.eps);
            for ((o, &w), &z) in o.iter_mut().zip(w).zip(z) {
                *o = (f64::from(*o) * scale * f64::from(w) * silu(f64::from(z))) as f32;
            }",
                replace: "            for (o, &z) in o.iter_mut().zip(z) {
                *o = (f64::from(*o) * silu(f64::from(z))) as f32;
            }
            let scale = inverse_rms(o, op.eps);
            for (o, &w) in o.iter_mut().zip(w) {
                *o = (f64::from(*o) * scale * f64::from(w)) as f32;
            }",
                test: operation("gated_norm"),
            },
        ]),
    },
    Pitfall {
        number: 9,
        what: "no SiLU after the convolution, or activated values in its state, or a wrong window in short steps",
        shown: Shown::By(&[
            Mutation {
                name: "no SiLU after the convolution",
                file: SCALAR,
                find: "*out = silu(sum) as f32;",
                replace: "*out = sum as f32;",
                test: operation("delta_conv"),
            },
            Mutation {
                name: "the convolution's state is activated",
                file: SCALAR,
                find: "conv[row * channels..][..channels].copy_from_slice(p);",
                replace: "for (c, &p) in conv[row * channels..][..channels].iter_mut().zip(p) { *c = silu(f64::from(p)) as f32; }",
                test: operation("conv_state"),
            },
            Mutation {
                name: "short steps do not move the window",
                file: SCALAR,
                find: "conv.copy_within(from * channels..(from + 1) * channels, row * channels);",
                replace: "let _ = from;",
                test: operation("conv_state"),
            },
            Mutation {
                name: "the window ends one token early",
                file: SCALAR,
                find: "let p = &p[(span.first + from - kept) * width..][..channels];",
                replace: "let p = &p[(span.first + (from - kept).max(1) - 1) * width..][..channels];",
                test: operation("conv_state"),
            },
        ]),
    },
    Pitfall {
        number: 10,
        what: "heads are repeated in turn, not side by side",
        shown: Shown::By(&[
            Mutation {
                name: "value heads take key heads in turn",
                file: SCALAR,
                find: "let key_head = j / (self.v_heads / self.k_heads);",
                replace: "let key_head = j % self.k_heads;",
                test: operation("delta_step"),
            },
            Mutation {
                name: "query heads take key heads in turn",
                file: SCALAR,
                find: "let kv_head = h / (q_heads / kv_heads);",
                replace: "let kv_head = h % kv_heads;",
                test: operation("attend"),
            },
        ]),
    },
    Pitfall {
        number: 11,
        what: "the delta state or beta is rounded to 16 bits (ollama #15865, TensorRT-LLM #17415, sglang #38975)",
        shown: Shown::By(&[
            Mutation {
                name: "the delta state is bf16",
                file: SCALAR,
                find: "*s = (decay * f64::from(*s) + u * f64::from(k)) as f32;",
                replace: "*s = bf16::from_f64(decay * f64::from(*s) + u * f64::from(k)).to_f32();",
                test: operation("delta_step"),
            },
            Mutation {
                name: "beta is bf16",
                file: SCALAR,
                find: "beta[j] = sigmoid(f64::from(b[j])) as f32;",
                replace: "beta[j] = bf16::from_f64(sigmoid(f64::from(b[j]))).to_f32();",
                test: operation("delta_conv"),
            },
            Mutation {
                name: "the cache is cut to bf16, not rounded",
                file: SCALAR,
                find: "bf16::from_f32(x).to_bits()",
                replace: "(x.to_bits() >> 16) as u16",
                test: row("values_are_stored_as_bf16"),
            },
            Mutation {
                name: "the state is corrected before it decays",
                file: SCALAR,
                find: "(f64::from(v) - decay * dot(row, k))",
                replace: "(f64::from(v) - dot(row, k))",
                test: operation("delta_step"),
            },
            Mutation {
                name: "the state is read before it is corrected",
                file: SCALAR,
                find: "*o = dot(row, q) as f32;",
                replace: "*o = (dot(row, q) - u * dot(k, q)) as f32;",
                test: operation("delta_step"),
            },
        ]),
    },
    Pitfall {
        number: 12,
        what: "the chunked form takes exp of a sum of decays: NaN (executorch #21417, llama.cpp #23606)",
        shown: Shown::By(&[
            Mutation {
                name: "exp of a difference as a quotient",
                file: SCALAR,
                find: "let a = beta * dot(k, vectors(m)[1]) * (c[i] - c[m]).exp();",
                replace: "let a = beta * dot(k, vectors(m)[1]) * (c[i].exp() / c[m].exp());",
                test: row("delta_chunk_at_extreme_decay"),
            },
            Mutation {
                name: "the chunk forgets decay between its tokens",
                file: SCALAR,
                find: "let a = dot(q, vectors(m)[1]) * (c[i] - c[m]).exp();",
                replace: "let a = dot(q, vectors(m)[1]);",
                test: operation("delta_chunk"),
            },
            Mutation {
                name: "a token of a chunk does not read itself",
                file: SCALAR,
                find: "for (m, u_m) in u[..(i + 1) * d].chunks_exact(d).enumerate() {",
                replace: "for (m, u_m) in u[..i * d].chunks_exact(d).enumerate() {",
                test: operation("delta_chunk"),
            },
        ]),
    },
    Pitfall {
        number: 13,
        what: "state is lost where a prompt is cut, or a few tokens behind (vLLM #55766)",
        shown: Shown::By(&[
            Mutation {
                name: "a chunk starts from nothing",
                file: SCALAR,
                find: "*sum = last.exp() * f64::from(s);",
                replace: "*sum = 0.0 * f64::from(s);",
                test: model("a_prompt_may_be_cut_anywhere"),
            },
            Mutation {
                name: "the convolution's state is not kept",
                file: FORWARD,
                find: "dev.run(ConvState { p: s.p, span: s.span, conv, tokens, spans, slots, channels, width });",
                replace: "let _ = channels;",
                test: model("a_prompt_may_be_cut_anywhere"),
            },
            Mutation {
                name: "decay restarts in every chunk but the first",
                file: SCALAR,
                find: "let n = CHUNK.min(span.rows - start);",
                replace: "let n = CHUNK.min(span.rows - start); if start > 0 { state.fill(0.0); }",
                test: model("a_prompt_may_be_cut_anywhere"),
            },
        ]),
    },
    Pitfall {
        number: 14,
        what: "the projections of the gates are quantised (llama.cpp-tq3 #75)",
        shown: Shown::Never(
            "the checkpoint holds them in 4 bit; gates are computed in f32 from there, which 11 tests",
        ),
    },
    Pitfall {
        number: 15,
        what: "a slot's state leaks into the next request (llama.cpp #29092, ik_llama #1383)",
        shown: Shown::By(&[
            Mutation {
                name: "a reset keeps the delta state",
                file: STATE,
                find: "LayerState::Delta { conv, delta } => vec![part(conv), part(delta)],",
                replace: "LayerState::Delta { conv, .. } => vec![part(conv)],",
                test: model("a_reset_slot_remembers_nothing"),
            },
            Mutation {
                name: "a reset keeps the convolution's state",
                file: STATE,
                find: "LayerState::Delta { conv, delta } => vec![part(conv), part(delta)],",
                replace: "LayerState::Delta { delta, .. } => vec![part(delta)],",
                test: model("a_reset_slot_remembers_nothing"),
            },
            Mutation {
                name: "a reset clears another slot",
                file: STATE,
                find: "view.slice(slot as u64 * bytes, bytes)",
                replace: "view.slice((slot as u64 + 1) % self.slots as u64 * bytes, bytes)",
                test: model("a_reset"),
            },
            Mutation {
                name: "the engine does not reset a slot",
                file: ENGINE,
                find: "self.model.reset(slot);",
                replace: "let _ = slot;",
                test: engine("many_at_once_say_what_each_says_alone"),
            },
        ]),
    },
    Pitfall {
        number: 16,
        what: "the delta state is rewound by cutting the sequence (mlx-lm #1162, vLLM #43559)",
        shown: Shown::Never(
            "a sequence can only grow or start anew: nothing rewinds it, and no prefix is kept",
        ),
    },
    Pitfall {
        number: 17,
        what: "sequences of a batch that differ in length get each other's positions (mlx-lm #1024, ik_llama #1288)",
        shown: Shown::By(&[
            Mutation {
                name: "positions count the rows of the batch",
                file: SCALAR,
                find: "let pos = span.position + t - span.first;",
                replace: "let pos = span.position + t;",
                test: operation("qk_rope"),
            },
            Mutation {
                name: "all sequences advance by the longest",
                file: MODEL,
                find: "self.positions[span.slot] += span.ids.len();",
                replace: "self.positions[span.slot] += spans.iter().map(|s| s.ids.len()).max().unwrap_or(0);",
                test: model("a_batch_gives"),
            },
            Mutation {
                name: "a sequence convolves its neighbour's tokens",
                file: SCALAR,
                find: "let row = t - span.first + tap;",
                replace: "let row = t + tap;",
                test: model("a_batch_gives"),
            },
            Mutation {
                name: "rows are asked for in the order they run",
                file: MODEL,
                find: "first_row[i] = ids.len();",
                replace: "first_row[n] = ids.len();",
                test: model("a_batch_gives"),
            },
        ]),
    },
    Pitfall {
        number: 18,
        what: "rejected drafts are rolled back in scratch caches (rMLX #436, mlx-vlm #1188)",
        shown: Shown::Never("there is no speculative decoding"),
    },
    Pitfall {
        number: 19,
        what: "the MTP head reads the hidden state before the last norm",
        shown: Shown::Never("the checkpoint holds no MTP head"),
    },
];
