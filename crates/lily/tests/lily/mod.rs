//! Starts the built `lily` as a user would, with nothing of the surrounding environment.
#![allow(dead_code)] // each test file uses a part

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long a server may take for anything that a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// The program, in an environment of its own: no model, no tokens, caches in `home`.
pub fn lily(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
    command.args(args).stdin(Stdio::null());
    for name in ["LILY_MODEL", "HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_CACHE"] {
        command.env_remove(name);
    }
    command
}

/// What a command printed and how it ended.
pub struct Done {
    /// Its exit code; `None` where a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Done {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
        Done {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }
}

/// Runs to the end.
pub fn run(args: &[&str]) -> Done {
    lily(args).output().expect("lily starts").into()
}

/// Runs to the end with `input` on stdin.
pub fn run_with(args: &[&str], input: &str) -> Done {
    let mut child = lily(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("lily starts");
    // A command that ends before it has read all is judged by what it says, not here.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    child.wait_with_output().expect("lily ends").into()
}

/// The folder of the demo's files in the repository, a checkpoint like any other.
pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo")
}

/// A server that was started for one test and ends with it.
pub struct Server {
    pub child: Child,
    /// `127.0.0.1:PORT`.
    pub address: String,
    /// What it said on stderr up to its address.
    pub said: String,
}

impl Server {
    /// Starts `lily serve` with these flags on a free port, and waits until it has bound it.
    pub fn start(args: &[&str]) -> Server {
        let mut command = lily(&["serve"]);
        if !args.contains(&"--bind") {
            command.args(["--bind", "127.0.0.1:0"]);
        }
        command.args(args);
        Server::spawn(command)
    }

    /// The same for a command that was made ready elsewhere.
    pub fn spawn(mut command: Command) -> Server {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("lily starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        let mut said = String::new();
        let address = loop {
            let start = said.len();
            let read = stderr.read_line(&mut said).expect("stderr is text");
            assert!(read > 0, "lily serve ended: {said}");
            if let Some((_, address)) = said[start..].split_once("http://") {
                let end = address.find('/').expect("a path follows");
                break address[..end].replace("0.0.0.0", "127.0.0.1");
            }
        };
        // The pipe is read on, or the server would stop at a full one.
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        Server { child, address, said }
    }

    /// Sends one request and gives the whole answer.
    pub fn ask(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream.write_all(request.as_bytes()).expect("the server reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the server answers in text");
        answer
    }

    /// The whole answer to a GET.
    pub fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
    }

    /// Waits until the model is loaded.
    pub fn wait_until_ready(&self) {
        let start = Instant::now();
        loop {
            let answer = self.get("/health");
            if answer.starts_with("HTTP/1.1 200") {
                return;
            }
            assert!(answer.starts_with("HTTP/1.1 503") && start.elapsed() < PATIENCE, "{answer}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
