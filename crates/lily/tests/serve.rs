//! `lily serve` from outside: sockets, signals and what it says when it starts.

mod lily;

use lily::{Server, run};
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn it_loads_serves_and_ends_on_a_signal() {
    for signal in ["-INT", "-TERM"] {
        let mut server = Server::start(&["--slots", "2"]);
        server.wait_until_ready();
        assert!(server.get("/v1/models").contains("\"lily-demo\""));
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
        let request = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close";
        server.ask(&format!("{request}\r\n{key}\r\n"))
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
    let cases: [(&[&str], i32, &str); 11] = [
        (&["--bind", &taken], 1, "choose another port"),
        (&["--bind", "example.org:80"], 2, "numeric address"),
        (&["--bind", "127.0.0.1:0", "--api-key", ""], 2, "--api-key: expected"),
        (&["--bind", "127.0.0.1:0", "--api-key", "clé"], 2, "--api-key: expected"),
        (&["--bind", "127.0.0.1:0", "--api-key", "a b"], 2, "--api-key: expected"),
        (&["--bind", "127.0.0.1:0", "--model-id", ""], 2, "--model-id"),
        (&["--bind", "127.0.0.1:0", "--model-id", "a\nb"], 2, "--model-id"),
        (&["--bind", "127.0.0.1:0", "--allow-origin", "junk"], 2, "--allow-origin"),
        (&["--bind", "127.0.0.1:0", "--allow-origin", "https://a.b/c"], 2, "--allow-origin"),
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
