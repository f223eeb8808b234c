//! Where other implementations of this model went wrong, and the same mistakes made here: the
//! list that `cargo xtask mutate` works through.
//!
//! Names such as mlx-lm #1442 are issues on GitHub. A line to damage is given as text that stands
//! in its file once; whoever changes the line changes it here.

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

const DECAY: Test = row("delta_chunk_at_extreme_decay");

/// The whole model against the reference or its own laws.
const fn model(filter: &'static str) -> Test {
    Test { package: "lily-model", target: &["--test", "model"], filter }
}

const LOGITS: Test = model("logits_are_those_of_the_reference");

const BATCH: Test = model("a_batch_gives");
const RESET: Test = model("a_reset_slot_remembers_nothing");
const CUT: Test = model("a_prompt_may_be_cut_anywhere");

/// The engine over a made-up model.
const fn engine(filter: &'static str) -> Test {
    Test { package: "lily-engine", target: &["--test", "engine"], filter }
}

/// The reading of config.json.
const fn config(filter: &'static str) -> Test {
    Test { package: "lily-checkpoint", target: &["--test", "config"], filter }
}

/// Text and tokens.
const fn text(filter: &'static str) -> Test {
    Test { package: "lily-text", target: &["--lib"], filter }
}

const TOKENIZER: &str = "crates/text/src/tokenizer.rs";
const TOKENIZER_FILE: &str = "crates/text/src/tokenizer/file.rs";
const CHAT: &str = "crates/text/src/chat.rs";
const MESSAGE: &str = "crates/text/src/chat/message.rs";
const PARSER: &str = "crates/text/src/reply/parser.rs";
const TAGS: &str = "crates/text/src/reply/tags.rs";
const CONFIG: &str = "crates/checkpoint/src/config/read.rs";
const ROWS: &str = "crates/device/src/cpu/scalar/mod.rs";
const LINEAR: &str = "crates/device/src/cpu/scalar/linear.rs";
const DELTA: &str = "crates/device/src/cpu/scalar/delta.rs";
const ATTENTION: &str = "crates/device/src/cpu/scalar/attention.rs";
// The vector kernels are damaged too, where their text is their own. Their tests run on machines
// that have AVX2 or Neon.
const KERNELS: &str = "crates/device/src/cpu/kernels.rs";
const VECTOR_DELTA: &str = "crates/device/src/cpu/vector/delta.rs";
const VECTOR_ATTENTION: &str = "crates/device/src/cpu/vector/attention.rs";
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

macro_rules! pitfalls {
    (@shown { never, because $reason:literal }) => { Shown::Never($reason) };
    (@shown { $( $name:literal in $file:ident fails $test:expr; $find:expr => $replace:expr; )* }) => {
        Shown::By(&[ $( Mutation {
            name: $name, file: $file, find: $find, replace: $replace, test: $test,
        } ),* ])
    };
    ($( $number:literal $what:literal: $shown:tt )*) => {
        /// All of them, in order of their numbers.
        pub const ALL: &[Pitfall] = &[ $( Pitfall {
            number: $number, what: $what, shown: pitfalls!(@shown $shown),
        } ),* ];
    };
}

// What goes wrong: { the mistake in words, in which file, which test fails; text => text; .. }
pitfalls! {
    // mlx-lm #1442, #1623, mlx-vlm #1548
    1 "1 is added to norm weights that hold it already": {
        "norm weights get another 1" in ROWS fails operation("rms_norm");
            "*y = (f64::from(x) * scale * f64::from(w)) as f32;"
            => "*y = (f64::from(x) * scale * (1.0 + f64::from(w))) as f32;";
        "the delta net's norm weights get a 1" in ROWS fails operation("gated_norm");
            "scale * f64::from(w) * silu(f64::from(z))"
            => "scale * (1.0 + f64::from(w)) * silu(f64::from(z))";
        "query and key norm weights get another 1" in ATTENTION fails operation("qk_rope");
            "|x: f32, w: f32| f64::from(x) * scale * f64::from(w);"
            => "|x: f32, w: f32| f64::from(x) * scale * (1.0 + f64::from(w));";
        "epsilon is added to the root, not the mean" in ROWS fails LOGITS;
            "1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()"
            => "1.0 / ((dot(x, x) / x.len() as f64).sqrt() + f64::from(eps))";
        "epsilon is 1e-5" in ROWS fails LOGITS;
            "1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()"
            => "1.0 / (dot(x, x) / x.len() as f64 + 1e-5).sqrt()";
    }

    // llama.cpp #23758
    2 "the file is taken for one in Hugging Face's layout": {
        "convolution weights are (tap, channel)" in DELTA fails operation("delta_conv");
            "i.w[channel * taps + tap]"
            => "i.w[tap * channels + channel]";
        "tap 0 multiplies the current token" in DELTA fails operation("delta_conv");
            "i.w[channel * taps + tap]"
            => "i.w[channel * taps + taps - 1 - tap]";
        "up stands over gate" in PACK fails LOGITS;
            r#"up.push((format!("{from}.switch_mlp.gate_proj"), e * hidden, hidden));
            up.push((format!("{from}.switch_mlp.up_proj"), e * hidden, hidden));"#
            => r#"up.push((format!("{from}.switch_mlp.up_proj"), e * hidden, hidden));
            up.push((format!("{from}.switch_mlp.gate_proj"), e * hidden, hidden));"#;
        "a is read as b" in PACK fails LOGITS;
            r#"(format!("{from}.in_proj_b"), 0, c.delta_v_heads),
                (format!("{from}.in_proj_a"), 0, c.delta_v_heads),"#
            => r#"(format!("{from}.in_proj_a"), 0, c.delta_v_heads),
                (format!("{from}.in_proj_b"), 0, c.delta_v_heads),"#;
    }

    3 "the router is read as 4 bit, like the rest": {
        "the router is multiplied as 4 bit" in FORWARD fails LOGITS;
            "dev.run(LinearQ8 {"
            => "dev.run(LinearQ4 {";
        "the high half of a byte is the even element" in LINEAR fails operation("linear_q4");
            "[code & 15, code >> 4]"
            => "[code >> 4, code & 15]";
        "biases are left out" in LINEAR fails operation("linear_q4");
            "|q| scale * f32::from(q) + bias"
            => "|q| scale * f32::from(q) + bias * 0.0";
    }

    4 "text_config's one eos_token_id is taken for all ids that end a reply": {
        "stop ids come from text_config" in CONFIG fails config("stop_ids");
            "match (given(top), given(text)) {"
            => "match (given(text), given(top)) {";
        "only the first stop id ends a reply" in ENGINE fails engine("it_ends_at_any_stop_id");
            "if self.request.stop_ids.contains(&id) {"
            => "if self.request.stop_ids.first() == Some(&id) {";
    }

    // mlx-vlm #1073
    5 "experts are built as one dense MLP; tensors are read as if aligned": {
        "every token goes to expert 0" in ROWS fails operation("route");
            r#"ids[i] = best.expect("top <= experts") as u32;"#
            => r#"ids[i] = (best.expect("top <= experts") * 0) as u32;"#;
        "the shared expert is left out" in LINEAR fails operation("expert_down");
            "for n in t * chosen..(t + 1) * chosen {"
            => "for n in t * chosen..(t + 1) * chosen - 1 {";
        "the shared expert has no gate" in ROWS fails operation("route");
            "weights[top] = sigmoid(f64::from(logits[experts])) as f32;"
            => "weights[top] = 1.0;";
        "experts are read without their number" in PACK fails LOGITS;
            r#"(format!("{from}.switch_mlp.gate_proj"), e * hidden, hidden)"#
            => r#"(format!("{from}.switch_mlp.gate_proj"), 0 * e, hidden)"#;
    }

    // llmman #16
    6 "queries and gates are split as two halves instead of head by head": {
        "gates stand behind all queries" in ATTENTION fails operation("attend");
            "let (q, gate) = i.p[t * width + 2 * h * d..][..2 * d].split_at(d);"
            => "let q = &i.p[t * width + h * d..][..d];
                let gate = &i.p[t * width + (q_heads + h) * d..][..d];";
        "the attention gate is SiLU" in ATTENTION fails operation("attend");
            "(sum / total * sigmoid(f64::from(gate)))"
            => "(sum / total * f64::from(gate) * sigmoid(f64::from(gate)))";
        "scores are not scaled" in ATTENTION fails operation("attend");
            "products.sum::<f64>() / (d as f64).sqrt()"
            => "products.sum::<f64>()";
        "a token does not attend to itself" in ATTENTION fails operation("attend");
            "let context = span.position + t - span.first + 1;"
            => "let context = (span.position + t - span.first).max(1);";
        "vectors: gates stand behind all queries" in VECTOR_ATTENTION fails operation("attend");
            "of_step.copy_from_slice(&p[(2 * h + 1) * d..][..d]);"
            => "of_step.copy_from_slice(&p[(n + h) * d..][..d]);";
        "vectors: a larger score changes no sum" in VECTOR_ATTENTION fails row("attend");
            "*o = *o * shrink + of_step;"
            => "*o += of_step;";
    }

    7 "rotary positions turn all of a head, or neighbours instead of halves, or before the norm": {
        "neighbours are turned" in ATTENTION fails operation("qk_rope");
            TURN
            => "let (j, m, f) = (2 * j, 2 * j + 1, j + m - m);
                let (a, b) = (normed(x[j], w[j]), normed(x[m], w[m]));
                let (cos, sin) = (f64::from(cos[f]), f64::from(sin[f]));
                x[j] = (a * cos - b * sin) as f32;
                x[m] = (b * cos + a * sin) as f32;";
        "all of a head is turned" in FORWARD fails LOGITS;
            "let (head_dim, rotary) = (c.head_dim as u32, c.rotary_dim as u32);"
            => "let (head_dim, rotary) = (c.head_dim as u32, 2 * c.rotary_dim as u32);";
        "a head turns the other way" in ATTENTION fails operation("qk_rope");
            "x[j] = (a * cos - b * sin) as f32;
                x[m] = (b * cos + a * sin) as f32;"
            => "x[j] = (a * cos + b * sin) as f32;
                x[m] = (b * cos - a * sin) as f32;";
        "norm weights after the turn" in ATTENTION fails operation("qk_rope");
            TURN
            => "let (a, b) = (f64::from(x[j]) * scale, f64::from(x[m]) * scale);
                let (cos, sin) = (f64::from(cos[j]), f64::from(sin[j]));
                x[j] = ((a * cos - b * sin) * f64::from(w[j])) as f32;
                x[m] = ((b * cos + a * sin) * f64::from(w[m])) as f32;";
        "keys take the queries' norm weights" in ATTENTION fails operation("qk_rope");
            "norm_and_rotate(k, i.k_norm);"
            => "norm_and_rotate(k, i.q_norm);";
        "theta is 1,000,000" in STATE fails LOGITS;
            "c.rope_theta.powf("
            => "1e6f64.powf(";
    }

    // 1bit-MONSTER #2134, mlx-lm #1798
    8 "keys are normed by their mean, queries lack their scale, shares do not sum to 1": {
        "keys are normed by their mean square" in DELTA fails operation("delta_conv");
            "1.0 / (dot(c, c) + 1e-6).sqrt()"
            => "1.0 / (dot(c, c) / head_dim as f64 + 1e-6).sqrt()";
        "epsilon is added to the mean" in DELTA fails operation("delta_conv");
            "1.0 / (dot(c, c) + 1e-6).sqrt()"
            => "1.0 / (dot(c, c) + 1e-6 * head_dim as f64).sqrt()";
        "queries lack their scale" in DELTA fails operation("delta_conv");
            "scale /= (head_dim as f64).sqrt();"
            => "scale *= 1.0;";
        "shares of experts are not renormalised" in ROWS fails operation("route");
            "let total: f64 = (0..top).map(|i| (chosen(i) - chosen(0)).exp()).sum();"
            => "let all = logits[..experts].iter();
                let total: f64 = all.map(|&l| (f64::from(l) - chosen(0)).exp()).sum();";
        "softplus is a plain exponential" in ROWS fails operation("delta_conv");
            "x.max(0.0) + (-x.abs()).exp().ln_1p()"
            => "x.exp()";
        "A is not exponentiated" in DELTA fails operation("delta_conv");
            "(-f64::from(i.a_log[j]).exp() * dt)"
            => "(-f64::from(i.a_log[j]).abs() * dt)";
        "the gate of the norm is a sigmoid" in ROWS fails operation("gated_norm");
            "f64::from(w) * silu(f64::from(z))"
            => "f64::from(w) * sigmoid(f64::from(z))";
        "z gates before the norm" in ROWS fails operation("gated_norm");
            "            let scale = inverse_rms(o, op.eps);
            for ((o, &w), &z) in o.iter_mut().zip(w).zip(z) {
                *o = (f64::from(*o) * scale * f64::from(w) * silu(f64::from(z))) as f32;
            }"
            => "            for (o, &z) in o.iter_mut().zip(z) {
                *o = (f64::from(*o) * silu(f64::from(z))) as f32;
            }
            let scale = inverse_rms(o, op.eps);
            for (o, &w) in o.iter_mut().zip(w) {
                *o = (f64::from(*o) * scale * f64::from(w)) as f32;
            }";
    }

    9 "no SiLU after the convolution, activated values in its state, a wrong window": {
        "no SiLU after the convolution" in DELTA fails operation("delta_conv");
            "*out = silu(sum) as f32;"
            => "*out = sum as f32;";
        "the convolution's state is activated" in DELTA fails operation("conv_state");
            "conv[row * channels..][..channels].copy_from_slice(p);"
            => "for (c, &p) in conv[row * channels..][..channels].iter_mut().zip(p) {
                    *c = silu(f64::from(p)) as f32;
                }";
        "short steps do not move the window" in DELTA fails operation("conv_state");
            "conv.copy_within(from * channels..(from + 1) * channels, row * channels);"
            => "let _ = from;";
        "the window ends one token early" in DELTA fails operation("conv_state");
            "let p = &p[(span.first + from - kept) * width..][..channels];"
            => "let p = &p[(span.first + (from - kept).max(1) - 1) * width..][..channels];";
        "vectors: no SiLU after the convolution" in KERNELS fails operation("delta_conv");
            "out[i] = $crate::cpu::kernels::silu(sum);"
            => "out[i] = sum;";
        "vectors: tap 0 multiplies the current token" in KERNELS fails operation("delta_conv");
            "x3[i].mul_add(w[3], x2[i].mul_add(w[2], x1[i].mul_add(w[1], x0[i] * w[0])))"
            => "x3[i].mul_add(w[0], x2[i].mul_add(w[1], x1[i].mul_add(w[2], x0[i] * w[3])))";
    }

    10 "heads are repeated in turn, not side by side": {
        "value heads take key heads in turn" in DELTA fails operation("delta_step");
            "let key_head = j / (self.v_heads / self.k_heads);"
            => "let key_head = j % self.k_heads;";
        "query heads take key heads in turn" in ATTENTION fails operation("attend");
            "let kv_head = h / (q_heads / kv_heads);"
            => "let kv_head = h % kv_heads;";
        "vectors: query heads take another's keys" in VECTOR_ATTENTION fails operation("attend");
            "let h = kv_head * group + share * each;"
            => "let h = (kv_heads - 1 - kv_head) * group + share * each;";
    }

    // ollama #15865, TensorRT-LLM #17415, sglang #38975
    11 "the delta state or beta is rounded to 16 bits": {
        "the delta state is bf16" in DELTA fails operation("delta_step");
            "*s = (decay * f64::from(*s) + u * f64::from(k)) as f32;"
            => "*s = half::bf16::from_f64(decay * f64::from(*s) + u * f64::from(k)).to_f32();";
        "beta is bf16" in DELTA fails operation("delta_conv");
            "beta[j] = sigmoid(f64::from(b[j])) as f32;"
            => "beta[j] = half::bf16::from_f64(sigmoid(f64::from(b[j]))).to_f32();";
        "the cache is cut to bf16, not rounded" in ATTENTION fails row("values_are_stored_as_bf16");
            "bf16::from_f32(x).to_bits()"
            => "(x.to_bits() >> 16) as u16";
        "the state is corrected before it decays" in DELTA fails operation("delta_step");
            "(f64::from(v) - decay * dot(row, k))"
            => "(f64::from(v) - dot(row, k))";
        "the state is read before it is corrected" in DELTA fails operation("delta_step");
            "*o = dot(row, q) as f32;"
            => "*o = (dot(row, q) - u * dot(k, q)) as f32;";
        "vectors: the state is corrected before it decays" in KERNELS fails operation("delta_step");
            "let u = beta * (v[r] - decay * known[r]);"
            => "let u = beta * (v[r] - known[r]);";
    }

    // executorch #21417, llama.cpp #23606
    12 "the chunked form takes exp of a sum of decays: NaN": {
        "exp of a difference as a quotient" in DELTA fails DECAY;
            "let a = beta * dot(k, vectors(m)[1]) * (c[i] - c[m]).exp();"
            => "let a = beta * dot(k, vectors(m)[1]) * (c[i].exp() / c[m].exp());";
        "the chunk forgets decay between its tokens" in DELTA fails operation("delta_chunk");
            "let a = dot(q, vectors(m)[1]) * (c[i] - c[m]).exp();"
            => "let a = dot(q, vectors(m)[1]);";
        "a token of a chunk does not read itself" in DELTA fails operation("delta_chunk");
            "for (m, u_m) in u[..(i + 1) * d].chunks_exact(d).enumerate() {"
            => "for (m, u_m) in u[..i * d].chunks_exact(d).enumerate() {";
        "vectors: decays are subtracted in f32" in VECTOR_DELTA fails DECAY;
            "*since = exponent(c[i] - c_m);"
            => "*since = exponent(f64::from(c[i] as f32 - *c_m as f32));";
    }

    // vLLM #55766
    13 "state is lost where a prompt is cut, or a few tokens behind": {
        "a chunk starts from nothing" in DELTA fails CUT;
            "*sum = last.exp() * f64::from(s);"
            => "*sum = 0.0 * f64::from(s);";
        "the convolution's state is not kept" in FORWARD fails CUT;
            "dev.run(ConvState { p: s.p, span: s.span, conv, tokens, spans, slots, channels, width });"
            => "let _ = channels;";
        "decay restarts in every chunk but the first" in DELTA fails CUT;
            "let n = CHUNK.min(span.rows - start);"
            => "let n = CHUNK.min(span.rows - start); if start > 0 { state.fill(0.0); }";
        "vectors: a chunk starts from nothing" in VECTOR_DELTA fails CUT;
            "*s *= through;"
            => "*s *= through * 0.0;";
    }

    // llama.cpp-tq3 #75
    14 "the projections of the gates are quantised": {
        never, because "the checkpoint holds them so; what is made of them stays f32, which 11 shows"
    }

    // llama.cpp #29092, ik_llama #1383
    15 "a slot's state leaks into the next request": {
        "a reset keeps the delta state" in STATE fails RESET;
            "LayerState::Delta { conv, delta } => vec![part(conv), part(delta)],"
            => "LayerState::Delta { conv, .. } => vec![part(conv)],";
        "a reset keeps the convolution's state" in STATE fails RESET;
            "LayerState::Delta { conv, delta } => vec![part(conv), part(delta)],"
            => "LayerState::Delta { delta, .. } => vec![part(delta)],";
        "a reset clears another slot" in STATE fails model("a_reset");
            "view.slice(slot as u64 * bytes, bytes)"
            => "view.slice((slot as u64 + 1) % self.slots as u64 * bytes, bytes)";
        "the engine does not reset a slot" in ENGINE fails engine("many_at_once");
            "self.model.reset(slot);"
            => "let _ = slot;";
    }

    // mlx-lm #1162, vLLM #43559
    16 "the delta state is rewound by cutting the sequence": {
        never, because "a sequence can only grow or start anew, and no prefix is kept"
    }

    // mlx-lm #1024, ik_llama #1288
    17 "sequences of a batch that differ in length get each other's positions": {
        "positions count the rows of the batch" in ATTENTION fails operation("qk_rope");
            "let pos = span.position + t - span.first;"
            => "let pos = span.position + t;";
        "all sequences advance by the longest" in MODEL fails BATCH;
            "self.positions[span.slot] += span.ids.len();"
            => "self.positions[span.slot] += spans.iter().map(|s| s.ids.len()).max().unwrap_or(0);";
        "a sequence convolves its neighbour" in DELTA fails BATCH;
            "let row = t - span.first + tap;"
            => "let row = t + tap;";
        "vectors: a sequence convolves its neighbour" in VECTOR_DELTA fails BATCH;
            "let row = t - span.first + tap;"
            => "let row = t + tap;";
        "rows are asked for in the order they run" in MODEL fails BATCH;
            "first_row[i] = ids.len();"
            => "first_row[n] = ids.len();";
    }

    // rMLX #436, mlx-vlm #1188
    18 "rejected drafts are rolled back in scratch caches": {
        never, because "there is no speculative decoding"
    }

    19 "the MTP head reads the hidden state before the last norm": {
        never, because "the checkpoint holds no MTP head"
    }

    // imp #660; other savings of this family's tokenizers
    20 "words are split without marks (\\p{M}), or digits in runs": {
        "any expression is taken for the right one" in TOKENIZER_FILE fails text("a_damaged_or");
            "Some(SPLIT) => Ok(()),"
            => "Some(_) => Ok(()),";
        "marks end a word" in TOKENIZER fails text("equal_hugging_face");
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
            => r"[^\r\n\p{L}\p{N}]?[\p{L}]+|\p{N}|";
        "digits make one word" in TOKENIZER fails text("equal_hugging_face");
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
            => r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}+|";
        "a word does not keep the blank before it" in TOKENIZER fails text("equal");
            "if blank_run && found.end() < text.len() && word.len() > last.len_utf8() {"
            => "if blank_run && word.is_empty() {";
        "data may spell control tokens" in TOKENIZER fails text("");
            "let found = if literal.first() == Some(&at) { None } else { self.added_at(text, at) };"
            => "let found = self.added_at(text, at);";
    }

    // vLLM #39056, #51679, llama.cpp #24202
    21 "a call within reasoning, or without the end of reasoning, is lost": {
        "reasoning holds no calls" in PARSER fails text("reply");
            "if !self.tools.any() {
                    return Look::No;"
            => "if !self.tools.any() || self.in_reasoning {
                    return Look::No;";
        "a reply that begins in reasoning is content" in PARSER fails text("reply");
            "in_reasoning,
            enveloped: false,"
            => "in_reasoning: false & in_reasoning,
            enveloped: false,";
        "what a call interrupts goes on as reasoning" in PARSER fails text("reply");
            "self.channel().part();
        self.in_reasoning = false;"
            => "self.channel().part();";
    }

    22 "parameters in another order, values of several lines or with <, arguments as a string": {
        "a value ends at </function>" in TAGS fails text("reply");
            r#".then(text, |(), t| gap(t).then(t, |(), t| word(t, "</tool_call>")))"#
            => "";
        "values keep the line break before them" in PARSER fails text("reply");
            r"return Took(usize::from(text.starts_with('\n')));"
            => r"return Took(usize::from(text.starts_with('\r')));";
        "types are not taken from the schema" in PARSER fails text("reply");
            "let types = self.tools.types(&self.call.name, &key);"
            => r#"let types = self.tools.types("", &key);"#;
        "arguments in a string stay one" in MESSAGE fails text("chat");
            "Value::String(text) => match serde_json::from_str(text) {"
            => r#"Value::String(text) => match serde_json::from_str(&text.replace("{", "")) {"#;
    }

    // QwenLM/Qwen3.8 #125
    23 "calls in JSON are text, a system message that is not the first is an error": {
        "calls in JSON are text" in TAGS fails text("reply");
            "function(text).or(|| object(text))"
            => "function(text)";
        "system messages stay where they are" in MESSAGE fails text("chat");
            "arranged.extend(messages.iter().filter(|m| !is_system(m)).cloned());"
            => "arranged = messages.to_vec();";
        "developer is no role" in MESSAGE fails text("chat");
            r#"Some("system" | "developer") => Role::System,"#
            => r#"Some("system") => Role::System,"#;
    }

    24 "reasoning is dropped from history although the client keeps it": {
        "preserve_thinking is not passed on" in CHAT fails text("chat");
            r#"context.insert("preserve_thinking".into(), json!(options.preserve_thinking));"#
            => r#"context.insert("preserve_thinking".into(), json!(false));"#;
    }

    25 "MLX on a CPU, which adds up in bf16, is taken for the truth": {
        never, because "the reference is NumPy in f64, on the dequantised weights"
    }
}
