//! Connections: accepts them, bounds what a client can hold, and ends them in good order.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::{App, app};

/// Connections at once; more wait in the system's backlog.
const MOST_CONNECTIONS: usize = 1024;
/// Bytes of request line and headers that are kept; what goes well beyond is answered 431.
const MOST_HEADER_BYTES: usize = 64 << 10;
/// From a connection's start, or its last answer, to the end of its next headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(15);
/// From the end of the grace period to the end of everything.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until `shutdown` is done; then accepts no more, gives what runs
/// [`Settings::grace`](crate::Settings::grace) to finish, ends what is left with an error that
/// says why, and returns. The engine is left running.
pub async fn serve(
    listener: TcpListener,
    state: App,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let router = app(state.clone());
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let (closing, _) = watch::channel(false);
    let mut shutdown = pin!(shutdown);
    loop {
        let place = tokio::select! {
            () = &mut shutdown => break,
            place = places.clone().acquire_owned() => place.expect("never closed"),
        };
        let stream = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                // The client has gone already, or the process is out of file descriptors.
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let service = TowerToHyperService::new(router.clone());
        let closing = closing.subscribe();
        tokio::spawn(async move {
            connection(stream, service, closing).await;
            drop(place);
        });
    }
    drop(listener);
    closing.send_replace(true);
    let all_gone = || places.acquire_many(MOST_CONNECTIONS as u32);
    if tokio::time::timeout(state.settings().grace, all_gone()).await.is_err() {
        state.end_replies();
        let _ = tokio::time::timeout(LAST_WORDS, all_gone()).await;
    }
    Ok(())
}

/// Serves one connection to its end; when `closing` comes true, to the end of its current answer.
async fn connection(
    stream: TcpStream,
    service: TowerToHyperService<axum::Router>,
    mut closing: watch::Receiver<bool>,
) {
    // Tokens are small and shall go out one by one.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MOST_HEADER_BYTES)
        // A client that has closed its side counts as gone, as there is no telling the two apart.
        .half_close(false)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    // Errors are the client's: it broke off, or spoke something else than HTTP.
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = closing.wait_for(|closing| *closing) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
