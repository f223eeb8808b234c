//! One file over HTTP: ask, follow redirects, go on where an earlier try stopped, check the
//! bytes. Knows files and checksums, not what a checkpoint is or where it lies.
//!
//! Why `ureq` and not the Hub's own client library: a pull must resume a 5 GB file after any
//! cut, check what the server says of a range before appending to it, hash while writing, keep
//! the token from every other host, and be tested against a server that misbehaves in each of
//! these ways. That is this file; what is left (HTTP/1.1, TLS by rustls with ring, proxies) is
//! what `ureq` does, blocking and without a runtime.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ureq::http::{HeaderMap, Response, Uri, header};

use super::digest::{Digest, Hasher};
use super::error::Error;
use super::progress::Progress;

/// Redirects followed for one request; the Hub needs one or two.
const MOST_REDIRECTS: usize = 8;
/// The longest a server may have us wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// A file as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its name in the repository; no folders.
    pub name: String,
    /// In bytes.
    pub size: u64,
    /// Of its bytes.
    pub digest: Digest,
}

/// What the server's headers say of a file.
pub struct Description {
    /// In bytes.
    pub size: u64,
    /// From `X-Linked-Etag`, else `ETag`.
    pub digest: Digest,
    /// From `X-Repo-Commit`: the commit a branch stands at.
    pub commit: String,
}

/// Asks the Hub, patiently.
pub struct Client {
    agent: ureq::Agent,
    token: Option<String>,
    home: Origin,
    retries: u32,
}

/// Why a try failed.
enum Trouble {
    /// Trying again will not help.
    Final(Error),
    /// It may; `wait` is the server's wish.
    Passing { why: String, wait: Option<Duration> },
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Final(error)
    }
}

impl Client {
    /// A client for the server at `endpoint`, the only one that is ever sent `token`. A server
    /// that sends nothing for `stall` counts as gone; after `retries` tries in a row without a
    /// byte more, a file is given up.
    pub fn new(
        endpoint: &str,
        token: Option<String>,
        stall: Duration,
        retries: u32,
    ) -> Result<Client, Error> {
        let home =
            endpoint.parse().ok().and_then(|uri| Origin::of(&uri)).ok_or(Error::Setting {
                what: "HF_ENDPOINT",
                found: endpoint.to_string(),
                expected: "an address such as https://huggingface.co",
            })?;
        let agent = ureq::Agent::config_builder()
            .user_agent(concat!("lily/", env!("CARGO_PKG_VERSION")))
            // Compressed bytes would be neither the size nor the range that was asked for.
            .accept_encoding("identity")
            .http_status_as_error(false)
            // Redirects are followed in `ask`, which decides about the token each time.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(stall))
            .timeout_connect(Some(stall))
            .timeout_per_read(Some(stall))
            .timeout_per_write(Some(stall))
            .build()
            .new_agent();
        Ok(Client { agent, token, home, retries })
    }

    /// What the server says of the file at `url`; `None` when the revision has no such file.
    pub fn describe(&self, url: &str, progress: &Progress) -> Result<Option<Description>, Error> {
        let mut tries = 0;
        loop {
            match self.ask(true, url, 0) {
                Ok(answer) if answer.status().is_success() || answer.status().is_redirection() => {
                    return described(url, answer.headers()).map(Some);
                }
                Ok(answer) => match self.refused(url, &answer) {
                    Trouble::Final(Error::NotFound { reason: Some(reason), .. })
                        if reason == "EntryNotFound" =>
                    {
                        return Ok(None);
                    }
                    trouble => self.pause(url, trouble, &mut tries, progress)?,
                },
                Err(trouble) => self.pause(url, trouble, &mut tries, progress)?,
            }
        }
    }

    /// Brings the file at `url` to `path`, going on from what is there. When this returns, the
    /// bytes are on the disk and have the right checksum.
    pub fn fetch(
        &self,
        file: &File,
        url: &str,
        path: &Path,
        progress: &mut Progress,
    ) -> Result<(), Error> {
        progress.file(&file.name);
        let mut part = Part::open(path, file)?;
        progress.found(part.len);
        let mut again = true;
        loop {
            let mut tries = 0;
            while part.len < file.size {
                let before = part.len;
                if let Err(trouble) = self.more(file, url, &mut part, progress) {
                    if part.len > before {
                        tries = 0;
                    }
                    self.pause(&file.name, trouble, &mut tries, progress)?;
                }
            }
            let Err(found) = part.check() else { return part.sync() };
            progress.back(part.len);
            let pieces = part.pieces;
            part.restart()?;
            // A file put together from several answers, or left by a machine that lost power,
            // may be wrong where one answer would be right.
            if pieces > 1 && again {
                again = false;
                progress.say(&format!(
                    "{}: the pieces do not fit together; fetching it afresh",
                    file.name
                ));
                continue;
            }
            drop(part);
            fs::remove_file(path).map_err(Error::file("remove", path))?;
            let expected = file.digest.to_string();
            return Err(Error::Checksum {
                file: file.name.clone(),
                found: found.to_string(),
                expected,
            });
        }
    }

    /// One request for the rest of a file, written as it arrives.
    fn more(
        &self,
        file: &File,
        url: &str,
        part: &mut Part,
        progress: &mut Progress,
    ) -> Result<(), Trouble> {
        let answer = self.ask(false, url, part.len)?;
        match answer.status().as_u16() {
            200 => {
                if let Some(found) = length(answer.headers()).filter(|n| *n != file.size) {
                    return Err(wrong_length(file, url, found.to_string()).into());
                }
                if part.len > 0 {
                    progress
                        .say(&format!("{}: the server cannot resume; starting afresh", file.name));
                    progress.back(part.len);
                    part.restart()?;
                }
            }
            206 => match range(answer.headers()) {
                Some((_, total)) if total != file.size => {
                    return Err(wrong_length(file, url, total.to_string()).into());
                }
                Some((from, _)) if from == part.len => {}
                _ => {
                    progress.back(part.len);
                    part.restart()?;
                    return Err(passing("the server answered another range than asked for"));
                }
            },
            416 => {
                progress.back(part.len);
                part.restart()?;
                return Err(passing("the server has nothing to resume (416)"));
            }
            _ => return Err(self.refused(url, &answer)),
        }
        part.pieces += 1;
        let mut body = answer.into_body().into_reader();
        let mut buffer = vec![0; 256 << 10];
        while part.len < file.size {
            let n = match body.read(&mut buffer) {
                Ok(0) => return Err(passing("the connection ended early")),
                Ok(n) => n,
                Err(e) => return Err(passing(format!("the connection broke: {e}"))),
            };
            if n as u64 > file.size - part.len {
                return Err(wrong_length(file, url, format!("more than {}", file.size)).into());
            }
            part.write(&buffer[..n])?;
            progress.add(n as u64);
        }
        Ok(())
    }

    /// Sends one request and follows its redirects. With `head`, stops at the first answer that
    /// describes the file, which is the Hub's own and not that of the store it points to.
    fn ask(&self, head: bool, url: &str, from: u64) -> Result<Response<ureq::Body>, Trouble> {
        let mut at: Uri = url.parse().map_err(|_| redirect(url, "not an address".to_string()))?;
        for _ in 0..=MOST_REDIRECTS {
            let origin =
                Origin::of(&at).ok_or_else(|| redirect(url, format!("no address: {at}")))?;
            let mut request = if head { self.agent.head(&at) } else { self.agent.get(&at) };
            if let Some(token) = self.token.as_ref().filter(|_| origin == self.home) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if from > 0 {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let answer = request.call().map_err(|e| passing(e.to_string()))?;
            let described = head && answer.headers().contains_key("x-linked-etag");
            if !answer.status().is_redirection() || described {
                // The store's links are signed for a while: its refusal means that a new link,
                // hence a new request, is due.
                if origin != self.home && matches!(answer.status().as_u16(), 401 | 403) {
                    return Err(passing(format!("{} by {origin}", answer.status())));
                }
                return Ok(answer);
            }
            let location = answer.headers().get(header::LOCATION).and_then(|l| l.to_str().ok());
            let location =
                location.ok_or_else(|| redirect(url, "a redirect to nowhere".to_string()))?;
            let to = join(&at, location)
                .ok_or_else(|| redirect(url, format!("a redirect to {location:?}")))?;
            if at.scheme_str() == Some("https") && to.scheme_str() != Some("https") {
                return Err(
                    redirect(url, format!("a redirect to {to}, which is not encrypted")).into()
                );
            }
            at = to;
        }
        Err(redirect(url, format!("more than {MOST_REDIRECTS} redirects")).into())
    }

    /// What a status other than success means.
    fn refused(&self, url: &str, answer: &Response<ureq::Body>) -> Trouble {
        let status = answer.status().as_u16();
        let text =
            |name| answer.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let reason = text("x-error-code");
        let (url, token) = (url.to_string(), self.token.is_some());
        match status {
            401 => Trouble::Final(Error::Login { url, token }),
            403 => Trouble::Final(Error::Forbidden { url, reason, token }),
            404 => Trouble::Final(Error::NotFound { url, reason }),
            408 | 425 | 429 | 500..=599 => {
                let wait = text("retry-after")
                    .and_then(|s| s.trim().parse().ok())
                    .or_else(|| text("ratelimit").and_then(|s| reset(&s)))
                    .map(Duration::from_secs);
                match wait {
                    Some(wait) if wait > LONGEST_WAIT => Trouble::Final(Error::Busy { url, wait }),
                    _ => Trouble::Passing {
                        why: format!("the server answered {}", answer.status()),
                        wait,
                    },
                }
            }
            _ => Trouble::Final(Error::Status { url, status }),
        }
    }

    /// Waits before the next try: as long as the server asked, else longer each time.
    fn pause(
        &self,
        what: &str,
        trouble: Trouble,
        tries: &mut u32,
        progress: &Progress,
    ) -> Result<(), Error> {
        let (why, wait) = match trouble {
            Trouble::Final(error) => return Err(error),
            Trouble::Passing { why, wait } => (why, wait),
        };
        if *tries >= self.retries {
            return Err(Error::GaveUp { file: what.to_string(), tries: *tries + 1, last: why });
        }
        let wait = wait.unwrap_or(Duration::from_millis(500 << (*tries).min(6)));
        *tries += 1;
        progress.say(&format!("{what}: {why}; trying again in {:.1} s", wait.as_secs_f64()));
        std::thread::sleep(wait);
        Ok(())
    }
}

/// A file on its way: the bytes so far, and their running checksum.
struct Part {
    path: PathBuf,
    file: fs::File,
    len: u64,
    size: u64,
    digest: Digest,
    hasher: Hasher,
    /// Answers (and earlier runs) that the bytes came from.
    pieces: u32,
}

impl Part {
    /// Opens or creates the file at `path` and hashes what it holds.
    fn open(path: &Path, file: &File) -> Result<Part, Error> {
        let opened =
            fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut part = Part {
            path: path.to_owned(),
            file: opened.map_err(Error::file("write", path))?,
            len: 0,
            size: file.size,
            digest: file.digest.clone(),
            hasher: file.digest.hasher(file.size),
            pieces: 0,
        };
        let there = part.file.metadata().map_err(Error::file("read", path))?.len();
        if there > part.size {
            part.restart()?;
            return Ok(part);
        }
        let mut buffer = vec![0; 1 << 20];
        while part.len < there {
            let want = buffer.len().min((there - part.len) as usize);
            let n = part.file.read(&mut buffer[..want]).map_err(Error::file("read", path))?;
            if n == 0 {
                break;
            }
            part.hasher.update(&buffer[..n]);
            part.len += n as u64;
            part.pieces = 1;
        }
        Ok(part)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(Error::file("write", &self.path))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn restart(&mut self) -> Result<(), Error> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(Error::file("empty", &self.path))?;
        (self.len, self.pieces) = (0, 0);
        self.hasher = self.digest.hasher(self.size);
        Ok(())
    }

    /// Errs with the checksum found when it is not the right one.
    fn check(&mut self) -> Result<(), Digest> {
        let hasher = std::mem::replace(&mut self.hasher, self.digest.hasher(self.size));
        let found = hasher.finish();
        if found == self.digest { Ok(()) } else { Err(found) }
    }

    fn sync(&self) -> Result<(), Error> {
        self.file.sync_all().map_err(Error::file("write", &self.path))
    }
}

/// Copies `from` to `path` and checks the bytes; `false` when they are not `file`'s.
pub fn copy(file: &File, from: &Path, path: &Path, progress: &mut Progress) -> Result<bool, Error> {
    progress.file(&file.name);
    let mut source = fs::File::open(from).map_err(Error::file("read", from))?;
    let mut part = Part::open(path, file)?;
    part.restart()?;
    let mut buffer = vec![0; 1 << 20];
    while part.len < file.size {
        match source.read(&mut buffer).map_err(Error::file("read", from))? {
            0 => break,
            n => {
                part.write(&buffer[..n])?;
                progress.add(n as u64);
            }
        }
    }
    if part.check().is_ok() {
        part.sync()?;
        return Ok(true);
    }
    progress.back(part.len);
    part.restart()?;
    Ok(false)
}

/// Whether the bytes at `path` have `file`'s size and checksum. A file that cannot be read does
/// not: it will be fetched, and the fetch says what is wrong with the place.
pub fn holds(path: &Path, file: &File) -> bool {
    let hash = || -> io::Result<Digest> {
        let (mut source, mut hasher) = (fs::File::open(path)?, file.digest.hasher(file.size));
        let mut buffer = vec![0; 1 << 20];
        loop {
            match source.read(&mut buffer)? {
                0 => return Ok(hasher.finish()),
                n => hasher.update(&buffer[..n]),
            }
        }
    };
    size(path) == Some(file.size) && hash().is_ok_and(|found| found == file.digest)
}

/// Size of the regular file at `path` (links followed), in bytes.
pub fn size(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().filter(|m| m.is_file()).map(|m| m.len())
}

fn described(url: &str, headers: &HeaderMap) -> Result<Description, Error> {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
    let missing = |what| Error::Nameless { url: url.to_string(), what };
    let digest = text("x-linked-etag").or_else(|| text("etag")).and_then(Digest::parse);
    let size =
        text("x-linked-size").or_else(|| text("content-length")).and_then(|s| s.parse().ok());
    Ok(Description {
        size: size.ok_or_else(|| missing("size"))?,
        digest: digest.ok_or_else(|| missing("checksum"))?,
        commit: text("x-repo-commit").ok_or_else(|| missing("commit"))?.to_string(),
    })
}

fn length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// First byte and whole size of `Content-Range: bytes FROM-TO/SIZE`.
fn range(headers: &HeaderMap) -> Option<(u64, u64)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (span, size) = text.split_once('/')?;
    Some((span.split_once('-')?.0.trim().parse().ok()?, size.trim().parse().ok()?))
}

/// Seconds until a quota renews, from a `RateLimit` header (`"api";r=0;t=55`).
fn reset(header: &str) -> Option<u64> {
    header.split(';').find_map(|item| item.trim().strip_prefix("t="))?.parse().ok()
}

fn passing(why: impl Into<String>) -> Trouble {
    Trouble::Passing { why: why.into(), wait: None }
}

fn redirect(url: &str, what: String) -> Error {
    Error::Redirect { url: url.to_string(), what }
}

fn wrong_length(file: &File, url: &str, found: String) -> Error {
    Error::Length { file: file.name.clone(), url: url.to_string(), found, expected: file.size }
}

/// Scheme, host and port: what must be equal for a token to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origin(String, String, u16);

impl Origin {
    fn of(uri: &Uri) -> Option<Origin> {
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let port = match scheme.as_str() {
            "https" => 443,
            "http" => 80,
            _ => return None,
        };
        let host = uri.host().filter(|h| !h.is_empty())?.to_ascii_lowercase();
        Some(Origin(scheme, host, uri.port_u16().unwrap_or(port)))
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Origin(scheme, host, port) = self;
        write!(f, "{scheme}://{host}:{port}")
    }
}

/// The address that `location` means in an answer from `base` (RFC 3986 section 5, without dot
/// segments, which no server of files sends).
fn join(base: &Uri, location: &str) -> Option<Uri> {
    let (scheme, authority) = (base.scheme_str()?, base.authority()?);
    let text = if location.starts_with("https://") || location.starts_with("http://") {
        location.to_string()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else if location.split(['/', '?', '#']).next()?.contains(':') {
        return None;
    } else {
        let folder = &base.path()[..base.path().rfind('/')? + 1];
        format!("{scheme}://{authority}{folder}{location}")
    };
    let text = text.split('#').next()?;
    text.parse().ok().filter(|uri| Origin::of(uri).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_of_all_shapes() {
        let base: Uri = "https://hub.test/a/b/resolve/r/f.json?x=1".parse().unwrap();
        let cases = [
            ("https://cdn.test/p?sig=1#frag", Some("https://cdn.test/p?sig=1")),
            ("//cdn.test/p", Some("https://cdn.test/p")),
            ("/api/cache/f", Some("https://hub.test/api/cache/f")),
            ("g.json", Some("https://hub.test/a/b/resolve/r/g.json")),
            ("ftp://cdn.test/p", None),
            ("file:///etc/passwd", None),
            ("https://", None),
        ];
        for (location, expected) in cases {
            let found = join(&base, location).map(|u| u.to_string());
            assert_eq!(found.as_deref(), expected, "{location}");
        }
    }

    #[test]
    fn origins_differ_by_scheme_host_and_port() {
        let of = |s: &str| Origin::of(&s.parse().unwrap());
        assert_eq!(of("https://hub.test/a"), of("https://HUB.test:443/b"));
        for other in [
            "http://hub.test/",
            "https://hub.test:444/",
            "https://hub.test.evil/",
            "https://cdn.test/",
        ] {
            assert_ne!(of("https://hub.test/a"), of(other), "{other}");
        }
    }

    #[test]
    fn quota_headers() {
        assert_eq!(reset("\"resolvers\";r=0;t=55"), Some(55));
        assert_eq!(reset("nothing"), None);
    }
}
