//! Text that people hand to commands: stdin and files, UTF-8 and of a bounded size.

use crate::error::Error;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// The most that is read: far more than any context holds.
pub const MOST_BYTES: u64 = 64 << 20;

/// All of stdin. Says that it waits where nothing ends it for a while, as when this process was
/// started with an open pipe that nobody writes to.
pub fn stdin() -> Result<String, Error> {
    let (done, waiting) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if waiting.recv_timeout(Duration::from_secs(2)) == Err(RecvTimeoutError::Timeout) {
            say!("waiting for the end of stdin (start with `< /dev/null` to give it none)");
        }
    });
    let text = read(std::io::stdin().lock(), "stdin");
    drop(done);
    text
}

/// The text of a file; `-` is stdin.
pub fn file(path: &Path) -> Result<String, Error> {
    if path == Path::new("-") {
        return stdin();
    }
    let place = path.display().to_string();
    let file = File::open(path).map_err(|e| Error::Usage(format!("{place}: {e}")))?;
    read(file, &place)
}

/// What to call `path` in messages.
pub fn name(path: &Path) -> String {
    if path == Path::new("-") { "stdin".into() } else { path.display().to_string() }
}

fn read(from: impl Read, place: &str) -> Result<String, Error> {
    let mut bytes = Vec::new();
    let read = from.take(MOST_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|e| Error::Usage(format!("{place}: cannot be read: {e}")))?;
    if bytes.len() as u64 > MOST_BYTES {
        let most = MOST_BYTES >> 20;
        return Err(Error::Usage(format!("{place}: more than {most} MiB of text; give less")));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::Usage(format!("{place}: not UTF-8 text (byte {at}); convert it first"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_and_other_text_is_refused() {
        let endless = read(std::io::repeat(b'a'), "stdin").unwrap_err().to_string();
        assert!(endless.contains("more than 64 MiB"), "{endless}");
        let latin = read(&b"caf\xe9"[..], "a.txt").unwrap_err().to_string();
        assert!(latin.contains("a.txt: not UTF-8 text (byte 3)"), "{latin}");
    }
}
