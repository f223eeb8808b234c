//! Ctrl-C and SIGTERM: the first ends what runs, cleanly; the second ends the process.

use lily_engine::Cancel;
use std::sync::{Mutex, Once};

/// What the next interrupt ends: the request that runs, if one does.
static RUNNING: Mutex<Option<Cancel>> = Mutex::new(None);
static HANDLER: Once = Once::new();

/// Lets an interrupt end the request of `cancel` from now on; until [`release`].
pub fn guard(cancel: &Cancel) {
    HANDLER.call_once(|| {
        let handler = || {
            let running = RUNNING.lock().map(|mut running| running.take()).ok().flatten();
            match running {
                Some(cancel) => cancel.cancel(),
                None => std::process::exit(130),
            }
        };
        // Only a handler set elsewhere could make this fail; then that one is in charge.
        let _ = ctrlc::set_handler(handler);
    });
    set(Some(cancel.clone()));
}

/// From now on an interrupt ends the process, as it does before the first [`guard`].
pub fn release() {
    set(None);
}

fn set(cancel: Option<Cancel>) {
    if let Ok(mut running) = RUNNING.lock() {
        *running = cancel;
    }
}
