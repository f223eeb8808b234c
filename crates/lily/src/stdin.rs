//! Text from stdin.

use crate::error::Error;
use std::io::Read;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// All of stdin. Says that it waits where nothing ends it for a while, as when this process was
/// started with an open pipe that nobody writes to.
pub fn read() -> Result<String, Error> {
    let (done, waiting) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if waiting.recv_timeout(Duration::from_secs(2)) == Err(RecvTimeoutError::Timeout) {
            eprintln!("waiting for the end of stdin (start with `< /dev/null` to give it none)");
        }
    });
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().read_to_end(&mut bytes);
    drop(done);
    read.map_err(|e| Error::Failed(format!("cannot read stdin: {e}")))?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::Usage(format!("stdin: not UTF-8 text (byte {at}); convert it first"))
    })
}
