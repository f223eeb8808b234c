//! What the tests of the server share: a model that says what it is told to, and clients.
#![allow(dead_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use lily_engine::{Engine, Forward, Load, Options, Outputs, Span};
use lily_server::{App, Served, Settings, app};
use lily_text::Tokenizer;
use lily_text::chat::Template;
use serde_json::Value;
use tower::ServiceExt;

/// The tokenizer of the embedded demo.
pub static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    Arc::new(Tokenizer::from_bytes(include_bytes!("../../../../demo/tokenizer.json")).unwrap())
});

/// The chat template of the embedded demo.
const TEMPLATE: &str = include_str!("../../../../demo/chat_template.jinja");

pub fn id(spelling: &str) -> u32 {
    TOKENIZER.added(spelling).unwrap()
}

/// A model that repeats the last user's message and then ends the turn; without any message, it
/// repeats what it has read at half the speed for ever. A message with `!panic` makes it panic, one with
/// `!fail` fails.
pub struct Parrot {
    pub slots: usize,
    pub max_seq: usize,
    pub chunk: usize,
    pub layers: usize,
    pub layer_time: Duration,
    /// Layers run so far, for the tests to see.
    pub layers_run: Arc<AtomicUsize>,
    pub histories: Vec<Option<Vec<u32>>>,
    pub logits: Vec<f32>,
}

impl Default for Parrot {
    fn default() -> Parrot {
        Parrot {
            slots: 4,
            max_seq: 2000,
            chunk: 64,
            layers: 2,
            layer_time: Duration::ZERO,
            layers_run: Arc::default(),
            histories: Vec::new(),
            logits: Vec::new(),
        }
    }
}

impl Parrot {
    pub fn engine(mut self) -> Engine {
        self.histories = vec![Some(Vec::new()); self.slots];
        Engine::start(self, Options { queue: 32, known_ids: TOKENIZER.len() })
    }

    /// What comes after `history`.
    fn next(history: &[u32]) -> Result<u32, String> {
        let (start, end) = (id("<|im_start|>"), id("<|im_end|>"));
        let user = TOKENIZER.encode_plain("user\n");
        let opens = |at: usize| history[at] == start && history[at + 1..].starts_with(&user);
        let Some(turn) = (0..history.len()).rev().find(|&at| opens(at)) else {
            return Ok(history[history.len() / 2]);
        };
        let message = &history[turn + 1 + user.len()..];
        let message = &message[..message.iter().position(|&id| id == end).unwrap()];
        let text = TOKENIZER.decode(message);
        assert!(!text.contains("!panic"), "told to panic");
        if text.contains("!fail") {
            return Err("told to fail".to_owned());
        }
        // The reply begins behind the generation prompt, whose end the test's template marks.
        let prompt = history.iter().rposition(|&t| t == start).unwrap();
        let opening = TOKENIZER.encode_plain("assistant\n");
        let mut said = &history[prompt + 1 + opening.len()..];
        for skipped in ["<think>\n\n</think>\n\n", "<think>\n"] {
            let skipped = TOKENIZER.encode(skipped);
            if said.starts_with(&skipped) {
                said = &said[skipped.len()..];
                break;
            }
        }
        Ok(message.get(said.len()).copied().unwrap_or(end))
    }
}

impl Forward for Parrot {
    fn vocab(&self) -> usize {
        TOKENIZER.len() + 10
    }
    fn slots(&self) -> usize {
        self.slots
    }
    fn max_seq(&self) -> usize {
        self.max_seq
    }
    fn chunk(&self) -> usize {
        self.chunk
    }
    fn outputs(&self) -> usize {
        self.slots.max(8)
    }
    fn reset(&mut self, slot: usize) {
        self.histories[slot] = Some(Vec::new());
    }
    fn step(
        &mut self,
        spans: &[Span],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<&[f32]>, String> {
        let mut histories: Vec<_> = spans
            .iter()
            .map(|span| self.histories[span.slot].take().expect("a sound slot, not shared"))
            .collect();
        for _ in 0..self.layers {
            if !go_on() {
                return Ok(None);
            }
            self.layers_run.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(self.layer_time);
        }
        self.logits.clear();
        for (span, history) in spans.iter().zip(&mut histories) {
            for (i, &id) in span.ids.iter().enumerate() {
                history.push(id);
                let last = i + 1 == span.ids.len();
                if span.outputs == Outputs::All || span.outputs == Outputs::Last && last {
                    let row = self.logits.len();
                    self.logits.resize(row + TOKENIZER.len() + 10, 0.0);
                    // Prompts whose log-probabilities are asked for are cut anywhere.
                    let next = if last { Parrot::next(history)? } else { history[0] };
                    self.logits[row + next as usize] = 30.0;
                }
            }
        }
        for (span, history) in spans.iter().zip(histories) {
            self.histories[span.slot] = Some(history);
        }
        Ok(Some(&self.logits))
    }
}

/// What is served in the tests, with `engine` behind it.
pub fn served(engine: &Engine) -> Served {
    Served {
        id: "test/parrot".to_owned(),
        engine: engine.clone(),
        tokenizer: TOKENIZER.clone(),
        template: Template::new(TEMPLATE).unwrap(),
        sampling: Default::default(),
        stop_ids: vec![id("<|endoftext|>"), id("<|im_end|>")],
    }
}

/// A server that is ready.
pub fn ready(engine: &Engine, settings: Settings) -> App {
    let state = App::loading(settings);
    state.ready(served(engine));
    state
}

pub fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

pub fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    request.body(body.into()).unwrap()
}

/// Sends one request without a socket.
pub async fn send(state: &App, request: Request<Body>) -> Response<Body> {
    app(state.clone()).oneshot(request).await.unwrap()
}

pub async fn text_of(response: Response<Body>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The status and the JSON of the answer.
pub async fn json(state: &App, request: Request<Body>) -> (StatusCode, Value) {
    let response = send(state, request).await;
    let (status, text) = (response.status(), text_of(response).await);
    (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
}

/// Waits for the engine to have nothing to do, and says how long that took.
pub async fn settle(engine: &Engine) -> Duration {
    let begun = Instant::now();
    while engine.load() != Load::default() {
        assert!(begun.elapsed() < Duration::from_secs(20), "still busy: {:?}", engine.load());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    begun.elapsed()
}

/// A server on a socket of its own.
pub struct Running {
    pub address: std::net::SocketAddr,
    pub engine: Engine,
    shutdown: Option<tokio::sync::oneshot::Sender<()>>,
    serving: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Running {
    pub async fn start(parrot: Parrot, settings: Settings) -> Running {
        let engine = parrot.engine();
        let state = ready(&engine, settings);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, asked) = tokio::sync::oneshot::channel();
        let serving = tokio::spawn(lily_server::serve(listener, state, async {
            let _ = asked.await;
        }));
        Running { address, engine, shutdown: Some(shutdown), serving }
    }

    /// Asks the server to end.
    pub fn ask_to_end(&mut self) {
        self.shutdown.take().unwrap().send(()).unwrap();
    }

    /// Waits until it has, and says how long that took.
    pub async fn ended(self) -> Duration {
        let begun = Instant::now();
        tokio::time::timeout(Duration::from_secs(20), self.serving)
            .await
            .expect("the server ends")
            .unwrap()
            .unwrap();
        begun.elapsed()
    }

    /// Whether a new client is served.
    pub async fn is_well(&self) {
        let mut client = Client::connect(self).await;
        client.write("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
        let answer = client.rest().await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    }
}

/// A bare connection.
pub struct Client {
    pub socket: tokio::net::TcpStream,
    /// Everything read so far.
    pub seen: String,
}

impl Client {
    pub async fn connect(server: &Running) -> Client {
        let socket = tokio::net::TcpStream::connect(server.address).await.unwrap();
        Client { socket, seen: String::new() }
    }

    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        use tokio::io::AsyncWriteExt;
        self.socket.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Sends a request with a JSON body.
    pub async fn post(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        self.write(head + &body).await;
    }

    /// Reads some more; false at the end.
    pub async fn read(&mut self) -> bool {
        use tokio::io::AsyncReadExt;
        let mut buffer = [0; 4096];
        let read = tokio::time::timeout(Duration::from_secs(20), self.socket.read(&mut buffer));
        // A reset is an end as well.
        let n = read.await.expect("bytes or an end within 20 s").unwrap_or(0);
        self.seen += &String::from_utf8_lossy(&buffer[..n]);
        n > 0
    }

    /// Reads until `text` has been seen.
    pub async fn until(&mut self, text: &str) {
        while !self.seen.contains(text) {
            assert!(self.read().await, "the end, without {text:?}: {}", self.seen);
        }
    }

    /// Reads to the end.
    pub async fn rest(&mut self) -> &str {
        while self.read().await {}
        &self.seen
    }
}
