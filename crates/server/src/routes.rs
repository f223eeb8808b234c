//! The routes, one handler an endpoint.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tower_http::catch_panic::CatchPanicLayer;

use crate::answer::{Prepared, Reply};
use crate::body::JsonBody;
use crate::error::Error;
use crate::{App, Served, auth, chat, completions};

/// The whole API on `state`. Every route is there with and without `/v1`.
pub fn app(state: App) -> Router {
    let guarded = both(&[
        ("/models", get(models)),
        ("/models/{*id}", get(model)),
        ("/chat/completions", post(talk)),
        ("/completions", post(complete)),
    ]);
    // Whether a server is alive is no secret.
    let open = both(&[("/health", get(health))]);
    guarded
        .layer(from_fn_with_state(state.clone(), auth::check_key))
        .merge(open)
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(state.clone(), auth::check_origin))
        .layer(CatchPanicLayer::custom(|_| {
            Error::Internal("an internal error; the log has more".to_owned()).into_response()
        }))
        .layer(auth::cors(&state))
        .with_state(state)
}

/// Routes, each also under `/v1`.
fn both(routes: &[(&str, MethodRouter<App>)]) -> Router<App> {
    routes.iter().fold(Router::new(), |router, (path, handler)| {
        router.route(path, handler.clone()).route(&format!("/v1{path}"), handler.clone())
    })
}

async fn talk(State(app): State<App>, request: Request) -> Result<Response, Error> {
    answer(app, request, chat::prepare).await
}

async fn complete(State(app): State<App>, request: Request) -> Result<Response, Error> {
    answer(app, request, completions::prepare).await
}

/// Reads a request, has it prepared off the threads that serve connections, and answers it.
async fn answer<R: Reply>(
    app: App,
    request: Request,
    prepare: fn(&Served, &JsonBody) -> Result<Prepared<R>, Error>,
) -> Result<Response, Error> {
    let served = app.served()?.clone();
    let (parts, body) = request.into_parts();
    let settings = app.settings();
    let body =
        JsonBody::read(&parts.headers, body, settings.body_limit, settings.body_timeout).await?;
    let prepared = {
        let turn = app.turn().await;
        let served = served.clone();
        let prepare = move || {
            let _turn = turn;
            prepare(&served, &body)
        };
        tokio::task::spawn_blocking(prepare).await
    };
    let prepared = prepared.map_err(|error| Error::Internal(format!("a bug: {error}")))??;
    prepared.answer(&app, &served).await
}

async fn unknown(request: Request) -> Error {
    Error::Route(format!("{} {}", request.method(), request.uri().path()))
}

async fn wrong_method(request: Request) -> Error {
    Error::Method(request.uri().path().to_owned())
}

/// 200 when requests can be served, else 503 with the reason.
async fn health(State(app): State<App>) -> Result<Json<Value>, Error> {
    let engine = &app.served()?.engine;
    engine.health().map_err(|error| Error::from_engine(error, ""))?;
    let load = engine.load();
    Ok(Json(json!({
        "status": "ok",
        "slots": engine.limits().slots,
        "running": load.running,
        "waiting": load.waiting,
        // How long a reply may have had to wait for a part of somebody's prompt.
        "longest_step_ms": engine.longest_step().as_secs_f64() * 1e3,
    })))
}

async fn models(State(app): State<App>) -> Result<Json<Value>, Error> {
    Ok(Json(json!({"object": "list", "data": [describe(&app)?]})))
}

async fn model(
    State(app): State<App>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, Error> {
    let Path(id) = id.map_err(|error| Error::Request(error.body_text()))?;
    if id != app.served()?.id {
        return Err(Error::Model(id));
    }
    Ok(Json(describe(&app)?))
}

/// The model as the API lists it. Agents read the context length once, under one name or
/// another, and plan with it: it is what the engine enforces, and it never changes.
fn describe(app: &App) -> Result<Value, Error> {
    let loaded = app.loaded()?;
    let context = loaded.served.engine.limits().max_seq;
    Ok(json!({
        "id": loaded.served.id,
        "object": "model",
        "created": loaded.since,
        "owned_by": "lily",
        "max_model_len": context,
        "context_length": context,
        "context_window": context,
        "max_context_length": context,
        "meta": {"n_ctx": context, "n_ctx_train": context, "context_length": context},
    }))
}
