//! The OpenAI-compatible HTTP API: HTTP and nothing else.
//!
//! [`App`] is what the handlers know, [`app`] is the router made of it, [`serve()`] runs it on a
//! socket. A request goes through `routes.rs` and `body.rs` (JSON), `params.rs` (what fields may
//! hold), `chat.rs` or `completions.rs` (text to tokens and back), `generate.rs` (the engine) and
//! `answer.rs` (streams and whole bodies).
#![forbid(unsafe_code)]

mod answer;
mod auth;
mod body;
mod chat;
mod completions;
mod error;
mod generate;
mod openai;
mod params;
mod routes;
mod serve;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lily_engine::{Engine, Sampling};
use lily_text::Tokenizer;
use lily_text::chat::Template;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

pub use error::Error;
pub use routes::app;
pub use serve::serve;

/// How a server behaves, whatever it serves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What clients must send as `Authorization: Bearer KEY` or `x-api-key: KEY`; `None`: nothing.
    pub api_key: Option<String>,
    /// Origins, besides local ones, whose pages may use the server, as in `https://chat.example`;
    /// `*` is any.
    pub allow_origins: Vec<String>,
    /// Largest request body, in bytes.
    pub body_limit: usize,
    /// How long a request body may take to arrive.
    pub body_timeout: Duration,
    /// Longest silence in a stream.
    pub keep_alive: Duration,
    /// How long a client may leave a stream unread before its request is cancelled.
    pub stall: Duration,
    /// How long replies may go on when the server is to shut down.
    pub grace: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            api_key: None,
            allow_origins: Vec::new(),
            body_limit: 16 << 20,
            body_timeout: Duration::from_secs(60),
            keep_alive: Duration::from_secs(5),
            stall: Duration::from_secs(120),
            grace: Duration::from_secs(10),
        }
    }
}

/// A loaded model and all that its requests need.
pub struct Served {
    /// What the API calls the model.
    pub id: String,
    /// What computes it.
    pub engine: Engine,
    /// The checkpoint's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The checkpoint's chat template.
    pub template: Template,
    /// How tokens are chosen where a request does not say.
    pub sampling: Sampling,
    /// Ids that end a reply.
    pub stop_ids: Vec<u32>,
}

impl Served {
    /// Refuses text that cannot fit, before tokens are made of it: that takes a hundred times the
    /// text's memory. Normalisation (NFC) shortens a text to a third at the most.
    fn check_length(&self, text: &str, param: &'static str) -> Result<(), Error> {
        let max_seq = self.engine.limits().max_seq;
        let prompt = text.len() / (3 * self.tokenizer.longest());
        match prompt > max_seq {
            true => Err(Error::ContextLength { param, prompt, bound: true, max_seq }),
            false => Ok(()),
        }
    }
}

/// How many requests are rendered and tokenised at once: it takes memory, and a core each. The
/// others wait for their turn, and are forgotten if their client leaves meanwhile.
const PREPARED_AT_ONCE: usize = 2;

/// What all handlers share. Clones are the same server.
#[derive(Clone)]
pub struct App(Arc<Shared>);

struct Shared {
    settings: Settings,
    /// Empty while loading; then what is served, or why nothing is.
    served: OnceLock<Result<Loaded, String>>,
    /// See [`PREPARED_AT_ONCE`].
    preparing: Arc<Semaphore>,
    /// True: replies have to end.
    ending: watch::Sender<bool>,
}

/// What is served, since when.
struct Loaded {
    served: Arc<Served>,
    /// In seconds since 1970.
    since: u64,
}

impl App {
    /// A server whose model is still being loaded: it is alive, and answers 503.
    pub fn loading(settings: Settings) -> App {
        App(Arc::new(Shared {
            settings,
            served: OnceLock::new(),
            preparing: Arc::new(Semaphore::new(PREPARED_AT_ONCE)),
            ending: watch::Sender::new(false),
        }))
    }

    /// From now on requests are served. Panics if this or [`App::failed`] was called before.
    pub fn ready(&self, served: Served) {
        self.set(Ok(Loaded { served: Arc::new(served), since: now() }));
    }

    /// There will be no model; requests are told why. Panics if this or [`App::ready`] was called
    /// before.
    pub fn failed(&self, message: String) {
        self.set(Err(message));
    }

    fn set(&self, served: Result<Loaded, String>) {
        assert!(self.0.served.set(served).is_ok(), "a server loads one model, once");
    }

    /// Waits until this request may be prepared. Who prepares it holds the permit, also when the
    /// client has left meanwhile.
    async fn turn(&self) -> OwnedSemaphorePermit {
        let preparing = self.0.preparing.clone();
        preparing.acquire_owned().await.expect("the semaphore is never closed")
    }

    fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// The model; errs while there is none.
    fn served(&self) -> Result<&Arc<Served>, Error> {
        Ok(&self.loaded()?.served)
    }

    fn loaded(&self) -> Result<&Loaded, Error> {
        match self.0.served.get() {
            None => Err(Error::Loading),
            Some(Ok(loaded)) => Ok(loaded),
            Some(Err(message)) => Err(Error::Unavailable(message.clone())),
        }
    }

    /// Comes true when replies have to end.
    fn ending(&self) -> watch::Receiver<bool> {
        self.0.ending.subscribe()
    }

    /// Ends all replies, streams with an error that says why.
    fn end_replies(&self) {
        self.0.ending.send_replace(true);
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
