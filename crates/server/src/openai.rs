//! Wire types, exactly as on the wire. What fields may hold is checked in `params.rs`; fields
//! that are not here are ignored, as clients send many that only matter elsewhere.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What requests for chats and for completions have in common. Numbers are as wide as JSON's, so
/// that one out of range is reported as that.
#[derive(Debug, Default, Deserialize)]
pub struct Common {
    /// Any name; echoed.
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// As llama.cpp: chunks with `prompt_progress` while the prompt is computed.
    pub return_progress: Option<bool>,
    pub max_tokens: Option<i64>,
    pub max_completion_tokens: Option<i64>,
    pub n: Option<i64>,
    pub best_of: Option<i64>,
    pub stop: Option<Stop>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub logit_bias: Option<BTreeMap<String, f64>>,
    pub seed: Option<serde_json::Value>,
    pub response_format: Option<ResponseFormat>,
}

#[derive(Debug, Default, Deserialize)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub struct ResponseFormat {
    #[serde(rename = "type")]
    pub kind: String,
}

/// What only chats have. Messages and tools are read where prompts are made of them.
#[derive(Debug, Deserialize)]
pub struct Chat {
    #[serde(default)]
    pub messages: Value,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    /// Both superseded by `tools`.
    pub functions: Option<Vec<Value>>,
    pub function_call: Option<Value>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<i64>,
    /// Variables of the template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub enable_thinking: Option<bool>,
    pub preserve_thinking: Option<bool>,
    pub reasoning_effort: Option<String>,
    pub reasoning: Option<Reasoning>,
    pub thinking: Option<Thinking>,
}

#[derive(Debug, Deserialize)]
pub struct Reasoning {
    pub effort: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct Thinking {
    #[serde(rename = "type")]
    pub kind: Option<String>,
}

/// What only completions have.
#[derive(Debug, Deserialize)]
pub struct Completion {
    pub prompt: Prompt,
    pub echo: Option<bool>,
    pub logprobs: Option<i64>,
    pub suffix: Option<String>,
}

#[derive(Debug)]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

#[derive(Debug, PartialEq)]
pub struct Stop(pub Vec<String>);

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Stop, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Stop;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }
            fn visit_str<E>(self, text: &str) -> Result<Stop, E> {
                Ok(Stop(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, texts: A) -> Result<Stop, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(texts)).map(Stop)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Prompt, D::Error> {
        /// An element of a list: a token of the one prompt, or a whole prompt.
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a token id, a string, or a list of token ids")]
        enum Element {
            Id(u32),
            Text(String),
            Ids(Vec<u32>),
        }
        const ONE: &str = "expected one prompt, found several; send one request for each";
        struct Forms;
        impl<'de> Visitor<'de> for Forms {
            type Value = Prompt;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string, a list of one string, or a list of token ids")
            }
            fn visit_str<E>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Text(text.to_owned()))
            }
            fn visit_string<E>(self, text: String) -> Result<Prompt, E> {
                Ok(Prompt::Text(text))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompt, A::Error> {
                let mut prompt = match list.next_element()? {
                    None => return Ok(Prompt::Ids(Vec::new())),
                    Some(Element::Id(id)) => Prompt::Ids(vec![id]),
                    Some(Element::Text(text)) => {
                        let more = list.next_element::<Element>()?;
                        return if more.is_none() {
                            Ok(Prompt::Text(text))
                        } else {
                            Err(A::Error::custom(ONE))
                        };
                    }
                    Some(Element::Ids(ids)) => {
                        let more = list.next_element::<Element>()?;
                        return if more.is_none() {
                            Ok(Prompt::Ids(ids))
                        } else {
                            Err(A::Error::custom(ONE))
                        };
                    }
                };
                let Prompt::Ids(ids) = &mut prompt else { unreachable!("set above") };
                while let Some(id) = list.next_element()? {
                    ids.push(id);
                }
                Ok(prompt)
            }
        }
        deserializer.deserialize_any(Forms)
    }
}

/// The body of every answer: a whole one with its choice, or one chunk of a stream.
#[derive(Debug, Serialize)]
struct Answer<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
}

/// What all bodies of one answer begin with.
#[derive(Debug)]
pub struct Head {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
}

impl Head {
    /// `object` is what the body is, `model` what the client asked for.
    pub fn new(prefix: &str, object: &'static str, model: String) -> Head {
        Head { id: format!("{prefix}-{}", token()), object, created: crate::now(), model }
    }

    /// A body in JSON: its choice, and how it ended.
    pub fn body<C: Serialize>(&self, choice: C) -> String {
        self.json(vec![choice], None, None, None)
    }

    /// A body in JSON.
    pub fn json<C: Serialize>(
        &self,
        choices: Vec<C>,
        usage: Option<Usage>,
        timings: Option<Timings>,
        prompt_progress: Option<PromptProgress>,
    ) -> String {
        let answer = Answer {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
            system_fingerprint: concat!("lily-", env!("CARGO_PKG_VERSION")),
            choices,
            usage,
            timings,
            prompt_progress,
        };
        serde_json::to_string(&answer).expect("no map with keys that are not strings")
    }
}

/// A name that no other answer has.
pub fn token() -> String {
    let mut bytes = [0; 12];
    // Without randomness from the system names are not unique, and nothing worse.
    let _ = getrandom::fill(&mut bytes);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[derive(Debug, Serialize)]
pub struct ChatChoice {
    pub index: u32,
    pub message: Reply,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
pub struct Reply {
    pub role: &'static str,
    /// Always there; null only beside tool calls.
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ReplyCall>,
    /// Always null: this model says so in its content.
    pub refusal: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct ReplyCall {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub function: ReplyFunction,
}

#[derive(Debug, Serialize)]
pub struct ReplyFunction {
    pub name: String,
    pub arguments: String,
}

#[derive(Debug, Serialize)]
pub struct ChunkChoice {
    pub index: u32,
    pub delta: Delta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallDelta>,
}

#[derive(Debug, Serialize)]
pub struct CallDelta {
    pub index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    pub function: FunctionDelta,
}

#[derive(Debug, Serialize)]
pub struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub arguments: String,
}

#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<TokenLogprob>,
    pub refusal: Option<Vec<TokenLogprob>>,
}

#[derive(Debug, Serialize)]
pub struct TokenLogprob {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
    pub top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, Serialize)]
pub struct TopLogprob {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Serialize)]
pub struct TextChoice {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<TextLogprobs>,
    pub finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
pub struct TextLogprobs {
    pub tokens: Vec<String>,
    /// Null for the prompt's first token.
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// In characters.
    pub text_offset: Vec<usize>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptDetails,
    pub completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct PromptDetails {
    pub cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct CompletionDetails {
    pub reasoning_tokens: usize,
}

impl Usage {
    /// `reasoning` of the chosen tokens were not for people.
    pub fn new(usage: &lily_engine::Usage, reasoning: usize) -> Usage {
        Usage {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt + usage.completion,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached },
            completion_tokens_details: CompletionDetails { reasoning_tokens: reasoning },
        }
    }
}

/// As llama.cpp: `prompt_n` without the `cache_n` tokens whose state was there; times in
/// milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Timings {
    pub cache_n: usize,
    pub prompt_n: usize,
    pub prompt_ms: f64,
    pub prompt_per_second: f64,
    pub predicted_n: usize,
    pub predicted_ms: f64,
    pub predicted_per_second: f64,
}

impl From<&lily_engine::Usage> for Timings {
    fn from(usage: &lily_engine::Usage) -> Timings {
        let per_second = |tokens: usize, ms: f64| match ms > 0.0 {
            true => tokens as f64 / ms * 1e3,
            false => 0.0,
        };
        let prompt = usage.prompt - usage.cached;
        Timings {
            cache_n: usage.cached,
            prompt_n: prompt,
            prompt_ms: usage.prefill_ms,
            prompt_per_second: per_second(prompt, usage.prefill_ms),
            predicted_n: usage.completion,
            predicted_ms: usage.decode_ms,
            // The first token is the prompt's work; its time is not in `decode_ms`.
            predicted_per_second: per_second(usage.completion.saturating_sub(1), usage.decode_ms),
        }
    }
}

/// As llama.cpp.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PromptProgress {
    pub total: usize,
    pub cache: usize,
    pub processed: usize,
    pub time_ms: u64,
}

/// A token in JSON, which has no bytes: its text, or if it is not whole characters, its bytes
/// escaped as OpenAI does it.
pub fn spell(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, b| text + &format!("\\x{b:02x}")),
    }
}

/// A log-probability in JSON, which has no infinity: OpenAI's stand-in for it.
pub fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
