//! Python's side of Jinja, where minijinja speaks Rust: JSON as `json.dumps` writes it, what
//! counts as a blank, how values print, and the functions that Hugging Face adds.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use serde::Serialize;
use std::io;

/// Sets `env` up as Hugging Face sets up Jinja for chat templates.
pub(super) fn install(env: &mut Environment<'static>) {
    env.set_unknown_method_callback(method);
    env.set_formatter(print);
    env.add_filter("tojson", to_json);
    env.add_filter("trim", |text: &str, chars: Option<&str>| strip(text, chars, true, true));
    env.add_filter("string", |value: &Value| plain(value).unwrap_or_else(|| value.to_string()));
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        let error = Error::new(ErrorKind::InvalidOperation, message.clone());
        Err(error.with_source(Raised(message)))
    });
    env.add_function("strftime_now", |format: &str| {
        let now = jiff::ZonedDateTime::now();
        jiff::fmt::strtime::format(format, &now)
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))
    });
}

/// What a template said through `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// The message if the template itself raised `error`.
pub(super) fn raised(error: &Error) -> Option<&str> {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |e| e.source())
        .find_map(|e| e.downcast_ref::<Raised>())
        .map(|raised| raised.0.as_str())
}

/// `error` and what caused it, in one line.
pub(super) fn chain(error: &Error) -> String {
    let first: &dyn std::error::Error = error;
    let causes: Vec<String> =
        std::iter::successors(Some(first), |e| e.source()).map(ToString::to_string).collect();
    causes.join(": ")
}

/// What `str.isspace` accepts: Unicode's blanks and four old separators.
fn is_blank(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// `str.strip`.
pub(super) fn trim(text: &str) -> &str {
    text.trim_matches(is_blank)
}

/// `str.lstrip`.
pub(super) fn trim_start(text: &str) -> &str {
    text.trim_start_matches(is_blank)
}

/// `str.rstrip`.
pub(super) fn trim_end(text: &str) -> &str {
    text.trim_end_matches(is_blank)
}

fn strip(text: &str, chars: Option<&str>, start: bool, end: bool) -> String {
    let strips = |c: char| chars.map_or_else(|| is_blank(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(strips) } else { text };
    let text = if end { text.trim_end_matches(strips) } else { text };
    text.to_owned()
}

/// Methods that Python's values have.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let sides = match name {
        "strip" => Some((true, true)),
        "lstrip" => Some((true, false)),
        "rstrip" => Some((false, true)),
        _ => None,
    };
    if let (Some((start, end)), Some(text)) = (sides, value.as_str()) {
        let (chars,): (Option<&str>,) = from_args(args)?;
        return Ok(strip(text, chars, start, end).into());
    }
    // A width is room that is taken before anything notices: nobody needs ten thousand columns.
    if let ("format", Some(text)) = (name, value.as_str())
        && text.as_bytes().windows(5).any(|run| run.iter().all(u8::is_ascii_digit))
    {
        return Err(Error::new(ErrorKind::InvalidOperation, "a width in `format` is too large"));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// `str(value)` of what Python spells differently: `None`, `True`, `False` and numbers.
fn plain(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::None => Some("None".into()),
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }.into()),
        ValueKind::Number if !value.is_integer() => Some(float(f64::try_from(value.clone()).ok()?)),
        _ => None,
    }
}

fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match plain(value) {
        Some(text) => Ok(out.write_str(&text)?),
        None => escape_formatter(out, state, value),
    }
}

/// `json.dumps(value, ensure_ascii=False)` with its `indent`, `separators` and `sort_keys`; the
/// result is not HTML, so nothing is escaped in it.
fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = kwargs.get::<Option<Value>>("indent")?.map(|indent| match indent.as_usize() {
        Some(width) => " ".repeat(width.min(16)),
        None => indent.as_str().unwrap_or_default().to_owned(),
    });
    let separators: Option<(String, String)> = match kwargs.get::<Option<Value>>("separators")? {
        None => None,
        Some(pair) => {
            let part = |i| pair.get_item_by_index(i).map(|v| v.to_string());
            Some((part(0)?, part(1)?))
        }
    };
    let (item, key) = separators.unwrap_or_else(|| {
        let item = if indent.is_some() { "," } else { ", " };
        (item.to_owned(), ": ".to_owned())
    });
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    kwargs.assert_all_used()?;
    let layout = Dumps { item, key, indent, depth: 0, filled: false };
    let json = if sort_keys == Some(true) {
        let mut value = serde_json::to_value(value).map_err(unserializable)?;
        value.sort_all_objects();
        dumps(&value, layout)?
    } else {
        dumps(value, layout)?
    };
    Ok(Value::from_safe_string(json))
}

fn unserializable(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::BadSerialization, "cannot be written as JSON").with_source(error)
}

fn dumps(value: &impl Serialize, layout: Dumps) -> Result<String, Error> {
    let mut json = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut json, layout);
    value.serialize(&mut serializer).map_err(unserializable)?;
    Ok(String::from_utf8(json).expect("serde_json writes UTF-8"))
}

/// The layout of `json.dumps`.
struct Dumps {
    /// Stands between items and between a key and its value.
    item: String,
    key: String,
    indent: Option<String>,
    depth: usize,
    /// Whether the container that is open holds something yet.
    filled: bool,
}

impl Dumps {
    fn line<W: ?Sized + io::Write>(&self, out: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        out.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| out.write_all(indent.as_bytes()))
    }

    fn open<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        out.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.line(out)?;
        }
        out.write_all(bracket)
    }

    fn begin<W: ?Sized + io::Write>(&self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.line(out)
    }
}

impl serde_json::ser::Formatter for Dumps {
    fn write_f64<W: ?Sized + io::Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(float(value).as_bytes())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin(out, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
}

/// `repr(x)`: the shortest digits that read back as `x`, with an exponent below 1e-4 and from
/// 1e16 on.
fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "NaN"
        } else if x > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .into();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').expect("written with an exponent");
    match exponent.parse::<i32>().expect("an exponent is a number") {
        -4..16 => {
            let decimal = format!("{x}");
            if decimal.contains('.') { decimal } else { decimal + ".0" }
        }
        exponent => {
            format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
        }
    }
}
