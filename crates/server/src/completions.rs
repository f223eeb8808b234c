//! POST /v1/completions: a prompt as it is, and what the model makes of it.

use std::sync::Arc;

use lily_engine::{Logprob, Usage};
use lily_text::Tokenizer;
use lily_text::stream::Detokenizer;
use serde_json::{Map, Value};

use crate::Served;
use crate::answer::{End, Prepared, Reply};
use crate::body::JsonBody;
use crate::error::Error;
use crate::openai::{
    Common, Completion, Head, Prompt, PromptProgress, TextChoice, TextLogprobs, Timings, finite,
    spell,
};

/// A completion in the making.
pub struct TextReply {
    head: Head,
    include_usage: bool,
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer<Arc<Tokenizer>>,
    /// Ids of the prompt whose log-probabilities are still to come.
    echoed: std::vec::IntoIter<u32>,
    /// Text that is in no chunk yet.
    text: String,
    /// As `text`, if the client wants them.
    logprobs: Option<TextLogprobs>,
    /// Characters before the next token.
    offset: usize,
}

/// Checks a request, and makes tokens of its prompt. Slow for long prompts.
pub fn prepare(served: &Served, body: &JsonBody) -> Result<Prepared<TextReply>, Error> {
    let (common, completion): (Common, Completion) = (body.parse()?, body.parse()?);
    common.check_form()?;
    if completion.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
        return Err(Error::field(
            "suffix",
            "not supported: this model does not fill in the middle",
        ));
    }
    let logprobs = completion.top_logprobs()?;
    let echo = completion.echo.unwrap_or(false);
    let tokenizer = &served.tokenizer;
    let known = tokenizer.len();
    let prompt = match &completion.prompt {
        Prompt::Text(text) => {
            served.check_length(text, "prompt")?;
            tokenizer.encode(text)
        }
        Prompt::Ids(ids) => ids.clone(),
    };
    if let Some(i) = prompt.iter().position(|&id| id as usize >= known) {
        let message = format!("expected a token id below {known}, found {}", prompt[i]);
        return Err(Error::field(format!("prompt[{i}]"), message));
    }
    let (stream, include_usage) = common.streaming();
    let mut reply = TextReply {
        head: Head::new(
            "cmpl",
            "text_completion",
            common.model.clone().unwrap_or(served.id.clone()),
        ),
        include_usage,
        tokenizer: tokenizer.clone(),
        detokenizer: Detokenizer::new(tokenizer.clone(), common.stops()?),
        echoed: Vec::new().into_iter(),
        text: String::new(),
        logprobs: logprobs.map(|_| TextLogprobs::default()),
        offset: 0,
    };
    if echo {
        reply.text = match completion.prompt {
            Prompt::Text(text) => text,
            Prompt::Ids(ids) => tokenizer.decode(&ids),
        };
        if logprobs.is_some() {
            reply.echoed = prompt.clone().into_iter();
            // Nothing comes before the first token, so nothing predicts it.
            if let Some(first) = reply.echoed.next() {
                reply.note(first, None);
            }
        }
    }
    Ok(Prepared {
        sampling: common.sampling(&served.sampling, known)?,
        max_tokens: common.max_tokens()?,
        logprobs,
        prompt_logprobs: echo && logprobs.is_some(),
        progress: common.return_progress.unwrap_or(false),
        param: "prompt",
        prompt,
        stream,
        reply,
    })
}

impl TextReply {
    /// Appends a token to what is reported of tokens.
    fn note(&mut self, id: u32, logprob: Option<Logprob>) {
        let bytes = self.tokenizer.token_bytes(id);
        if let Some(logprobs) = &mut self.logprobs {
            let spelled = spell(bytes);
            logprobs.token_logprobs.push(logprob.as_ref().map(|l| finite(l.logprob)));
            logprobs.top_logprobs.push(logprob.map(|logprob| {
                let mut top: Map<String, Value> = Map::new();
                for (id, logprob) in logprob.top {
                    let spelled = spell(self.tokenizer.token_bytes(id));
                    // Of several tokens that read the same, the best counts.
                    top.entry(spelled).or_insert(finite(logprob).into());
                }
                top.entry(spelled.clone()).or_insert(finite(logprob.logprob).into());
                top
            }));
            logprobs.tokens.push(spelled);
            logprobs.text_offset.push(self.offset);
        }
        // Bytes that begin a character, whichever token completes it.
        self.offset += bytes.iter().filter(|&&byte| byte & 0xc0 != 0x80).count();
    }

    /// What is new, as a choice.
    fn choice(&mut self, finish_reason: Option<&'static str>) -> TextChoice {
        TextChoice {
            index: 0,
            text: std::mem::take(&mut self.text),
            logprobs: self.logprobs.as_mut().map(std::mem::take),
            finish_reason,
        }
    }

    fn last_choice(&mut self, end: End) -> TextChoice {
        self.text += &self.detokenizer.finish();
        self.choice(Some(match end {
            End::Stop => "stop",
            End::Length => "length",
        }))
    }
}

impl Reply for TextReply {
    fn opening(&mut self) -> Option<String> {
        None
    }

    fn progress(&mut self, progress: PromptProgress) -> String {
        let nothing =
            TextChoice { index: 0, text: String::new(), logprobs: None, finish_reason: None };
        self.head.json(vec![nothing], None, None, Some(progress))
    }

    fn prompt_logprobs(&mut self, logprobs: Vec<Logprob>) {
        for logprob in logprobs {
            if let Some(id) = self.echoed.next() {
                self.note(id, Some(logprob));
            }
        }
    }

    fn token(&mut self, id: u32, logprob: Option<Logprob>) -> bool {
        self.text += &self.detokenizer.push(id);
        self.note(id, logprob);
        self.detokenizer.stopped().is_some()
    }

    fn chunks(&mut self) -> Vec<String> {
        // An echo goes out with its log-probabilities, all at once.
        if self.text.is_empty() || !self.echoed.as_slice().is_empty() {
            return vec![];
        }
        let choice = self.choice(None);
        vec![self.head.body(choice)]
    }

    fn end(&mut self, end: End, usage: Usage) -> Vec<String> {
        let choice = self.last_choice(end);
        let timings = Some(Timings::from(&usage));
        if !self.include_usage {
            return vec![self.head.json(vec![choice], None, timings, None)];
        }
        let usage = Some(crate::openai::Usage::new(&usage, 0));
        let last = self.head.json::<TextChoice>(vec![], usage, timings, None);
        vec![self.head.body(choice), last]
    }

    fn whole(&mut self, end: End, usage: Usage) -> String {
        let choice = self.last_choice(end);
        let timings = Some(Timings::from(&usage));
        let usage = Some(crate::openai::Usage::new(&usage, 0));
        self.head.json(vec![choice], usage, timings, None)
    }
}
