//! `lily serve`: the OpenAI-compatible API on a socket.
//!
//! The socket is bound before the model is loaded, so that clients hear "503, loading" instead of
//! nothing. SIGINT or SIGTERM lets replies that run finish or end cleanly; a second one does not.

use crate::args::{DeviceArgs, MemoryArgs, ModelArgs};
use crate::error::Error;
use crate::load::{self, Source};
use crate::texts::Texts;
use clap::Args;
use lily_engine::Engine;
use lily_server::{App, Served, Settings};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

/// Where to listen, and for whom.
#[derive(Args, Debug)]
pub struct Serve {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    /// Sequences that run at once; each has its own memory of --max-seq tokens
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=256))]
    slots: u16,
    /// Requests that may wait for a slot; more are answered 429
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true)]
    queue: usize,
    /// Address and port; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8080", value_parser = parse_bind)]
    bind: SocketAddr,
    /// What clients must send as `Authorization: Bearer KEY` [default: nothing]
    #[arg(long, value_name = "KEY", env = "LILY_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Web pages of this origin may use the server, besides local ones; `*` is any
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// What the API calls the model [default: the name of its folder]
    #[arg(long, value_name = "NAME")]
    model_id: Option<String>,
    /// Seconds that replies may go on when the server is told to end
    #[arg(long, value_name = "SECONDS", default_value_t = 10, allow_negative_numbers = true)]
    grace: u64,
}

/// An address to bind: a numeric one, or `localhost`; no names are looked up.
fn parse_bind(text: &str) -> Result<SocketAddr, String> {
    let numeric = match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}"),
        None => text.to_owned(),
    };
    numeric.parse().map_err(|_| {
        "expected a numeric address and a port, as in 127.0.0.1:8080, [::1]:8080 or, for all \
         interfaces, 0.0.0.0:8080"
            .into()
    })
}

/// Serves until a signal says otherwise.
pub fn run(mut args: Serve) -> Result<(), Error> {
    check(&mut args)?;
    let bind = args.bind;
    let listener = TcpListener::bind(bind).map_err(|e| {
        Error::Failed(format!("--bind {bind}: {e}; choose another port, or 0 for a free one"))
    })?;
    let failed = |e: std::io::Error| Error::Failed(format!("--bind {bind}: {e}"));
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    if !address.ip().is_loopback() && args.api_key.is_none() {
        say!("warning: anyone who can reach {address} can use it; --api-key KEY asks for a key");
    }
    say!("listening on http://{address}/v1, loading");
    let app = App::loading(Settings {
        api_key: args.api_key.clone(),
        allow_origins: args.allow_origin.clone(),
        grace: Duration::from_secs(args.grace),
        ..Settings::default()
    });
    let runtime = tokio::runtime::Runtime::new().map_err(failed)?;
    runtime.block_on(async move {
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        let (loaded, is_loaded) = tokio::sync::oneshot::channel();
        let loading = app.clone();
        // A thread of its own: loading reads gigabytes and must not keep the socket waiting.
        std::thread::spawn(move || {
            let engine = load(&args).map(|served| {
                let engine = served.engine.clone();
                say!("ready: {} on http://{address}/v1", served.id);
                loading.ready(served);
                engine
            });
            let _ = loaded.send(engine);
        });
        let mut server = std::pin::pin!(lily_server::serve(listener, app, interrupt()));
        let engine = tokio::select! {
            // Told to end while loading: nothing runs yet.
            _ = &mut server => return Err(Error::Interrupted),
            engine = is_loaded => engine.unwrap_or_else(|_| {
                Err(Error::Failed("loading ended in a panic; this is a bug".into()))
            })?,
        };
        let served = server.await;
        engine.shutdown();
        served.map_err(failed)
    })
}

/// Refuses what would start a server that nobody can use as it is meant.
fn check(args: &mut Serve) -> Result<(), Error> {
    let refuse = |problem: String| Err(Error::Usage(problem));
    // An empty variable is as good as none; an empty flag is a mistake.
    if args.api_key.as_deref() == Some("") && std::env::var_os("LILY_API_KEY").is_some() {
        args.api_key = None;
    }
    if let Some(key) = &args.api_key
        && (key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic()))
    {
        return refuse(
            "--api-key: expected visible ASCII characters without blanks: clients cannot send \
             others; leave it away to let everyone in"
                .into(),
        );
    }
    if let Some(id) = &args.model_id
        && (id.trim().is_empty() || id.chars().any(char::is_control))
    {
        return refuse(format!("--model-id {id:?}: expected a name without control characters"));
    }
    for origin in &args.allow_origin {
        let host = ["http://", "https://"].iter().find_map(|scheme| origin.strip_prefix(scheme));
        let plain = |host: &str| {
            !host.is_empty()
                && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-:[]".contains(c))
        };
        if origin != "*" && !host.is_some_and(plain) {
            return refuse(format!(
                "--allow-origin {origin:?}: expected `*`, or a scheme and a host without a path, \
                 as in https://chat.example"
            ));
        }
    }
    Ok(())
}

/// Everything from the checkpoint to a running engine.
fn load(args: &Serve) -> Result<Served, Error> {
    let source = Source::open(&args.model)?;
    let options = load::options(source.config(), &args.memory, usize::from(args.slots))?;
    say!("{}", load::describe(&lily_model::plan(source.config(), options), &options));
    let texts = Texts::open(&source)?;
    let model = load::model(&source, &args.device, options, args.memory.force)?;
    say!("{}", model.device());
    let known_ids = texts.tokenizer.len();
    let engine = Engine::start(model, lily_engine::Options { queue: args.queue, known_ids });
    Ok(Served {
        id: args.model_id.clone().unwrap_or_else(|| source.id.clone()),
        engine,
        tokenizer: texts.tokenizer,
        template: texts.template,
        sampling: texts.defaults.sampling,
        stop_ids: texts.defaults.stop_ids,
    })
}

/// Done at the first SIGINT or SIGTERM; from then on the second ends the process.
async fn interrupt() {
    use tokio::signal::unix::{SignalKind, signal};
    let kinds = [SignalKind::interrupt(), SignalKind::terminate()];
    let [Ok(mut int), Ok(mut term)] = kinds.map(signal) else {
        // Without handlers the signals end the process, which is an answer too.
        return std::future::pending().await;
    };
    tokio::select! { _ = int.recv() => {}, _ = term.recv() => {} }
    say!("ending: replies that run may finish; once more to end at once");
    tokio::spawn(async move {
        tokio::select! { _ = int.recv() => {}, _ = term.recv() => {} }
        std::process::exit(130);
    });
}
