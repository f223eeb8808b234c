//! POST /v1/chat/completions: messages and tools to a prompt, and the reply to reasoning, content
//! and tool calls.

use std::sync::Arc;

use lily_engine::{Logprob, Usage};
use lily_text::Tokenizer;
use lily_text::chat::Message;
use lily_text::reply::{self, Delta, Parser};
use lily_text::stream::Detokenizer;

use crate::Served;
use crate::answer::{End, Prepared, Reply};
use crate::body::JsonBody;
use crate::error::Error;
use crate::openai::{
    self, CallDelta, Chat, ChatChoice, ChatLogprobs, ChunkChoice, Common, FunctionDelta, Head,
    PromptProgress, ReplyCall, ReplyFunction, Timings, TokenLogprob, TopLogprob, finite, spell,
};

/// A reply in the making.
pub struct ChatReply {
    head: Head,
    include_usage: bool,
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer<Arc<Tokenizer>>,
    parser: Parser,
    /// What is in no chunk yet.
    deltas: Vec<Delta>,
    /// As `deltas`, of every token, those of reasoning and calls as well; if the client wants it.
    logprobs: Option<ChatLogprobs>,
    /// Tool calls so far.
    calls: usize,
    /// Whether the text so far ends in reasoning.
    in_reasoning: bool,
    /// Tokens of reasoning so far, with the tag that ends it.
    reasoning_tokens: usize,
}

/// Checks a request, renders its prompt and makes tokens of that. Slow for long prompts.
pub fn prepare(served: &Served, body: &JsonBody) -> Result<Prepared<ChatReply>, Error> {
    let (common, chat): (Common, Chat) = (body.parse()?, body.parse()?);
    common.check_form()?;
    let logprobs = chat.top_logprobs()?;
    let tools = chat.offered_tools()?;
    let messages = Message::list(&chat.messages)?;
    let rendered = served.template.render(&messages, tools, &chat.rendering()?)?;
    let tokenizer = &served.tokenizer;
    served.check_length(rendered.text(), "messages")?;
    // The template has opened the reasoning, or has opened and closed it.
    let in_reasoning = rendered.text().trim_end().ends_with("<think>");
    let model = common.model.clone().unwrap_or_else(|| served.id.clone());
    let (stream, include_usage) = common.streaming();
    let object = if stream { "chat.completion.chunk" } else { "chat.completion" };
    Ok(Prepared {
        prompt: tokenizer.encode_prompt(&rendered),
        param: "messages",
        sampling: common.sampling(&served.sampling, tokenizer.len())?,
        max_tokens: common.max_tokens()?,
        logprobs,
        prompt_logprobs: false,
        stream,
        progress: common.return_progress.unwrap_or(false),
        reply: ChatReply {
            head: Head::new("chatcmpl", object, model),
            include_usage,
            tokenizer: tokenizer.clone(),
            detokenizer: Detokenizer::new(tokenizer.clone(), common.stops()?),
            parser: Parser::new(tools, in_reasoning),
            deltas: Vec::new(),
            logprobs: logprobs.map(|_| ChatLogprobs::default()),
            calls: 0,
            in_reasoning,
            reasoning_tokens: 0,
        },
    })
}

impl ChatReply {
    /// Takes in text that will not change any more.
    fn take(&mut self, deltas: Vec<Delta>) {
        for delta in &deltas {
            match delta {
                Delta::Reasoning(_) => self.in_reasoning = true,
                Delta::Content(_) => self.in_reasoning = false,
                Delta::ToolCall { .. } => {
                    self.in_reasoning = false;
                    self.calls += 1;
                }
                Delta::Arguments { .. } | Delta::ToolCallEnd { .. } => {}
            }
        }
        self.deltas.extend(deltas);
    }

    /// Takes in what was held back for lack of more text.
    fn take_rest(&mut self) {
        let text = self.detokenizer.finish();
        let mut deltas = self.parser.push(&text);
        deltas.extend(self.parser.finish());
        self.take(deltas);
    }

    fn finish_reason(&self, end: End) -> &'static str {
        match end {
            // Also within a call, lest somebody take that for complete.
            End::Length => "length",
            End::Stop if self.calls > 0 => "tool_calls",
            End::Stop => "stop",
        }
    }

    fn chunk(&mut self, delta: openai::Delta, finish_reason: Option<&'static str>) -> ChunkChoice {
        let logprobs = self.logprobs.as_mut().filter(|logprobs| !logprobs.content.is_empty());
        let logprobs = logprobs.map(std::mem::take);
        ChunkChoice { index: 0, delta, logprobs, finish_reason }
    }

    fn usage(&self, usage: &Usage) -> openai::Usage {
        openai::Usage::new(usage, self.reasoning_tokens)
    }
}

impl Reply for ChatReply {
    fn opening(&mut self) -> Option<String> {
        let delta = openai::Delta {
            role: Some("assistant"),
            content: Some(String::new()),
            ..openai::Delta::default()
        };
        let choice = self.chunk(delta, None);
        Some(self.head.body(choice))
    }

    fn progress(&mut self, progress: PromptProgress) -> String {
        let choice = self.chunk(openai::Delta::default(), None);
        self.head.json(vec![choice], None, None, Some(progress))
    }

    fn prompt_logprobs(&mut self, _: Vec<Logprob>) {}

    fn token(&mut self, id: u32, logprob: Option<Logprob>) -> bool {
        if let (Some(logprobs), Some(logprob)) = (&mut self.logprobs, logprob) {
            let bytes = |id| self.tokenizer.token_bytes(id);
            let top = logprob.top.into_iter().map(|(id, logprob)| TopLogprob {
                token: spell(bytes(id)),
                logprob: finite(logprob),
                bytes: bytes(id).to_vec(),
            });
            logprobs.content.push(TokenLogprob {
                token: spell(bytes(id)),
                logprob: finite(logprob.logprob),
                bytes: bytes(id).to_vec(),
                top_logprobs: top.collect(),
            });
        }
        let was_reasoning = self.in_reasoning;
        let text = self.detokenizer.push(id);
        let deltas = self.parser.push(&text);
        self.take(deltas);
        self.reasoning_tokens += usize::from(was_reasoning && self.in_reasoning);
        self.detokenizer.stopped().is_some()
    }

    fn chunks(&mut self) -> Vec<String> {
        let mut chunks = Vec::new();
        for delta in std::mem::take(&mut self.deltas) {
            let mut wire = openai::Delta::default();
            match delta {
                Delta::Reasoning(text) => wire.reasoning_content = Some(text),
                Delta::Content(text) => wire.content = Some(text),
                Delta::ToolCall { index, name } => wire.tool_calls.push(CallDelta {
                    index,
                    id: Some(call_id()),
                    kind: Some("function"),
                    function: FunctionDelta { name: Some(name), arguments: String::new() },
                }),
                Delta::Arguments { index, fragment } => wire.tool_calls.push(CallDelta {
                    index,
                    id: None,
                    kind: None,
                    function: FunctionDelta { name: None, arguments: fragment },
                }),
                Delta::ToolCallEnd { .. } => continue,
            }
            let choice = self.chunk(wire, None);
            chunks.push(self.head.body(choice));
        }
        chunks
    }

    fn end(&mut self, end: End, usage: Usage) -> Vec<String> {
        self.take_rest();
        let mut chunks = self.chunks();
        let finish_reason = self.finish_reason(end);
        let choice = self.chunk(openai::Delta::default(), Some(finish_reason));
        let timings = Some(Timings::from(&usage));
        if self.include_usage {
            chunks.push(self.head.body(choice));
            let usage = Some(self.usage(&usage));
            chunks.push(self.head.json::<ChunkChoice>(vec![], usage, timings, None));
        } else {
            chunks.push(self.head.json(vec![choice], None, timings, None));
        }
        chunks
    }

    fn whole(&mut self, end: End, usage: Usage) -> String {
        self.take_rest();
        let mut reply = reply::Reply::default();
        reply.extend(std::mem::take(&mut self.deltas));
        let tool_calls: Vec<_> = reply
            .tool_calls
            .into_iter()
            .map(|call| ReplyCall {
                id: call_id(),
                kind: "function",
                function: ReplyFunction { name: call.name, arguments: call.arguments },
            })
            .collect();
        let only_calls = reply.content.is_empty() && !tool_calls.is_empty();
        let choice = ChatChoice {
            index: 0,
            message: openai::Reply {
                role: "assistant",
                content: (!only_calls).then_some(reply.content),
                reasoning_content: Some(reply.reasoning).filter(|text| !text.is_empty()),
                tool_calls,
                refusal: None,
            },
            logprobs: self.logprobs.take(),
            finish_reason: self.finish_reason(end),
        };
        let timings = Some(Timings::from(&usage));
        self.head.json(vec![choice], Some(self.usage(&usage)), timings, None)
    }
}

fn call_id() -> String {
    format!("call_{}", openai::token())
}
