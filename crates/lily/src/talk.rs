//! Replies of the model on the terminal, for `run` and `chat`: content goes to stdout as it comes;
//! reasoning (dimmed on a terminal), progress and statistics go to stderr.

use crate::args::{DeviceArgs, MemoryArgs, ModelArgs, SamplingArgs};
use crate::error::Error;
use crate::load::{self, CHUNK, Source};
use crate::texts::Texts;
use crate::{interrupt, progress};
use clap::Args;
use lily_engine::{Cancel, Engine, Event, FinishReason, Request, Sampling, Usage};
use lily_text::chat::{self, Message, Role};
use lily_text::reply::{Delta, Parser, Reply};
use lily_text::stream::Detokenizer;
use std::io::{IsTerminal, Write};
use std::sync::mpsc;

/// How a reply is made and shown.
#[derive(Args, Clone, Debug)]
pub struct ReplyArgs {
    /// Instructions that precede the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Answer at once, without reasoning first
    #[arg(long)]
    no_thinking: bool,
    /// Most tokens of a reply, reasoning included [default: what --max-seq leaves]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_tokens: Option<usize>,
    /// End the reply before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Show neither reasoning nor statistics
    #[arg(long, short)]
    quiet: bool,
}

/// A loaded model that one person talks to.
pub struct Talk {
    /// Instructions that precede every conversation.
    pub system: Option<String>,
    engine: Engine,
    texts: Texts,
    sampling: Sampling,
    args: ReplyArgs,
}

/// What came of a request.
pub struct Said {
    /// The reply, to be part of the conversation.
    pub message: Message,
    /// Why it ended.
    pub reason: FinishReason,
}

impl Talk {
    /// Loads what the flags name.
    pub fn open(
        model: &ModelArgs,
        device: &DeviceArgs,
        memory: &MemoryArgs,
        args: ReplyArgs,
        sampling: &SamplingArgs,
    ) -> Result<Talk, Error> {
        let source = Source::open(model)?;
        let options = load::options(source.config(), memory, 1)?;
        let texts = Texts::open(&source)?;
        let sampling = texts.defaults.with(sampling)?;
        let model = load::model(&source, device, options, memory.force)?;
        let known_ids = texts.tokenizer.len();
        let engine = Engine::start(model, lily_engine::Options { queue: 1, known_ids });
        Ok(Talk { system: args.system.clone(), engine, texts, sampling, args })
    }

    /// Asks for the next message of a conversation and shows it as it comes. Ctrl-C ends it early,
    /// as [`FinishReason::Cancelled`].
    pub fn reply(&mut self, conversation: &[Message]) -> Result<Said, Error> {
        let system = self.system.iter().map(|text| Message::new(Role::System, text.as_str()));
        let messages: Vec<Message> = system.chain(conversation.iter().cloned()).collect();
        let options =
            chat::Options { thinking: !self.args.no_thinking, ..chat::Options::default() };
        let prompt = self.texts.template.render(&messages, &[], &options)?;
        let in_reasoning = prompt.text().trim_end().ends_with("<think>");
        let mut shown = Shown::new(self.args.quiet);
        let mut parser = Parser::new(&[], in_reasoning);
        let mut detokenizer =
            Detokenizer::new(&*self.texts.tokenizer, self.args.stop.iter().cloned());
        let mut reply = Reply::default();

        let cancel = Cancel::default();
        interrupt::guard(&cancel);
        let events = self.submit(self.texts.tokenizer.encode_prompt(&prompt), &cancel)?;
        let bar = progress::count("reading the prompt", 0);
        let (reason, usage) = loop {
            match events.recv() {
                Ok(Event::Prefill { done, total, .. }) if total > CHUNK && done < total => {
                    bar.set_length(total as u64);
                    bar.set_position(done as u64);
                }
                Ok(Event::Token { id, .. }) => {
                    bar.finish_and_clear();
                    let text = detokenizer.push(id);
                    if let Err(error) = take(parser.push(&text), &mut reply, &mut shown) {
                        cancel.cancel();
                        return Err(error);
                    }
                    if detokenizer.stopped().is_some() {
                        cancel.cancel();
                    }
                }
                Ok(Event::Finished { reason, usage }) => break (reason, usage),
                Ok(Event::Failed(error)) => return Err(error.into()),
                Ok(_) => {}
                Err(mpsc::RecvError) => {
                    return Err(Error::Failed("the engine went away without a word".into()));
                }
            }
        };
        interrupt::release();
        bar.finish_and_clear();
        let rest = detokenizer.finish();
        take(parser.push(&rest), &mut reply, &mut shown)?;
        take(parser.finish(), &mut reply, &mut shown)?;
        shown.end()?;
        let reason = match detokenizer.stopped() {
            Some(_) => FinishReason::Stop,
            None => reason,
        };
        if !self.args.quiet {
            say!("{}", statistics(reason, &usage));
        }
        let mut message = Message::new(Role::Assistant, reply.content);
        message.reasoning = Some(reply.reasoning).filter(|text| !text.is_empty());
        Ok(Said { message, reason })
    }

    fn submit(&self, prompt: Vec<u32>, cancel: &Cancel) -> Result<mpsc::Receiver<Event>, Error> {
        let (send, events) = mpsc::channel();
        self.engine.submit(Request {
            max_tokens: self.args.max_tokens,
            sampling: self.sampling.clone(),
            stop_ids: self.texts.defaults.stop_ids.clone(),
            cancel: cancel.clone(),
            ..Request::new(prompt, move |event| {
                // Nobody listens any more only after the request was cancelled.
                let _ = send.send(event);
            })
        })?;
        Ok(events)
    }
}

/// Shows what is new, and keeps it.
fn take(deltas: Vec<Delta>, reply: &mut Reply, shown: &mut Shown) -> Result<(), Error> {
    for delta in deltas {
        shown.show(&delta)?;
        reply.add(delta);
    }
    Ok(())
}

/// What has been printed, and how the next piece goes on.
struct Shown {
    quiet: bool,
    dim: bool,
    /// In the middle of reasoning.
    reasoning: bool,
    /// The last character of the content is not a line break.
    open_line: bool,
}

impl Shown {
    fn new(quiet: bool) -> Shown {
        let dim = std::io::stderr().is_terminal();
        Shown { quiet, dim, reasoning: false, open_line: false }
    }

    fn show(&mut self, delta: &Delta) -> Result<(), Error> {
        match delta {
            Delta::Reasoning(text) if !self.quiet => {
                if !self.reasoning && self.dim {
                    say_on!("\x1b[2m");
                }
                self.reasoning = true;
                say_on!("{text}");
            }
            Delta::Content(text) if !text.is_empty() => {
                self.end_reasoning();
                self.open_line = !text.ends_with('\n');
                let mut stdout = std::io::stdout().lock();
                stdout.write_all(text.as_bytes())?;
                stdout.flush()?;
            }
            _ => {}
        }
        Ok(())
    }

    fn end_reasoning(&mut self) {
        if std::mem::take(&mut self.reasoning) {
            say!("{}\n", if self.dim { "\x1b[0m" } else { "" });
        }
    }

    fn end(&mut self) -> Result<(), Error> {
        self.end_reasoning();
        if self.open_line {
            writeln!(std::io::stdout())?;
        }
        Ok(())
    }
}

/// One line about what a reply took.
fn statistics(reason: FinishReason, usage: &Usage) -> String {
    let rate = |tokens: usize, ms: f64| tokens as f64 / (ms / 1e3).max(1e-9);
    let end = match reason {
        FinishReason::Stop => "",
        FinishReason::Length => "; cut off at its longest length (--max-tokens, --max-seq)",
        FinishReason::Cancelled => "; interrupted",
        FinishReason::Deadline => "; out of time",
    };
    format!(
        "[prompt: {} tokens in {:.2} s, {:.1}/s; reply: {} tokens in {:.2} s, {:.1}/s{end}]",
        usage.prompt,
        usage.prefill_ms / 1e3,
        rate(usage.prompt - usage.cached, usage.prefill_ms),
        usage.completion,
        usage.decode_ms / 1e3,
        rate(usage.completion, usage.decode_ms),
    )
}
