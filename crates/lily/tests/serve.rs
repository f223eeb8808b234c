//! `lily serve` from outside: sockets, signals and what it says when it starts.

mod lily;

use lily::{Server, run};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

/// Sends one request and gives the whole answer.
fn ask(server: &Server, request: &str) -> String {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn get(server: &Server, path: &str) -> String {
    ask(server, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
}

/// Waits until the model is loaded.
fn wait_until_ready(server: &Server) {
    let start = Instant::now();
    loop {
        let answer = get(server, "/health");
        if answer.starts_with("HTTP/1.1 200") {
            return;
        }
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(start.elapsed() < Duration::from_secs(60), "{answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn it_loads_serves_and_ends_on_a_signal() {
    for signal in ["-INT", "-TERM"] {
        let mut server = Server::start(&["--slots", "2"]);
        wait_until_ready(&server);
        assert!(get(&server, "/v1/models").contains("\"lily-demo\""));
        let pid = server.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
        let status = server.child.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{signal}");
    }
}

#[test]
fn a_key_is_asked_for() {
    let server = Server::start(&["--api-key", "sesame"]);
    let start = Instant::now();
    let models = |key: &str| {
        ask(
            &server,
            &format!("GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{key}\r\n"),
        )
    };
    while models("authorization: Bearer sesame\r\n").starts_with("HTTP/1.1 503") {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(models("").starts_with("HTTP/1.1 401"));
    assert!(models("authorization: Bearer sesam\r\n").starts_with("HTTP/1.1 401"));
    assert!(models("authorization: Bearer sesame\r\n").starts_with("HTTP/1.1 200"));
}

#[test]
fn what_cannot_be_served_is_said_at_once() {
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = holder.local_addr().unwrap().to_string();
    let cases: [(&[&str], i32, &str); 5] = [
        (&["--bind", &taken], 1, "choose another port"),
        (&["--bind", "example.org:80"], 2, "numeric address"),
        (&["--bind", "127.0.0.1:0", "--api-key", ""], 2, "empty key"),
        (&["--bind", "127.0.0.1:0", "--model", "/no/such/folder"], 1, "lily pull"),
        (&["--bind", "127.0.0.1:0", "--slots", "256", "--max-seq", "9999999"], 2, "positions"),
    ];
    for (args, code, words) in cases {
        let done = run(&[&["serve"], args].concat());
        assert_eq!(done.code, Some(code), "{args:?}: {}", done.stderr);
        assert!(done.stderr.contains(words), "{args:?}: {}", done.stderr);
    }
}

#[test]
fn an_open_door_is_warned_of() {
    let server = Server::start(&["--bind", "0.0.0.0:0"]);
    assert!(server.said.contains("warning: anyone who can reach"), "{}", server.said);
    let server = Server::start(&["--bind", "0.0.0.0:0", "--api-key", "sesame"]);
    assert!(!server.said.contains("warning"), "{}", server.said);
}
