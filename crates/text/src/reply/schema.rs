//! What types a tool's parameters have, and values made to fit them.

use super::json::{self, Object};
use serde_json::Value;
use std::collections::HashMap;

/// How many schemas are looked at for the types of one parameter. References may form circles.
const MAX_SCHEMAS: usize = 256;

/// The tools that a model was offered.
#[derive(Debug, Clone)]
pub(super) struct Tools(HashMap<String, HashMap<String, Types>>);

impl Tools {
    /// Reads OpenAI tool objects. What is not one offers no tool.
    pub fn new(tools: &[Value]) -> Tools {
        let tools = tools.iter().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_owned();
            let schema = function.get("parameters").unwrap_or(&Value::Null);
            let properties = schema.get("properties").and_then(Value::as_object);
            let types = properties.into_iter().flatten();
            let types = types.map(|(name, s)| (name.clone(), Types::of(s, schema)));
            Some((name, types.collect()))
        });
        Tools(tools.collect())
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The types of a tool's parameter; none if either is unknown.
    pub fn types(&self, tool: &str, parameter: &str) -> &Types {
        const UNKNOWN: &Types = &Types { kinds: 0, strings: Vec::new() };
        self.0.get(tool).and_then(|parameters| parameters.get(parameter)).unwrap_or(UNKNOWN)
    }

    /// Names and JSON values of a call's arguments. `None`: they are not an object that every
    /// parser reads.
    pub fn coerce_arguments(&self, call: &Object) -> Option<Vec<(String, String)>> {
        let members = call.arguments()?.into_iter();
        let values = members.map(|(key, value)| {
            let value = self.types(&call.name, &key).coerce_json(value.get())?;
            Some((key, value))
        });
        values.collect()
    }
}

const NULL: u8 = 1;
const BOOLEAN: u8 = 2;
const INTEGER: u8 = 4;
const NUMBER: u8 = 8;
const ARRAY: u8 = 16;
const OBJECT: u8 = 32;
const STRING: u8 = 64;

/// The JSON types that a parameter may have; none if the schema does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Types {
    kinds: u8,
    /// Strings that an `enum` or `const` allows.
    strings: Vec<String>,
}

/// When a value can be delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivery {
    /// As it comes: it is a string.
    String,
    /// As it comes, if it is not null.
    StringOrNull,
    /// When it is complete.
    Whole,
}

/// Whether a value that begins with `text` may be null, spelled as in JSON or Python.
pub(super) fn may_be_null(text: &str) -> bool {
    // The bound is on white space.
    text.len() <= 16 && ["null", "None"].iter().any(|null| null.starts_with(text.trim()))
}

impl Types {
    fn of(schema: &Value, root: &Value) -> Types {
        let mut types = Types { kinds: 0, strings: Vec::new() };
        let mut waiting = vec![schema];
        for _ in 0..MAX_SCHEMAS {
            let Some(schema) = waiting.pop() else { break };
            let Some(schema) = schema.as_object() else { continue };
            if let Some(to) = schema.get("$ref").and_then(Value::as_str) {
                waiting.extend(to.strip_prefix('#').and_then(|to| root.pointer(to)));
            }
            for several in ["anyOf", "oneOf", "allOf"] {
                waiting.extend(schema.get(several).and_then(Value::as_array).into_iter().flatten());
            }
            let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
            let values = values.chain(schema.get("const"));
            let mut value_kinds = 0;
            for value in values {
                value_kinds |= kind(value);
                types.strings.extend(value.as_str().map(str::to_owned));
            }
            types.kinds |= match schema.get("type") {
                Some(Value::String(name)) => named(name),
                Some(Value::Array(names)) => names
                    .iter()
                    .filter_map(Value::as_str)
                    .fold(0, |kinds, name| kinds | named(name)),
                _ if value_kinds != 0 => value_kinds,
                _ if schema.contains_key("properties") => OBJECT,
                _ if schema.contains_key("items") || schema.contains_key("prefixItems") => ARRAY,
                _ => 0,
            };
            if schema.get("nullable") == Some(&Value::Bool(true)) {
                types.kinds |= NULL;
            }
        }
        types
    }

    fn allow(&self, kinds: u8) -> bool {
        self.kinds & kinds != 0
    }

    pub fn delivery(&self) -> Delivery {
        match self.kinds {
            0 | STRING => Delivery::String,
            kinds if kinds == STRING | NULL => Delivery::StringOrNull,
            _ => Delivery::Whole,
        }
    }

    /// The JSON of a value that the model wrote as `text`. Where a string is allowed beside other
    /// types, a text that is a literal of one of those is not a string.
    pub fn coerce(&self, text: &str) -> String {
        if self.strings.iter().any(|s| s == text) {
            return json::string(text);
        }
        self.literal(text.trim()).unwrap_or_else(|| json::string(text))
    }

    /// The JSON of a value of one of the types that is not string.
    fn literal(&self, text: &str) -> Option<String> {
        if let Some((value, json)) = json::literal(text) {
            match value {
                Value::Null => return self.allow(NULL).then_some(json),
                Value::Bool(_) => return self.allow(BOOLEAN).then_some(json),
                Value::Array(_) => return self.allow(ARRAY).then_some(json),
                Value::Object(_) => return self.allow(OBJECT).then_some(json),
                Value::String(_) => return None,
                Value::Number(_) if self.allow(NUMBER) => return Some(json),
                Value::Number(number) => {
                    let digits = json.trim_start_matches('-').bytes().all(|b| b.is_ascii_digit());
                    let whole = number.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 1e15);
                    return match whole {
                        _ if !self.allow(INTEGER) => None,
                        _ if digits => Some(json),
                        Some(whole) => Some((whole as i64).to_string()),
                        None => None,
                    };
                }
            }
        }
        // Spellings that are no literal anywhere count only where nothing else can be meant.
        if self.allow(STRING) {
            return None;
        }
        if self.allow(BOOLEAN) {
            let mut truths = ["true", "false"].into_iter();
            if let Some(truth) = truths.find(|truth| text.eq_ignore_ascii_case(truth)) {
                return Some(truth.to_owned());
            }
        }
        if self.allow(INTEGER | NUMBER)
            && let Ok(integer) = text.parse::<i64>()
        {
            return Some(integer.to_string());
        }
        if self.allow(NUMBER)
            && let Ok(number) = text.parse::<f64>()
        {
            return Some(serde_json::Number::from_f64(number)?.to_string());
        }
        None
    }

    /// A JSON value as it is, unless it is a string and may not be, or must be one. `None` if it
    /// is nested too deep, or has numbers too large, for common parsers.
    fn coerce_json(&self, json: &str) -> Option<String> {
        Some(match serde_json::from_str(json).ok()? {
            Value::String(text) if self.kinds != 0 && !self.allow(STRING) => self.coerce(&text),
            Value::Null | Value::String(_) => json.to_owned(),
            _ if self.kinds == STRING => json::string(json),
            _ => json.to_owned(),
        })
    }
}

fn named(name: &str) -> u8 {
    match name {
        "null" => NULL,
        "boolean" => BOOLEAN,
        "integer" => INTEGER,
        "number" => NUMBER,
        "array" => ARRAY,
        "object" => OBJECT,
        "string" => STRING,
        _ => 0,
    }
}

fn kind(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(number) if number.is_f64() => NUMBER,
        Value::Number(_) => INTEGER,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
        Value::String(_) => STRING,
    }
}
