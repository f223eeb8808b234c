//! What the fields of a request may hold, and what follows from them: everything between wire
//! types and the engine that needs no text.

use lily_engine::Sampling;
use lily_text::chat::Options as Rendering;
use serde_json::Value;

use crate::error::Error;
use crate::openai::{Chat, Common, Completion};

/// Most stop strings; each is looked for at every token.
const MOST_STOPS: usize = 16;
/// Most alternatives reported beside a token.
const MOST_TOP_LOGPROBS: i64 = 20;

/// A number between two others, both allowed.
fn number(
    param: &str,
    value: Option<f64>,
    low: f64,
    high: f64,
    default: f32,
) -> Result<f32, Error> {
    match value {
        None => Ok(default),
        Some(value) if (low..=high).contains(&value) => Ok(value as f32),
        Some(value) => Err(Error::field(
            param,
            format!("expected a number from {low} to {high}, found {value}"),
        )),
    }
}

impl Common {
    /// How to choose tokens: what the client leaves out is as in `defaults`. Ids of `logit_bias`
    /// are below `ids`.
    pub fn sampling(&self, defaults: &Sampling, ids: usize) -> Result<Sampling, Error> {
        let d = defaults;
        let top_k = match self.top_k {
            None => d.top_k,
            // -1 is how vLLM's clients say "all".
            Some(k) if k >= -1 => usize::try_from(k).unwrap_or(0),
            Some(k) => {
                let message = format!("expected a whole number from 0 (all tokens) on, found {k}");
                return Err(Error::field("top_k", message));
            }
        };
        let mut logit_bias = d.logit_bias.clone();
        for (key, &bias) in self.logit_bias.iter().flatten() {
            let param = format!("logit_bias.{key}");
            let Some(id) = key.parse::<u32>().ok().filter(|&id| (id as usize) < ids) else {
                let message = format!("expected a token id below {ids} as the key, found {key:?}");
                return Err(Error::field(param, message));
            };
            logit_bias.push((id, number(&param, Some(bias), -100.0, 100.0, 0.0)?));
        }
        Ok(Sampling {
            temperature: number("temperature", self.temperature, 0.0, 10.0, d.temperature)?,
            top_k,
            top_p: number("top_p", self.top_p, 0.0, 1.0, d.top_p)?,
            min_p: number("min_p", self.min_p, 0.0, 1.0, d.min_p)?,
            presence_penalty: number(
                "presence_penalty",
                self.presence_penalty,
                -2.0,
                2.0,
                d.presence_penalty,
            )?,
            frequency_penalty: number(
                "frequency_penalty",
                self.frequency_penalty,
                -2.0,
                2.0,
                d.frequency_penalty,
            )?,
            repetition_penalty: number(
                "repetition_penalty",
                self.repetition_penalty,
                0.01,
                100.0,
                d.repetition_penalty,
            )?,
            logit_bias,
            seed: self.seed()?.or(d.seed),
        })
    }

    /// The seed, if the client gives one.
    fn seed(&self) -> Result<Option<u64>, Error> {
        match &self.seed {
            None | Some(Value::Null) => Ok(None),
            // Negative seeds are seeds as well: their 64 bits count.
            Some(seed) => match seed.as_u64().or(seed.as_i64().map(|seed| seed as u64)) {
                Some(seed) => Ok(Some(seed)),
                None => {
                    let message = format!("expected a whole number of 64 bits, found {seed}");
                    Err(Error::field("seed", message))
                }
            },
        }
    }

    /// Most tokens to generate, if the client says; the newer name wins.
    pub fn max_tokens(&self) -> Result<Option<usize>, Error> {
        let (param, value) = match self.max_completion_tokens {
            Some(n) => ("max_completion_tokens", Some(n)),
            None => ("max_tokens", self.max_tokens),
        };
        let Some(n) = value else { return Ok(None) };
        let message = || format!("expected a whole number from 0 on, found {n}");
        usize::try_from(n).map(Some).map_err(|_| Error::field(param, message()))
    }

    /// The stop strings.
    pub fn stops(&self) -> Result<Vec<String>, Error> {
        let stops = self.stop.as_ref().map(|stop| stop.0.clone()).unwrap_or_default();
        if stops.len() > MOST_STOPS {
            let message = format!("expected at most {MOST_STOPS} strings, found {}", stops.len());
            return Err(Error::field("stop", message));
        }
        if stops.iter().any(String::is_empty) {
            return Err(Error::field("stop", "expected strings that are not empty"));
        }
        Ok(stops)
    }

    /// Refuses what asks for more than one answer, or for one of a certain form.
    pub fn check_form(&self) -> Result<(), Error> {
        for (param, value) in [("n", self.n), ("best_of", self.best_of)] {
            if value.is_some_and(|n| n != 1) {
                let message = "this server gives one choice a request: expected 1, found";
                return Err(Error::field(param, format!("{message} {}", value.unwrap_or(1))));
            }
        }
        // It comes back in every chunk of a stream.
        if self.model.as_ref().is_some_and(|model| model.len() > LONGEST_MODEL) {
            let message = format!("expected a name of at most {LONGEST_MODEL} bytes");
            return Err(Error::field("model", message));
        }
        match self.response_format.as_ref().map(|format| format.kind.as_str()) {
            None | Some("text") => Ok(()),
            Some(kind @ ("json_object" | "json_schema")) => {
                let message = format!(
                    "{kind} is not supported yet, as replies are not constrained; ask for JSON in \
                     a message, or give the schema as a tool"
                );
                Err(Error::field("response_format.type", message))
            }
            Some(kind) => {
                let message = format!("expected \"text\", found {kind:?}");
                Err(Error::field("response_format.type", message))
            }
        }
    }

    /// Whether the answer is a stream, and whether that ends with the usage.
    pub fn streaming(&self) -> (bool, bool) {
        let usage = self.stream_options.as_ref().and_then(|options| options.include_usage);
        (self.stream.unwrap_or(false), usage.unwrap_or(false))
    }
}

/// Longest name of a model that a request may give, in bytes; the name itself does not matter.
const LONGEST_MODEL: usize = 1000;

/// Names of a template's surroundings, which a request may not give another meaning: they would
/// get round the checks of `messages` and `tools`, or break the template.
const OF_THE_TEMPLATE: [&str; 10] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
    "dict",
    "loop",
];

impl Chat {
    /// How to render the prompt. The model thinks unless told not to: by the template's own
    /// variable, else by the top-level field, else by one of the efforts.
    pub fn rendering(&self) -> Result<Rendering, Error> {
        let mut variables = self.chat_template_kwargs.clone().unwrap_or_default();
        let mut flag = |name: &str| match variables.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => {
                let message = format!("expected true or false, found {other}");
                Err(Error::field(format!("chat_template_kwargs.{name}"), message))
            }
        };
        let (thinking, preserve) = (flag("enable_thinking")?, flag("preserve_thinking")?);
        if let Some(name) = OF_THE_TEMPLATE.iter().find(|name| variables.contains_key(**name)) {
            let message = "is set by the server from the other fields of the request; leave it out";
            return Err(Error::field(format!("chat_template_kwargs.{name}"), message));
        }
        let nested = self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_deref());
        let efforts = effort("reasoning_effort", self.reasoning_effort.as_deref())?
            .or(effort("reasoning.effort", nested)?)
            .or(self.thinking_type()?);
        Ok(Rendering {
            thinking: thinking.or(self.enable_thinking).or(efforts).unwrap_or(true),
            preserve_thinking: preserve.or(self.preserve_thinking).unwrap_or(false),
            add_generation_prompt: true,
            variables,
        })
    }

    fn thinking_type(&self) -> Result<Option<bool>, Error> {
        match self.thinking.as_ref().and_then(|thinking| thinking.kind.as_deref()) {
            None => Ok(None),
            Some("disabled") => Ok(Some(false)),
            Some("enabled" | "adaptive" | "auto") => Ok(Some(true)),
            Some(other) => {
                let message = format!("expected \"enabled\" or \"disabled\", found {other:?}");
                Err(Error::field("thinking.type", message))
            }
        }
    }

    /// The tools that the model is shown: none if the client chooses none.
    pub fn offered_tools(&self) -> Result<&[Value], Error> {
        for (param, found) in [
            ("functions", self.functions.as_ref().is_some_and(|list| !list.is_empty())),
            ("function_call", self.function_call.as_ref().is_some_and(|call| call != "none")),
        ] {
            if found {
                return Err(Error::field(param, "not supported: use `tools` and `tool_choice`"));
            }
        }
        let tools = self.tools.as_deref().unwrap_or_default();
        let constrained = |what: &str| {
            let message = format!(
                "{what} is not supported yet, as replies are not constrained; use \"auto\" or \
                 \"none\""
            );
            Err(Error::field("tool_choice", message))
        };
        match &self.tool_choice {
            None | Some(Value::Null) => Ok(tools),
            Some(Value::String(choice)) => match choice.as_str() {
                "auto" => Ok(tools),
                "none" => Ok(&[]),
                "required" | "any" => constrained("a required call"),
                other => {
                    let message = format!("expected \"auto\" or \"none\", found {other:?}");
                    Err(Error::field("tool_choice", message))
                }
            },
            Some(Value::Object(_)) => constrained("a certain tool"),
            Some(_) => Err(Error::field("tool_choice", "expected \"auto\" or \"none\"")),
        }
    }

    /// How many alternatives to report with each token; `None`: no log-probabilities at all.
    pub fn top_logprobs(&self) -> Result<Option<usize>, Error> {
        let wanted = self.logprobs.unwrap_or(false);
        match self.top_logprobs {
            None => Ok(wanted.then_some(0)),
            Some(0) if !wanted => Ok(None),
            Some(_) if !wanted => Err(Error::field("top_logprobs", "needs \"logprobs\": true")),
            Some(top) => top_logprobs("top_logprobs", top).map(Some),
        }
    }
}

impl Completion {
    /// As [`Chat::top_logprobs`].
    pub fn top_logprobs(&self) -> Result<Option<usize>, Error> {
        self.logprobs.map(|top| top_logprobs("logprobs", top)).transpose()
    }
}

/// Whether an effort is one at all. How long the model thinks is its own affair.
fn effort(param: &str, effort: Option<&str>) -> Result<Option<bool>, Error> {
    match effort {
        None => Ok(None),
        Some("none") => Ok(Some(false)),
        Some("minimal" | "low" | "medium" | "high" | "xhigh" | "max") => Ok(Some(true)),
        Some(other) => {
            let message =
                format!("expected none, minimal, low, medium, high or xhigh, found {other:?}");
            Err(Error::field(param, message))
        }
    }
}

fn top_logprobs(param: &str, top: i64) -> Result<usize, Error> {
    if (0..=MOST_TOP_LOGPROBS).contains(&top) {
        return Ok(top as usize);
    }
    let message = format!("expected a whole number from 0 to {MOST_TOP_LOGPROBS}, found {top}");
    Err(Error::field(param, message))
}
