//! From tokens to tokens: a request to the engine that ends when nobody waits for it any more.

use lily_engine::{Cancel, Engine, Event, Request};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A request that the engine has; dropping it cancels the request.
///
/// Events that nobody has read yet are kept: never more than a sequence has tokens.
pub struct Generation {
    events: UnboundedReceiver<Event>,
    cancel: Cancel,
}

impl Generation {
    /// Hands a request to the engine; `complete` fills in all but its events.
    pub fn submit(
        engine: &Engine,
        prompt: Vec<u32>,
        complete: impl FnOnce(&mut Request),
    ) -> Result<Generation, lily_engine::Error> {
        let (sender, events) = unbounded_channel();
        let mut request = Request::new(prompt, move |event| {
            // Fails when nobody listens any more; then it is cancelled already.
            let _ = sender.send(event);
        });
        complete(&mut request);
        let cancel = request.cancel.clone();
        engine.submit(request)?;
        Ok(Generation { events, cancel })
    }

    /// The next event. May be dropped half-way without loss.
    pub async fn next(&mut self) -> Event {
        self.events.recv().await.unwrap_or_else(|| {
            let message = "it dropped the request without a word".to_owned();
            Event::Failed(lily_engine::Error::Dead(message))
        })
    }

    /// Asks the engine to stop; its last event is still to come.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}
