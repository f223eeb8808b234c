//! A stand-in for the Hub: an HTTP server on a port of this machine that serves a small made-up
//! repository as the Hub would, except where a test gives it another answer.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use sha2::Digest as _;

/// The commit that `main` stands at.
pub const COMMIT: &str = "00112233445566778899aabbccddeeff00112233";
/// The larger of the two shards.
pub const SHARD: &str = "model-00001-of-00002.safetensors";
/// Its size.
pub const SHARD_BYTES: usize = 3_000_001;

/// One request as it arrived.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    /// The last part of the path, without the query.
    pub file: String,
    pub path: String,
    pub headers: HashMap<String, String>,
    /// How many requests with this method and file came before.
    pub nth: usize,
}

impl Asked {
    /// First byte of a `Range` header.
    pub fn from(&self) -> Option<usize> {
        let text = self.headers.get("range")?.strip_prefix("bytes=")?.strip_suffix('-')?;
        Some(text.parse().unwrap())
    }
}

/// One answer, down to how the connection ends.
#[derive(Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Bytes of the body to send before closing.
    pub cut: Option<usize>,
    /// Where in the body to fall silent, and for how long.
    pub stall: Option<(usize, Duration)>,
}

impl Answer {
    pub fn new(status: u16) -> Answer {
        Answer { status, headers: Vec::new(), body: Vec::new(), cut: None, stall: None }
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Answer {
        self.headers.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
        self.headers.push((name.to_string(), value.to_string()));
        self
    }

    pub fn body(mut self, body: &[u8]) -> Answer {
        self.body = body.to_vec();
        self.with("content-length", body.len())
    }

    pub fn cut(self, after: usize) -> Answer {
        Answer { cut: Some(after), ..self }
    }

    pub fn stall(self, after: usize, time: Duration) -> Answer {
        Answer { stall: Some((after, time)), ..self }
    }

    pub fn send(&self, to: &mut TcpStream, head_only: bool) -> std::io::Result<()> {
        let mut text = format!("HTTP/1.1 {} -\r\nconnection: close\r\n", self.status);
        for (name, value) in &self.headers {
            text += &format!("{name}: {value}\r\n");
        }
        to.write_all((text + "\r\n").as_bytes())?;
        if head_only {
            return Ok(());
        }
        let end = self.cut.unwrap_or(self.body.len()).min(self.body.len());
        if let Some((at, time)) = self.stall {
            to.write_all(&self.body[..at])?;
            thread::sleep(time);
            return to.write_all(&self.body[at..end]);
        }
        to.write_all(&self.body[..end])
    }
}

/// A repository with two shards of noise and small files of our own.
pub struct Repo {
    pub files: Vec<(String, Vec<u8>)>,
}

impl Repo {
    pub fn new() -> Repo {
        let index = serde_json::json!({ "metadata": {}, "weight_map": {
            "a": SHARD, "b": "model-00002-of-00002.safetensors", "c": SHARD } });
        let text = |s: &str| s.as_bytes().to_vec();
        Repo {
            files: vec![
                ("config.json".into(), text("{\"model_type\": \"stand-in\"}")),
                ("generation_config.json".into(), text("{}")),
                ("tokenizer_config.json".into(), text("{}\n")),
                ("chat_template.jinja".into(), text("{{ messages }}")),
                ("tokenizer.json".into(), noise(7, 70_000)),
                ("model.safetensors.index.json".into(), serde_json::to_vec(&index).unwrap()),
                (SHARD.into(), noise(1, SHARD_BYTES)),
                ("model-00002-of-00002.safetensors".into(), noise(2, 10_000)),
            ],
        }
    }

    pub fn bytes(&self, file: &str) -> &[u8] {
        &self.files.iter().find(|(name, _)| name == file).unwrap().1
    }

    /// What the Hub answers: large files live in another store, the others are sent at once.
    pub fn answer(&self, asked: &Asked) -> Answer {
        let known = self.files.iter().find(|(name, _)| *name == asked.file);
        let Some((name, bytes)) = known else {
            return Answer::new(404).with("x-error-code", "EntryNotFound").body(b"");
        };
        if asked.path.starts_with("/store/") {
            return serve(bytes, asked);
        }
        if name.ends_with(".safetensors") {
            return Answer::new(302)
                .with("location", format!("/store/{name}?signature=1"))
                .with("x-repo-commit", COMMIT)
                .with("x-linked-etag", format!("\"{}\"", sha256(bytes)))
                .with("x-linked-size", bytes.len())
                .body(b"moved");
        }
        serve(bytes, asked)
            .with("x-repo-commit", COMMIT)
            .with("etag", format!("\"{}\"", git(bytes)))
    }
}

/// The bytes, or the range of them that was asked for.
pub fn serve(bytes: &[u8], asked: &Asked) -> Answer {
    match asked.from() {
        None => Answer::new(200).body(bytes),
        Some(from) if from >= bytes.len() => Answer::new(416).body(b""),
        Some(from) => {
            let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
            Answer::new(206).with("content-range", range).body(&bytes[from..])
        }
    }
}

/// A server on a port of its own, and all it was asked.
pub struct Server {
    pub port: u16,
    pub log: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    pub fn start(answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let log: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let (seen, answer) = (log.clone(), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, seen, answer) = (stream.unwrap(), seen.clone(), answer.clone());
                thread::spawn(move || {
                    let Some(mut asked) = read_request(&stream) else { return };
                    {
                        let mut seen = seen.lock().unwrap();
                        let same = |a: &&Asked| a.method == asked.method && a.file == asked.file;
                        asked.nth = seen.iter().filter(same).count();
                        seen.push(asked.clone());
                    }
                    // The client may hang up first; that is its right.
                    let _ = answer(&asked).send(&mut stream, asked.method == "HEAD");
                });
            }
        });
        Server { port, log }
    }

    /// A good Hub, except where `special` has another answer.
    pub fn hub(
        special: impl Fn(&Asked, &Repo) -> Option<Answer> + Send + Sync + 'static,
    ) -> Server {
        let repo = Repo::new();
        Server::start(move |asked| special(asked, &repo).unwrap_or_else(|| repo.answer(asked)))
    }

    pub fn asked(&self, method: &str, file: &str) -> Vec<Asked> {
        let log = self.log.lock().unwrap();
        log.iter().filter(|a| a.method == method && a.file == file).cloned().collect()
    }

    /// Requests for the bytes of a file, at the store for a shard.
    pub fn gets(&self, file: &str) -> Vec<Asked> {
        let all = self.asked("GET", file).into_iter();
        all.filter(|a| !file.ends_with(".safetensors") || a.path.starts_with("/store/")).collect()
    }
}

pub fn read_request(stream: &TcpStream) -> Option<Asked> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_string(), words.next()?.to_string());
    let mut headers = HashMap::new();
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_string());
    }
    let file = path.split('?').next()?.rsplit('/').next()?.to_string();
    Some(Asked { method, file, path, headers, nth: 0 })
}

/// Reproducible bytes that do not repeat.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8
        })
        .collect()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&sha2::Sha256::digest(bytes))
}

pub fn git(bytes: &[u8]) -> String {
    hex(&sha1::Sha1::new_with_prefix(format!("blob {}\0", bytes.len()))
        .chain_update(bytes)
        .finalize())
}
