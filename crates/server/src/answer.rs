//! Drives a generation to its answer: a stream of server-sent events, or one whole body.
//!
//! What the answers look like is the business of an endpoint's [`Reply`]; this file knows events,
//! clocks and clients that go away.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use lily_engine::{Event, FinishReason, Logprob, Sampling, Usage};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

use crate::error::Error;
use crate::generate::Generation;
use crate::openai::PromptProgress;
use crate::{App, Served, Settings};

/// How an endpoint puts tokens into answers. What has been taken in and not given out by
/// [`Reply::chunks`] is in the next chunks, or in [`Reply::end`] or [`Reply::whole`]: a whole
/// answer is a stream of which no chunk was taken.
pub trait Reply: Send + 'static {
    /// What opens a stream, before anything is computed.
    fn opening(&mut self) -> Option<String>;
    /// A chunk that tells how far the prompt is.
    fn progress(&mut self, progress: PromptProgress) -> String;
    /// Takes in the log-probabilities of some more of the prompt.
    fn prompt_logprobs(&mut self, logprobs: Vec<Logprob>);
    /// Takes in a token. True: a stop string has ended the reply.
    fn token(&mut self, id: u32, logprob: Option<Logprob>) -> bool;
    /// Chunks of what is new, in JSON.
    fn chunks(&mut self) -> Vec<String>;
    /// The last chunks of a stream, in JSON.
    fn end(&mut self, end: End, usage: Usage) -> Vec<String>;
    /// The whole answer, in JSON.
    fn whole(&mut self, end: End, usage: Usage) -> String;
}

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model, or a stop string, ended it.
    Stop,
    /// It is as long as it may be.
    Length,
}

/// A request that has been understood.
pub struct Prepared<R> {
    /// What the model is to continue.
    pub prompt: Vec<u32>,
    /// The field that the prompt was made of, for errors.
    pub param: &'static str,
    pub sampling: Sampling,
    pub max_tokens: Option<usize>,
    pub logprobs: Option<usize>,
    pub prompt_logprobs: bool,
    /// Whether the answer is a stream.
    pub stream: bool,
    /// Whether its chunks tell how far the prompt is.
    pub progress: bool,
    pub reply: R,
}

impl<R: Reply> Prepared<R> {
    /// Has the engine compute it. A stream is returned before anything is computed.
    pub async fn answer(self, app: &App, served: &Served) -> Result<Response, Error> {
        let generation = Generation::submit(&served.engine, self.prompt, |request| {
            request.sampling = self.sampling;
            request.max_tokens = self.max_tokens;
            request.logprobs = self.logprobs;
            request.prompt_logprobs = self.prompt_logprobs;
            request.stop_ids = served.stop_ids.clone();
        })
        .map_err(|error| Error::from_engine(error, self.param))?;
        let answer = Answer { generation, reply: self.reply, tokens: 0, stopped: false };
        let ending = app.ending();
        match self.stream {
            true => Ok(answer.stream(Pace::new(app.settings(), self.progress), ending)),
            false => answer.whole(ending).await,
        }
    }
}

/// A generation and what becomes of its tokens.
struct Answer<R> {
    generation: Generation,
    reply: R,
    /// Tokens of the reply so far.
    tokens: usize,
    /// A stop string was found; what the engine still sends is not part of the reply.
    stopped: bool,
}

/// What a client of a stream can rely on, and for how long it is waited for.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Longest silence: then a comment is sent.
    keep_alive: Duration,
    /// How long a client may not read before it counts as gone.
    stall: Duration,
    progress: bool,
}

impl Pace {
    fn new(settings: &Settings, progress: bool) -> Pace {
        Pace { keep_alive: settings.keep_alive, stall: settings.stall, progress }
    }
}

/// Comes true when replies have to end.
type Ending = watch::Receiver<bool>;

async fn ended(ending: &mut Ending) {
    if ending.wait_for(|ending| *ending).await.is_err() {
        // Nobody is left who could end it.
        std::future::pending().await
    }
}

fn ended_by_server() -> Error {
    Error::Unavailable("the server is shutting down".to_owned())
}

impl<R: Reply> Answer<R> {
    /// Takes in an event that is not about progress; returns the end if this is the last.
    fn take(&mut self, event: Event) -> Result<Option<(End, Usage)>, Error> {
        match event {
            Event::Prefill { .. } => {}
            Event::PromptLogprobs(logprobs) => self.reply.prompt_logprobs(logprobs),
            Event::Token { .. } if self.stopped => {}
            Event::Token { id, logprob } => {
                self.tokens += 1;
                if self.reply.token(id, logprob) {
                    // The engine's last event, with the times, comes within a layer's work.
                    self.stopped = true;
                    self.generation.cancel();
                }
            }
            Event::Finished { reason, mut usage } => {
                let end = match reason {
                    _ if self.stopped => {
                        usage.completion = self.tokens;
                        End::Stop
                    }
                    FinishReason::Stop => End::Stop,
                    FinishReason::Length | FinishReason::Deadline => End::Length,
                    FinishReason::Cancelled => return Err(ended_by_server()),
                };
                return Ok(Some((end, usage)));
            }
            Event::Failed(error) => return Err(Error::from_engine(error, "prompt")),
        }
        Ok(None)
    }

    /// The answer in one body. Dropping this future cancels the generation.
    async fn whole(mut self, mut ending: Ending) -> Result<Response, Error> {
        loop {
            let event = tokio::select! {
                event = self.generation.next() => event,
                () = ended(&mut ending) => return Err(ended_by_server()),
            };
            if let Some((end, usage)) = self.take(event)? {
                let body = self.reply.whole(end, usage);
                return Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response());
            }
        }
    }

    /// The answer as a stream: returns at once, and cancels the generation when the client goes.
    fn stream(self, pace: Pace, ending: Ending) -> Response {
        let (sender, chunks) = mpsc::channel(16);
        tokio::spawn(async move {
            let mut stream = Stream { sender, pace, last: Instant::now() };
            // An error here is that nobody reads any more.
            let _ = self.run(&mut stream, ending).await;
        });
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
            // Asks proxies in between not to collect chunks.
            (header::HeaderName::from_static("x-accel-buffering"), "no"),
        ];
        (headers, Body::from_stream(Chunks(chunks))).into_response()
    }

    async fn run(mut self, stream: &mut Stream, mut ending: Ending) -> Result<(), Gone> {
        if let Some(opening) = self.reply.opening() {
            stream.data(&opening).await?;
        }
        let began = Instant::now();
        // How far the prompt is, for the comments.
        let mut prompt = (0, 0);
        loop {
            let event = tokio::select! {
                event = self.generation.next() => event,
                () = sleep_until(stream.last + stream.pace.keep_alive) => {
                    stream.send(format!(": keepalive {}/{}\n\n", prompt.0, prompt.1)).await?;
                    continue;
                }
                () = stream.sender.closed() => return Err(Gone),
                () = ended(&mut ending) => {
                    return stream.data(&ended_by_server().json().to_string()).await;
                }
            };
            if let Event::Prefill { done, total, cached } = event {
                prompt = (done, total);
                if stream.pace.progress {
                    let time_ms = began.elapsed().as_millis() as u64;
                    let progress =
                        PromptProgress { total, cache: cached, processed: done, time_ms };
                    stream.data(&self.reply.progress(progress)).await?;
                }
            }
            match self.take(event) {
                Ok(None) => {
                    for chunk in self.reply.chunks() {
                        stream.data(&chunk).await?;
                    }
                }
                Ok(Some((end, usage))) => {
                    for chunk in self.reply.end(end, usage) {
                        stream.data(&chunk).await?;
                    }
                    return stream.data("[DONE]").await;
                }
                Err(error) => return stream.data(&error.json().to_string()).await,
            }
        }
    }
}

/// Nobody reads the stream any more.
struct Gone;

/// The writing end of a stream.
struct Stream {
    sender: mpsc::Sender<Bytes>,
    pace: Pace,
    /// When something was last sent.
    last: Instant,
}

impl Stream {
    async fn data(&mut self, json: &str) -> Result<(), Gone> {
        self.send(format!("data: {json}\n\n")).await
    }

    async fn send(&mut self, text: String) -> Result<(), Gone> {
        let sent = timeout(self.pace.stall, self.sender.send(text.into())).await;
        self.last = Instant::now();
        sent.map_err(|_| Gone)?.map_err(|_| Gone)
    }
}

/// The reading end, as a body.
struct Chunks(mpsc::Receiver<Bytes>);

impl futures_core::Stream for Chunks {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|chunk| chunk.map(Ok))
    }
}
