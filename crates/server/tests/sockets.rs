//! Clients as they are: they vanish, stall, send garbage, and the server goes on. Raw sockets.

mod common;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{Client, Parrot, Running, settle};
use lily_engine::Load;
use lily_server::Settings;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::time::sleep;

const PATH: &str = "/v1/completions";

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// One step takes 4 s: only a cancellation between layers can be quick.
fn slow() -> Parrot {
    Parrot { slots: 1, layers: 800, layer_time: ms(5), ..Parrot::default() }
}

/// A step takes some 10 ms.
fn steady(slots: usize) -> Parrot {
    Parrot { slots, layer_time: ms(5), ..Parrot::default() }
}

fn endless(stream: bool) -> Value {
    json!({"prompt": "on and on and on", "stream": stream})
}

#[tokio::test]
async fn a_client_that_vanishes_during_prefill_frees_the_slot_within_layers() {
    for stream in [false, true] {
        let parrot = slow();
        let layers = parrot.layers_run.clone();
        let server = Running::start(parrot, Settings::default()).await;
        let mut client = Client::connect(&server).await;
        client.post(PATH, &endless(stream)).await;
        while layers.load(Ordering::Relaxed) < 5 {
            sleep(ms(1)).await;
        }
        drop(client);
        let took = settle(&server.engine).await;
        assert!(took < ms(1000), "{took:?} of a step of 4 s");
        server.is_well().await;
    }
}

#[tokio::test]
async fn a_client_that_vanishes_during_a_reply_frees_the_slot_at_once() {
    for (stream, reset) in [(true, false), (true, true), (false, false), (false, true)] {
        let server = Running::start(steady(1), Settings::default()).await;
        let mut client = Client::connect(&server).await;
        client.post(PATH, &endless(stream)).await;
        if stream {
            for _ in 0..3 {
                client.until("data: ").await;
                client.seen.clear();
            }
        } else {
            sleep(ms(100)).await;
        }
        assert_eq!(server.engine.load(), Load { waiting: 0, running: 1 });
        if reset {
            client.socket.set_zero_linger().unwrap();
        }
        drop(client);
        let took = settle(&server.engine).await;
        assert!(took < ms(1000), "{took:?}; the reply would have taken 20 s");
        server.is_well().await;
    }
}

#[tokio::test]
async fn a_client_that_vanishes_while_it_waits_leaves_the_queue() {
    for stream in [false, true] {
        let server = Running::start(steady(1), Settings::default()).await;
        let mut first = Client::connect(&server).await;
        first.post(PATH, &endless(true)).await;
        first.until("data: ").await;
        let mut second = Client::connect(&server).await;
        second.post(PATH, &endless(stream)).await;
        while server.engine.load().waiting == 0 {
            sleep(ms(1)).await;
        }
        drop(second);
        let begun = Instant::now();
        while server.engine.load().waiting > 0 {
            assert!(begun.elapsed() < ms(1000));
            sleep(ms(1)).await;
        }
        assert_eq!(server.engine.load().running, 1, "the first goes on");
    }
}

#[tokio::test]
async fn a_client_that_has_closed_its_side_counts_as_gone() {
    let server = Running::start(slow(), Settings::default()).await;
    let mut client = Client::connect(&server).await;
    client.post(PATH, &endless(true)).await;
    client.until("text/event-stream").await;
    client.socket.shutdown().await.unwrap();
    client.rest().await;
    assert!(settle(&server.engine).await < ms(1000));
    server.is_well().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_given_up() {
    let settings = Settings { stall: ms(300), ..Settings::default() };
    // More than the buffers of two sockets hold.
    let parrot = Parrot { slots: 1, max_seq: 20_000, ..Parrot::default() };
    let layers = parrot.layers_run.clone();
    let server = Running::start(parrot, settings).await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let socket = socket.connect(server.address).await.unwrap();
    let mut client = Client { socket, seen: String::new() };
    let body = json!({"prompt": "on and on and on", "stream": true, "logprobs": 20});
    client.post(PATH, &body).await;
    client.until("data: ").await;
    settle(&server.engine).await;
    let tokens = layers.load(Ordering::Relaxed) / 2;
    assert!(tokens < 19_000, "it has all been computed for nobody");
    server.is_well().await;
}

#[tokio::test]
async fn a_stream_begins_at_once_and_is_never_silent_for_long() {
    let settings = Settings { keep_alive: ms(100), ..Settings::default() };
    let parrot = Parrot { layers: 40, layer_time: ms(25), chunk: 8, ..Parrot::default() };
    let server = Running::start(parrot, settings).await;
    let mut client = Client::connect(&server).await;
    let begun = Instant::now();
    let words = "a prompt that is longer than one chunk, so that there is progress to tell";
    client.post(PATH, &json!({"prompt": words, "stream": true, "max_tokens": 1})).await;
    client.until("x-accel-buffering: no").await;
    assert!(begun.elapsed() < ms(900), "headers after {:?}, a step takes 1 s", begun.elapsed());
    let mut last = Instant::now();
    let mut longest = Duration::ZERO;
    while !client.seen.contains("[DONE]") {
        assert!(client.read().await);
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    assert!(longest < ms(800), "silent for {longest:?}");
    let comments: Vec<_> = client.seen.lines().filter(|l| l.starts_with(": keepalive ")).collect();
    assert!(comments.len() >= 5, "{comments:?}");
    assert!(comments.iter().any(|comment| comment.contains(" 8/")), "{comments:?}");
    let first = client.seen.find(": keepalive").unwrap();
    assert!(first < client.seen.find("data: ").unwrap());
}

#[tokio::test]
async fn progress_is_told_to_those_who_ask() {
    let parrot = Parrot { chunk: 8, ..Parrot::default() };
    let server = Running::start(parrot, Settings::default()).await;
    let mut client = Client::connect(&server).await;
    let body = json!({"prompt": "one two three four five six seven eight nine ten eleven twelve",
        "stream": true, "max_tokens": 1, "return_progress": true});
    client.post(PATH, &body).await;
    client.until("[DONE]").await;
    let data = client.seen.lines().filter_map(|line| line.strip_prefix("data: {"));
    let events = data.map(|data| serde_json::from_str::<Value>(&format!("{{{data}")).unwrap());
    let progress: Vec<_> = events.filter_map(|e| e.get("prompt_progress").cloned()).collect();
    let processed: Vec<_> = progress.iter().map(|p| p["processed"].as_u64().unwrap()).collect();
    assert_eq!(processed[..3], [0, 8, 16]);
    assert_eq!(progress.last().unwrap()["processed"], progress[0]["total"]);
}

#[tokio::test]
async fn sixteen_at_once_are_answered_as_one_by_one() {
    let server =
        Running::start(Parrot { chunk: 16, ..Parrot::default() }, Settings::default()).await;
    let bodies: Vec<_> = (0..16)
        .map(|i| {
            let prompt = format!("{i} bottles of {} on the wall", "milk, ".repeat(i % 5 * i));
            json!({"prompt": prompt, "max_tokens": 30 + i, "temperature": 0})
        })
        .collect();
    let ask = async |body: &Value| {
        let mut client = Client::connect(&server).await;
        client.post(PATH, body).await;
        client.until("\"timings\":").await;
        let json = client.seen.split("\r\n\r\n").nth(1).unwrap();
        let text = json.split("\"text\":").nth(1).unwrap().split(",\"logprobs\"").next().unwrap();
        text.to_owned()
    };
    let mut alone = Vec::new();
    for body in &bodies {
        alone.push(ask(body).await);
    }
    let mut together = Vec::new();
    for body in &bodies {
        let mut client = Client::connect(&server).await;
        client.post(PATH, body).await;
        together.push(client);
    }
    for (client, alone) in together.iter_mut().zip(&alone) {
        client.until("\"timings\":").await;
        assert!(client.seen.contains(alone.as_str()), "{} lacks {alone}", client.seen);
    }
}

#[tokio::test]
async fn garbage_is_answered_or_dropped_and_nobody_else_notices() {
    let server = Running::start(Parrot::default(), Settings::default()).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let long = "x".repeat(300 << 10);
    for (bytes, answer) in [
        ("\r\n\r\n\r\nnonsense\r\n\r\n".to_owned(), "HTTP/1.1 400"),
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), "HTTP/1.1 400"),
        (format!("GET /health HTTP/1.1\r\nhost: x\r\nx-long: {long}\r\n\r\n"), "HTTP/1.1 431"),
        (format!("GET /{long} HTTP/1.1\r\nhost: x\r\n\r\n"), "HTTP/1.1 4"),
        (format!("{head}content-length: nine\r\n\r\n{{}}"), "HTTP/1.1 400"),
        (
            format!("{head}content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{{}}"),
            "HTTP/1.1 400",
        ),
        (
            format!("{head}transfer-encoding: chunked\r\n\r\nzz\r\n{{}}\r\n0\r\n\r\n"),
            "HTTP/1.1 400",
        ),
        (format!("{head}content-length: 2\r\n\r\n{{}}this is not HTTP\r\n\r\n"), "HTTP/1.1 400"),
        ("\u{16}\u{3}\u{1}\u{2}\u{0}\u{1}TLS, or nearly".to_owned(), ""),
    ] {
        let mut client = Client::connect(&server).await;
        client.write(&bytes).await;
        client.socket.shutdown().await.unwrap();
        let start: String = bytes.chars().take(60).collect();
        let seen = client.rest().await;
        assert!(seen.starts_with(answer), "{start:?} was answered {seen:?}");
    }
    // Any bytes at all.
    let mut state = 1u64;
    for _ in 0..100 {
        let mut client = Client::connect(&server).await;
        let noise: Vec<u8> = (0..500)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        client.write(&noise).await;
        drop(client);
    }
    server.is_well().await;
}

#[tokio::test]
async fn a_request_behind_another_is_answered_after_it() {
    let server = Running::start(Parrot::default(), Settings::default()).await;
    let mut client = Client::connect(&server).await;
    client.post(PATH, &json!({"prompt": "one two three", "max_tokens": 3})).await;
    client.post(PATH, &json!({"prompt": "one two three", "max_tokens": 4, "stream": true})).await;
    client.write("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    let seen = client.rest().await;
    assert_eq!(seen.matches("HTTP/1.1 200 OK").count(), 3, "{seen}");
    let places =
        ["\"completion_tokens\":3", "[DONE]", "\"status\":\"ok\""].map(|t| seen.find(t).unwrap());
    assert!(places.is_sorted(), "{seen}");
}

#[tokio::test]
async fn bodies_are_bounded_in_size_and_time() {
    let settings = Settings { body_limit: 1000, body_timeout: ms(200), ..Settings::default() };
    let server = Running::start(Parrot::default(), settings).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let full = json!({"prompt": "x".repeat(2000)}).to_string();
    let chunked = format!("{:x}\r\n{full}\r\n0\r\n\r\n", full.len());
    for (rest, answer) in [
        (format!("content-length: {}\r\n\r\n{full}", full.len()), "HTTP/1.1 413"),
        ("content-length: 99999999999\r\n\r\n".to_owned(), "HTTP/1.1 413"),
        (format!("transfer-encoding: chunked\r\n\r\n{chunked}"), "HTTP/1.1 413"),
        ("content-length: 100\r\n\r\n{\"prompt\":".to_owned(), "HTTP/1.1 408"),
    ] {
        let mut client = Client::connect(&server).await;
        client.write(format!("{head}{rest}")).await;
        let seen = client.rest().await;
        assert!(seen.starts_with(answer), "{seen}");
        assert!(seen.contains("\"error\":{\"message\":\"the request body"), "{seen}");
    }
    server.is_well().await;
}

#[tokio::test]
async fn an_engine_that_dies_is_reported_in_the_stream_and_by_health() {
    let server = Running::start(steady(2), Settings::default()).await;
    let mut bystander = Client::connect(&server).await;
    bystander.post(PATH, &endless(true)).await;
    bystander.until("data: ").await;
    let mut culprit = Client::connect(&server).await;
    let turn = "<|im_start|>user\n!panic<|im_end|>\n<|im_start|>assistant\n";
    culprit.post(PATH, &json!({"prompt": turn})).await;
    culprit.until("told to panic").await;
    assert!(culprit.seen.starts_with("HTTP/1.1 503"), "{}", culprit.seen);
    bystander.until("told to panic").await;
    assert!(bystander.seen.contains("data: {\"error\":{"), "{}", bystander.seen);
    assert!(!bystander.seen.contains("[DONE]"));
    let mut client = Client::connect(&server).await;
    client.write("GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    client.until("told to panic").await;
    assert!(client.seen.starts_with("HTTP/1.1 503"));
}

#[tokio::test]
async fn shutdown_lets_replies_finish() {
    let mut server = Running::start(steady(2), Settings::default()).await;
    // A client that keeps its connection for later does not keep the server.
    let mut idle = Client::connect(&server).await;
    idle.write("GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    idle.until("\"ok\"").await;
    let mut client = Client::connect(&server).await;
    client.post(PATH, &json!({"prompt": "one two", "max_tokens": 20, "stream": true})).await;
    client.until("data: ").await;
    server.ask_to_end();
    assert!(client.rest().await.contains("[DONE]"));
    assert!(server.ended().await < ms(2000));
}

#[tokio::test]
async fn shutdown_ends_what_takes_longer_with_an_error() {
    let settings = Settings { grace: ms(200), ..Settings::default() };
    let mut server = Running::start(steady(2), settings).await;
    let address = server.address;
    let (mut stream, mut whole) = (Client::connect(&server).await, Client::connect(&server).await);
    stream.post(PATH, &endless(true)).await;
    whole.post(PATH, &endless(false)).await;
    stream.until("data: ").await;
    server.ask_to_end();
    let engine = server.engine.clone();
    let seen = stream.rest().await;
    assert!(
        seen.contains("data: {\"error\":{\"message\":\"the server is shutting down\""),
        "{seen}"
    );
    assert!(seen.ends_with("0\r\n\r\n"), "a chunked body with its end: {seen}");
    assert!(whole.rest().await.starts_with("HTTP/1.1 503"), "{}", whole.seen);
    assert!(server.ended().await < ms(2000));
    settle(&engine).await;
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}
